"""Laws of backward's products: what a trace counts is what a real backward computes.

The oracle runs forward and backward on real tensors under torch's own counter of FLOPs. Attention
is written out, so that its products are counted on both sides.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from stronghold.model.costs import ModelCosts, trace_costs
from stronghold.model.partition import partition

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

BATCH, SEQ = 2, 12
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gpt2": GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=96, n_positions=32),
    "experts": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
# Of experts, only those that are linear modules: PEFT's adapters of fused ones need values.
EVERY_PROJECTION = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "c_proj", "c_fc"),
    *("gate_proj", "up_proj", "down_proj"),
]
Change = Callable[[Any], nn.Module]


def whole(model: Any) -> nn.Module:
    """Every weight trains."""
    return model


def lora(model: Any, targets: str | list[str], **options: Any) -> nn.Module:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=targets, **options)
    adapted: nn.Module = peft.get_peft_model(model, settings)
    return adapted


def last_block(model: Any) -> nn.Module:
    """The last block and the head train."""
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    for parameter in partition(model).streamed[-1].parameters:
        parameter.parameter.requires_grad_(True)
    model.get_output_embeddings().weight.requires_grad_(True)
    return model


CHANGES: dict[str, Change] = {
    "whole": whole,
    "lora": functools.partial(lora, targets=EVERY_PROJECTION),
    "lora of queries": functools.partial(lora, targets=["q_proj", "v_proj", "c_attn"]),
    "last block": last_block,
}


def model_of(name: str, change: str, device: str) -> nn.Module:
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            CONFIGS[name], attn_implementation="eager", experts_implementation="batched_mm"
        )
        return CHANGES[change](model)


def traced(model: nn.Module, dtype: str = "fp32", seq: int = SEQ) -> ModelCosts:
    return trace_costs(model, partition(model), batch=BATCH, seq=seq, dtype=dtype)


def real_flops(model: nn.Module) -> tuple[int, int]:
    """FLOPs of the products of a real forward, and of its backward."""
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 96
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "experts",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gpt2")),
    ],
)
def test_a_trace_counts_the_products_of_a_real_backward(name: str, change: str) -> None:
    costs = traced(model_of(name, change, "meta"))
    forward, backward = real_flops(model_of(name, change, "cpu"))
    assert sum(layer.forward_flops for layer in costs.layers) == forward
    assert sum(layer.backward.product_flops for layer in costs.layers) == backward


def test_backward_of_each_layer_outside_the_blocks_counts_for_it() -> None:
    """The head's, and the embedding's: a gradient of the whole table."""
    embedding, *_, head = traced(model_of("llama", "whole", "meta")).layers
    assert head.backward.product_flops == 2 * head.forward.product_flops
    assert embedding.backward.product_flops == 0.0
    table = 96 * SIZES["hidden_size"] * 4
    assert table < embedding.backward.moved_bytes < 2 * table


def test_a_frozen_block_has_two_thirds_of_the_products_of_a_trained_one() -> None:
    """And three quarters if it is recomputed. The first block's input needs no gradient."""
    model = model_of("llama", "whole", "meta")
    trained = traced(model).layers
    blocks = [layer.index for layer in partition(model).streamed]
    for index in blocks[1:]:
        for parameter in partition(model).layers[index].parameters:
            parameter.parameter.requires_grad_(False)
    frozen = traced(model).layers
    for index in blocks[1:]:
        assert frozen[index].forward_flops == trained[index].forward_flops
        # Attention that is written out has two factors that need a gradient.
        attention = 2 * 2 * BATCH * SEQ * SEQ * SIZES["hidden_size"]
        products = frozen[index].forward_flops - attention
        assert frozen[index].backward.product_flops == products + 2 * attention
    for index in blocks:
        assert trained[index].backward.product_flops == 2 * trained[index].forward_flops


def test_a_frozen_head_in_parts_has_two_products_and_a_trained_one_four(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[Note: four products] of `model.logits`: forward has the logits, and the hidden gradients."""
    monkeypatch.setattr("stronghold.model.logits.LARGE_BYTES", 1)
    model = model_of("llama", "whole", "meta")
    product = 2 * BATCH * SEQ * SIZES["hidden_size"] * SIZES["vocab_size"]
    for trains, products in ((True, 4), (False, 2)):
        model.get_output_embeddings().weight.requires_grad_(trains)
        head = traced(model, seq=SEQ).layers[-1]
        assert head.forward.product_flops == 2 * product
        assert head.backward.product_flops == (products - 2) * product
