"""Tiny Llamas over quantised bases with LoRA adapters: each format that a library makes.

`BASES` has a factory for each format. The weights are random and equal in each call after the same
seed. Adapters are bf16, and no factor is zero.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

from tests.models.families import llama_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import torchao.quantization as torchao

VOCABULARY = 61
HIDDEN, INNER = 64, 128
BLOCK = (32, 64)  # of FP8 scales
GROUP = 32  # of packed integers that share a scale
BATCH = 2
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "v_proj", "o_proj"]
Batches = Callable[[int], dict[str, Any]]
Made = tuple[nn.Module, Batches]


def token_batch(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, 9), generator=made)
    return {"input_ids": tokens, "labels": tokens}


# -- modules of other packages, in arithmetic that every CPU has -----------------------------------
@contextmanager
def fp8_on_cpus() -> Iterator[None]:
    """Transformers' FP8 modules compute on CPUs, too: their kernels exist on GPUs alone. Their own
    backward decodes the weight in torch on any device. Here forward does so as well."""

    def linear(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: Any, *_: Any
    ) -> torch.Tensor:
        rows = scale.to(x.dtype).repeat_interleave(block[0], 0)
        return F.linear(x, weight.to(x.dtype) * rows.repeat_interleave(block[1], 1))

    def of_experts(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, ends: Any, _: Any, block: Any
    ) -> torch.Tensor:
        bounds = [0, *ends.tolist()]
        parts = [
            linear(x[begin:end], weight[expert], scale[expert], block)
            for expert, (begin, end) in enumerate(itertools.pairwise(bounds))
        ]
        return torch.cat(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_fp8, "fp8_linear", linear)
        patch.setattr(finegrained_fp8, "fp8_grouped_matmul", of_experts)
        yield


# -- one linear in each format ---------------------------------------------------------------------
def four_bits(linear: nn.Linear, **options: Any) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    quantised = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=torch.bfloat16,
        **options,
    ).bfloat16()
    quantised.load_state_dict(linear.state_dict())
    return quantised.to("cpu")


def eight_bits(linear: nn.Linear) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    quantised = bitsandbytes.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
    )
    quantised.load_state_dict(linear.state_dict())
    return quantised.to("cpu")


def by_torchao(linear: nn.Linear, make_config: Callable[[], Any]) -> nn.Module:
    torchao.quantize_(linear, make_config())
    return linear.requires_grad_(False)


def by_torchao_nf4(linear: nn.Linear) -> nn.Module:
    module = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = module.to_nf4(linear.weight.detach(), 64, 32)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def float8_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a weight, (rows, columns), or (experts, rows, columns)."""
    rows, columns = weight.size(-2) // BLOCK[0], weight.size(-1) // BLOCK[1]
    blocks = weight.detach().float().unflatten(-1, (columns, BLOCK[1]))
    blocks = blocks.unflatten(-3, (rows, BLOCK[0]))
    scale = blocks.abs().amax((-3, -1)) / torch.finfo(torch.float8_e4m3fn).max
    codes = blocks / scale[..., :, None, :, None]
    return codes.flatten(-2).flatten(-3, -2).to(torch.float8_e4m3fn), scale


def float8(linear: nn.Linear) -> nn.Module:
    quantised = finegrained_fp8.FP8Linear(linear.in_features, linear.out_features, BLOCK)
    quantised.weight.data, quantised.weight_scale_inv.data = float8_weight(linear.weight)
    return quantised.requires_grad_(False)


def float8_experts(experts: Any, config: Any) -> nn.Module:
    """Transformers' fused experts in FP8, as its quantiser makes them.

    Its decorator writes on the class. So the class is a new one.
    """
    made: Any = type("FP8Experts", (finegrained_fp8.FP8Experts,), {})
    interface = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    decorated: Any = use_experts_implementation(made, experts_interface=interface)
    quantised: Any = decorated(config, block_size=BLOCK)
    for name in ("gate_up_proj", "down_proj"):
        codes, scale = float8_weight(getattr(experts, name))
        getattr(quantised, name).data = codes
        getattr(quantised, f"{name}_scale_inv").data = scale
    return quantised


def int4_groups() -> Any:
    return torchao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=torchao.PerGroup(GROUP)
    )


LINEARS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "nf4": functools.partial(four_bits, quant_type="nf4", compress_statistics=False),
    "nf4 double": functools.partial(four_bits, quant_type="nf4"),
    "nf4 in bf16": functools.partial(four_bits, quant_type="nf4", quant_storage=torch.bfloat16),
    "fp4": functools.partial(four_bits, quant_type="fp4"),
    "int8": eight_bits,
    "torchao int8": functools.partial(by_torchao, make_config=torchao.Int8WeightOnlyConfig),
    "torchao int4": functools.partial(by_torchao, make_config=int4_groups),
    "torchao float8": functools.partial(by_torchao, make_config=torchao.Float8WeightOnlyConfig),
    "torchao nf4": by_torchao_nf4,
    "FP8Linear": float8,
}


# -- models ----------------------------------------------------------------------------------------
def base(kind: str, *, layers: int = 3, bias: bool = False) -> nn.Module:
    """A bf16 Llama whose blocks have linears of the format. `bias`: of its attention."""
    model = llama_of(HIDDEN, INNER, layers, 2, 1, VOCABULARY, attention_bias=bias).bfloat16()
    quantise_blocks(model, LINEARS[kind])
    # Transformers sets these, and PEFT then takes its classes for bitsandbytes.
    model.is_loaded_in_4bit = "Linear4bit" in str(model)
    model.is_loaded_in_8bit = "Linear8bitLt" in str(model)
    return model.requires_grad_(False)


def base_of_experts(implementation: str, *, layers: int = 3) -> nn.Module:
    """A bf16 Qwen3 with experts. The linears of its blocks are FP8Linear, its experts FP8Experts.

    `implementation`: "eager" calls one expert after the other, "grouped_mm" all in one product.
    """
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HIDDEN // 2,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        attn_implementation="eager",
        experts_implementation=implementation,
    )
    model: Any = Qwen3MoeForCausalLM(config).bfloat16()
    quantise_blocks(model, float8)
    for block in model.model.layers:
        block.mlp.experts = float8_experts(block.mlp.experts, config)
    return model.requires_grad_(False)


def quantise_blocks(model: Any, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put a quantised module in the place of each linear of the blocks."""
    for holder in list(model.model.layers.modules()):
        for name, child in list(holder.named_children()):
            if type(child) is nn.Linear:
                setattr(holder, name, make(child))


def adapted(
    make_base: Callable[..., nn.Module],
    *args: Any,
    targets: list[str] = TARGETS,
    dora: bool = False,
    **options: Any,
) -> Made:
    """The base `make_base(*args, **options)` with LoRA adapters in bf16 on `targets`."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=targets,
        init_lora_weights=False,
        use_dora=dora,
    )
    made = make_base(*args, **options)
    model = peft.get_peft_model(made, settings, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model, token_batch


BASES: dict[str, Callable[[], Made]] = {
    **{kind: functools.partial(adapted, base, kind) for kind in LINEARS},
    "FP8Experts": functools.partial(adapted, base_of_experts, "eager", targets=ATTENTION),
    "FP8Experts grouped": functools.partial(
        adapted, base_of_experts, "grouped_mm", targets=ATTENTION
    ),
}


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.base_model.model.model.layers)
