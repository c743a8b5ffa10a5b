"""Models whose parameters have several dtypes: adapters beside a half-precision base, modules that
Transformers keeps in fp32, and plain modules of odd sizes.

`MIXED[name](half)` gives a factory, as those of `tests.models`. Most weights are of dtype `half`.
"""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

from tests.models.families import llama_of
from tests.support.tiny import tiny
from tests.support.training import Factory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

VOCABULARY = 61
OWN: dict[str, Any] = {"dtypes": "own"}


def token_batch(seed: int, rows: int = 3, length: int = 9) -> dict[str, Any]:
    tokens = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


# -- adapters --------------------------------------------------------------------------------------
def lora_model(half: torch.dtype, seed: int = 0, **options: Any) -> nn.Module:
    """PEFT's default: adapters in fp32 beside a base in half precision. The second factor is not
    zero, so that every factor learns."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        base = llama_of(24, 52, 3, 2, 1, VOCABULARY).to(half)
        chosen = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
        settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **chosen)
        return peft.get_peft_model(base, settings).train()


def lora(half: torch.dtype) -> Factory:
    return lambda seed=0: (lora_model(half, seed), token_batch)


def lora_blocks(model: Any) -> list[nn.Module]:
    return list(model.base_model.model.model.layers)


# -- Transformers ----------------------------------------------------------------------------------
def t5_model(half: torch.dtype, seed: int = 0) -> nn.Module:
    """T5 with `wo` in fp32, one of its _keep_in_fp32_modules."""
    shape = T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(shape).to(half)
    for name, parameter in model.named_parameters():
        if ".wo." in name:
            parameter.data = parameter.data.float()
    return model.train()


def t5(half: torch.dtype) -> Factory:
    return lambda seed=0: (t5_model(half, seed), token_batch)


@functools.cache
def loaded(family: str, half: torch.dtype) -> nn.Module:
    """A tiny model of the family, as `from_pretrained` loads it in half precision: with what the
    family keeps in fp32."""
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = tiny(family)
        assert model is not None, f"{family}: the tiny configuration does not fit"
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=half).train()


def of_family(family: str, half: torch.dtype = torch.bfloat16) -> Factory:
    def factory(seed: int = 0) -> Any:
        model = copy.deepcopy(loaded(family, half))
        if seed:  # other values, which a checkpoint replaces
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        return model, token_batch

    return factory


# -- plain modules ---------------------------------------------------------------------------------
WIDTH = 17


class OddBlock(nn.Module):
    """Trained and frozen parameters of two dtypes by turns, of odd sizes."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 15, dtype=half)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.outer = nn.Linear(15, WIDTH, dtype=half)
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(0.02 * torch.randn(4097, dtype=torch.float32))
        self.kept = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH, dtype=half)
        for frozen in (self.kept, self.fixed):
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, full = self.inner.weight.dtype, self.norm.weight.dtype
        y = self.norm(x.to(full))
        y = y + self.kept(y) + self.table[: y.shape[-1]] + 0.1 * self.table.tanh().mean()
        y = self.outer(F.gelu(self.inner(y.to(half)))) + self.fixed(y.to(half))
        return x + (self.scale * y.to(full)).to(x.dtype)


class Odd(nn.Module):
    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=half)
        self.blocks = nn.ModuleList(OddBlock(half) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=half)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids).float()
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.to(self.head.weight.dtype))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def odd(half: torch.dtype) -> Factory:
    def factory(seed: int = 0) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Odd(half).train(), token_batch

    return factory


def odd_blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)


MIXED: dict[str, Callable[[torch.dtype], Factory]] = {
    "lora": lora,
    "t5": t5,
    "ernie": functools.partial(of_family, "ernie4_5_moe"),
    "odd": odd,
}
BLOCKS: dict[str, Callable[[Any], list[nn.Module]]] = {"lora": lora_blocks, "odd": odd_blocks}
