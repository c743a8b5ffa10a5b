"""docs/rollouts.md: its programs run, in its order, with a tiny model and receivers that keep one
of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
from deepspeed.runtime.rollout import RolloutRequest, SamplingConfig
from torch import nn

from tests.models import loss_of
from tests.models.families import llama_of
from tests.support.training import config, initialized
from tests.tools.test_readme import fenced

PAGE = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
VOCABULARY = 61


class Receiver:
    """A generator's side of the exchange, by vLLM's and by SGLang's method."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.longest = 0

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        for name, tensor in weights:
            own[name].copy_(tensor)

    def update_weights_from_tensor(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.longest = max(self.longest, len(named_tensors))
        self.load_weights(named_tensors)


def batched(items: Iterator[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """`itertools.batched` of Python 3.12."""
    while some := tuple(itertools.islice(items, count)):
        yield some


def base() -> Any:
    torch.manual_seed(0)
    return llama_of(24, 52, 3, 2, 1, VOCABULARY, use_cache=True)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))


def test_the_programs_of_the_page_run() -> None:
    blocks = "".join(fenced(PAGE, "python")).replace("from itertools import batched\n", "")
    targets = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    engine = initialized(
        peft.get_peft_model(base(), targets), config(section={"window": 1, "dtypes": "own"})
    )
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    engine.backward(loss_of(engine(**batch)))
    engine.step()
    server = Receiver(peft.get_peft_model(base(), targets))
    names = {
        "engine": engine,
        "tokenizer": SimpleNamespace(pad_token_id=0, eos_token_id=1),
        "generator": server,
        "server": server,
        "batched": batched,
        "torch": torch,
    }
    separate, casting = blocks.split("generator.load_weights(engine.named_weights(dtype")
    exec(separate, names)
    request = RolloutRequest(prompt_ids=tokens(1), prompt_attention_mask=torch.ones_like(tokens(1)))
    sampled = names["rollout"].generate(request, SamplingConfig(max_new_tokens=3, temperature=0.0))
    assert sampled.input_ids.shape == (2, 12)
    assert server.longest == 16
    for name, value in engine.module.state_dict().items():
        assert torch.equal(server.model.state_dict()[name], value), name
    exec("generator.load_weights(engine.named_weights(dtype" + casting, names)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(server.model.state_dict()[name], value.bfloat16().float()), name
    engine.backward(loss_of(engine(**batch)))
    engine.step()
    engine.destroy()
