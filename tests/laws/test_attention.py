"""The level `attention`: what attention's kernels gave is kept, so that none of its products is
computed twice. `test_bits` shows that no bit differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import GPT2Config, GPT2LMHeadModel

from stronghold.private import Replacements
from stronghold.train.activations import intercepted
from tests.models import loss_of
from tests.support.training import config, initialized

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
LAYERS, BATCH, SEQ = 3, 4, 16


def gpt2() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Dropout stands before and after attention, whose fused kernel on the CPU has none."""
    shape = GPT2Config(
        n_embd=32,
        n_layer=LAYERS,
        n_head=2,
        vocab_size=61,
        n_positions=SEQ,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
        attn_pdrop=0.0,
        use_cache=False,
    )

    def make_batch(seed: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 61, (BATCH, SEQ), generator=made)
        return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(0)
    return GPT2LMHeadModel(shape).train(), make_batch


def counted(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """Of the CPU's kernel, which torch's counter does not know."""
    return int(sdpa_flop_count(query, key, value))


@pytest.mark.parametrize("chunk", [None, 1])
def test_none_of_attentions_products_is_computed_twice(chunk: int | None) -> None:
    flops = {}
    for level in ("keep", "recompute", "attention", "attention_offload"):
        section = {"window": 1, "activations": level, **({"chunk": chunk} if chunk else {})}
        model, make_batch = gpt2()
        engine = initialized(model, config(section=section))
        engine(**make_batch(0))  # a chunk is tried once
        with FlopCounterMode(display=False, custom_mapping={KERNEL: counted}) as counter:
            engine.backward(loss_of(engine(**make_batch(0))))
        engine.destroy()
        flops[level] = counter.get_flop_counts()["Global"][KERNEL]
    once = LAYERS * sdpa_flop_count(*[torch.Size((BATCH, 2, SEQ, 16))] * 3)
    assert flops.pop("recompute") == 2 * once
    assert set(flops.values()) == {once}


def test_a_function_that_stands_before_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain)
    ours, name = Replacements(), "scaled_dot_product_attention"
    ours.put(F, name, intercepted)
    ours.put(F, name, intercepted)  # of another engine
    inner = F.scaled_dot_product_attention

    def theirs(*args: Any, **kwargs: Any) -> torch.Tensor:
        return inner(*args, **kwargs)

    F.scaled_dot_product_attention = theirs
    ours.undo()
    assert F.scaled_dot_product_attention is theirs
    ours.put(F, name, intercepted)  # must not call itself through theirs
    query = torch.randn(1, 1, 4, 8)
    assert torch.equal(F.scaled_dot_product_attention(*[query] * 3), plain(*[query] * 3))
    F.scaled_dot_product_attention = inner
    ours.undo()
    assert F.scaled_dot_product_attention is plain
