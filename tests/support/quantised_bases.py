"""Tiny Llamas over quantised bases with LoRA adapters: each format that a library makes.

`BASES` has a factory for each format. The weights are random and equal in each call after the same
seed. Adapters are bf16, and no factor is zero.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations import finegrained_fp8

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
Batches = Callable[[int], dict[str, Any]]
Made = tuple[nn.Module, Batches]


def token_batch(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, 9), generator=made)
    return {"input_ids": tokens, "labels": tokens}


# -- modules of other packages, in arithmetic that every CPU has -----------------------------------
class Packed(torch.autograd.Function):
    """A product with packed weights. Backward decodes them again, from what was saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*packed)
        return F.linear(x, unpacked(*packed).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        packed = ctx.saved_tensors
        return gradient @ unpacked(*packed).to(gradient.dtype), *(None for _ in packed)


def unpacked(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) from int32 words of eight codes along the inputs, as GPTQ has them."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (qweight.unsqueeze(1) >> shifts.view(1, 8, 1)) & 15
    zeros = (qzeros.unsqueeze(2) >> shifts) & 15
    codes = codes.reshape(-1, GROUP, qweight.size(1))
    zeros = zeros.reshape(qzeros.size(0), 1, qweight.size(1))
    return ((codes - zeros) * scales.unsqueeze(1)).reshape(-1, qweight.size(1)).t()


class PackedLinear(nn.Linear):
    """GPTQ's layout: `qweight`, `qzeros` and `scales` are buffers, and there is no weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.register_parameter("bias", None)
        words = {"dtype": torch.int32}
        least, most = -(2**31), 2**31 - 1
        groups = inputs // GROUP
        self.register_buffer("qweight", torch.randint(least, most, (inputs // 8, outputs), **words))
        self.register_buffer("qzeros", torch.randint(least, most, (groups, outputs // 8), **words))
        self.register_buffer("scales", 0.02 * torch.rand(groups, outputs).bfloat16())

    @property
    def weight(self) -> torch.Tensor:
        """PEFT takes the adapters' dtype from it."""
        return self.scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: Any = Packed.apply
        result: torch.Tensor = product(x, self.qweight, self.qzeros, self.scales)
        return result


@contextmanager
def fp8_on_cpus() -> Iterator[None]:
    """Transformers' FP8Linear computes on CPUs, too: its kernels exist on GPUs alone. Its own
    backward decodes the weight in torch on any device. Here forward does so as well."""

    def on_cpu(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: Any, *_: Any
    ) -> torch.Tensor:
        rows = scale.to(x.dtype).repeat_interleave(block[0], 0)
        return F.linear(x, weight.to(x.dtype) * rows.repeat_interleave(block[1], 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_fp8, "fp8_linear", on_cpu)
        yield


@contextmanager
def small_buffers_move() -> Iterator[None]:
    """Buffers of every size move, as large ones do: these models are tiny."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("QUANTISED_BUFFER_BYTES", "MOVED_BUFFER_BYTES"):
            patch.setattr(f"stronghold.model.stored_tensors.{name}", 1)
        yield


# -- one linear in each format ---------------------------------------------------------------------
def four_bits(linear: nn.Linear, **options: Any) -> nn.Module:
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


def float8(linear: nn.Linear) -> nn.Module:
    quantised = finegrained_fp8.FP8Linear(linear.in_features, linear.out_features, BLOCK)
    rows, columns = linear.out_features // BLOCK[0], linear.in_features // BLOCK[1]
    blocks = linear.weight.detach().float().unflatten(1, (columns, BLOCK[1]))
    blocks = blocks.unflatten(0, (rows, BLOCK[0]))
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = blocks / scale[:, None, :, None]
    quantised.weight.data = codes.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    quantised.weight_scale_inv.data = scale
    return quantised.requires_grad_(False)


def packed_buffers(linear: nn.Linear) -> nn.Module:
    return PackedLinear(linear.in_features, linear.out_features)


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
    "packed buffers": packed_buffers,
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


def quantise_blocks(model: Any, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put a quantised module in the place of each linear of the blocks."""
    for holder in list(model.model.layers.modules()):
        for name, child in list(holder.named_children()):
            if type(child) is nn.Linear:
                setattr(holder, name, make(child))


def adapted(kind: str, **options: Any) -> Made:
    """The base with LoRA adapters in bf16."""
    made_base = base(kind, **options)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=TARGETS,
        init_lora_weights=False,
    )
    model = peft.get_peft_model(made_base, settings, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model, token_batch


BASES: dict[str, Callable[[], Made]] = {kind: functools.partial(adapted, kind) for kind in LINEARS}


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.base_model.model.model.layers)
