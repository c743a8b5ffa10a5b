"""Models with frozen weights that an engine packs, and the same models with the decoded weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from stronghold.model.packed_formats import FORMATS
from stronghold.model.packing import choose_packed
from stronghold.model.partition import partition
from tests.models.families import llama_of
from tests.support.training import DTYPES, Factory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

VOCABULARY = 61


def token_batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def adapted(base: nn.Module, targets: list[str]) -> nn.Module:
    """LoRA whose second factor is not zero, so that every factor learns."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False
    )
    model: nn.Module = peft.get_peft_model(base, settings)
    return model


def llama() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    base = llama_of(48, 100, 4, 2, 1, VOCABULARY)
    return adapted(base, ["q_proj", "v_proj", "down_proj"]), token_batch


def experts() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Fused experts, whose weights have three dimensions."""
    settings = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return adapted(Qwen3MoeForCausalLM(settings), ["q_proj", "o_proj"]), token_batch


def mixed() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """fp32 adapters over a bf16 base. The same values in every process."""
    torch.manual_seed(0)
    base = llama_of(48, 100, 3, 2, 1, VOCABULARY).to(torch.bfloat16)
    return adapted(base, ["q_proj", "down_proj"]), token_batch


MODELS: dict[str, Factory] = {"llama": llama, "experts": experts}


def packed_names(model: nn.Module, name: str, dtype: torch.dtype) -> list[str]:
    """Names of the weights that an engine packs."""
    chosen = choose_packed(partition(model), FORMATS[name], lambda tensor: dtype)
    return [packed.name for packed in chosen.values()]


def with_decoded_weights(factory: Factory, name: str, precision: str) -> Factory:
    """The factory of the same model with the weights that format `name` decodes to."""

    def make() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
        model, make_batch = factory()
        dtype = DTYPES[precision]
        parameters = dict(model.named_parameters())
        for parameter_name in packed_names(model, name, dtype):
            parameter = parameters[parameter_name]
            parameter.data = decoded(parameter.detach().to(dtype), name)
        return model, make_batch

    return make


def decoded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The weight, packed and decoded in plain torch."""
    packed_format = FORMATS[name]
    described = packed_format.inner(tuple(weight.shape))
    inner = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in described}
    packed_format.encode(weight, inner)
    result = torch.empty_like(weight)
    packed_format.decode(inner, result)
    return result
