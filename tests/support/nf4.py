"""Tiny models over a base that is packed to nf4 by `stronghold.model`, with LoRA adapters.

The weights are random, and equal in each call after the same seed.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from stronghold.model.loading import NF4Config
from stronghold.model.packed_weight import PackedWeight, pack_frozen
from stronghold.model.partition import find_blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

VOCABULARY = 61
ATTENTION = ["q_proj", "v_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Batches = Callable[[int], dict[str, Any]]
Made = tuple[nn.Module, Batches]

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "use_cache": False,
    "attn_implementation": "eager",
}


def dense() -> Any:
    return LlamaConfig(**SIZES)


def experts(implementation: str) -> Any:
    """`implementation`: "eager" calls one expert after the other, "grouped_mm" all in one
    product."""
    return Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation=implementation,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "experts": functools.partial(experts, "eager"),
    "grouped experts": functools.partial(experts, "grouped_mm"),
}


def token_batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def base(kind: str) -> Any:
    """The model in bf16."""
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.bfloat16)


@functools.cache
def saved(kind: str) -> Any:
    """A temporary folder with the model's safetensors. It goes with the process."""
    folder = tempfile.TemporaryDirectory()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base(kind).save_pretrained(folder.name)
    return folder


def loaded(kind: str) -> Any:
    """The base, packed while Transformers loads it."""
    return from_folder(kind, quantization_config=NF4Config())


def from_folder(kind: str, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        Path(saved(kind).name),
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="grouped_mm" if kind == "grouped experts" else "eager",
        **settings,
    )


def adapted(model: Any, kind: str) -> Made:
    """LoRA in bf16 on attention, and on the experts, if there are some. No factor is zero."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=ATTENTION,
        target_parameters=FUSED if "experts" in kind else None,
        init_lora_weights=False,
    )
    adapted_model = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    for parameter in adapted_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return adapted_model.train(), token_batch


def over_loaded(kind: str) -> Made:
    return adapted(loaded(kind), kind)


def over_bf16(kind: str) -> Made:
    """A bf16 base, which the engine packs."""
    return adapted(base(kind).requires_grad_(False), kind)


def over_packed(kind: str) -> Made:
    """The same base, packed without an engine."""
    model, batches = over_bf16(kind)
    pack_frozen(model, find_blocks(model))
    return model, batches


class Negated(torch.Tensor):
    """-weight: a wrapper around a wrapper."""

    weight: torch.Tensor

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Negated:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        made.weight = weight
        return made

    def __tensor_flatten__(self) -> Any:
        return ["weight"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Negated:
        return Negated(inner["weight"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return Negated(func(args[0].weight))
        args, kwargs = tree_map_only(Negated, lambda x: -x.weight, (args, kwargs or {}))
        return func(*args, **kwargs)


def over_nested() -> Made:
    model, batches = over_packed("dense")
    for name, weight in list(model.named_parameters()):
        if isinstance(weight, PackedWeight):
            holder, _, attribute = name.rpartition(".")
            nested = nn.Parameter(Negated(weight.data), requires_grad=False)
            setattr(model.get_submodule(holder), attribute, nested)
    return model, batches


LOADED: dict[str, Callable[[], Made]] = {
    kind: functools.partial(over_loaded, kind) for kind in CONFIGS
}
FROZEN: dict[str, tuple[Callable[[], Made], Callable[[], Made]]] = {
    kind: (functools.partial(over_bf16, kind), functools.partial(over_packed, kind))
    for kind in CONFIGS
}
"""Factories: of the bf16 model, and of the packed one."""
