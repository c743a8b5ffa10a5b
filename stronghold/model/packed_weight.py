"""A frozen weight in 4 bits, which torch, Transformers and PEFT see as a weight.

`PackedWeight` has the shape and the dtype of the weight. Inside lie bitsandbytes' nf4 codes and the
largest magnitude of each 64 elements: 0.5625 bytes for an element. bitsandbytes encodes and decodes
them, on a CPU and on a GPU. Its own modules have matrices alone; this class has the fused weights
of experts, too. An engine moves the inner tensors as bytes.

[Note: packed until values are needed]
1. Detached, cloned, moved to a device, transposed in its last two dimensions, or with one expert
   selected, a packed weight stays packed.
2. Each other operator gets the decoded weight, which is freed when the operator has ended.
3. Autograd stands above these operators. So it saves the packed weight for backward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stronghold.errors import ConfigError

KEY = "stronghold.frozen"
BLOCK = 64  # elements that share a largest magnitude
STORED_BYTES = 1 / 2 + 4 / BLOCK  # of an element: its code, and a share of the magnitude
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_EXPERT_DIMS = 3  # (experts, rows, columns) of fused experts
# Transformers' linear layer whose matrix lies the other way round.
CONV1D = "Conv1D"
# PEFT's modules hold the module that they adapt under one of these names, beside their own ones.
ADAPTED = ("base_layer", "original_module")

aten = torch.ops.aten


@functools.cache
def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise ConfigError(
            "nf4 weights are encoded and decoded by bitsandbytes: pip install bitsandbytes"
        ) from error
    return functional


class PackedWeight(Tensor):
    """A frozen weight in nf4.

    codes          uint8 [n / 2, 1]: two elements in a byte
    absmax         fp32 [n / 64]: the largest magnitude of each block of elements
    packed_shape   of the weight that was packed
    is_transposed  the last two dimensions are exchanged now
    """

    codes: Tensor
    absmax: Tensor
    packed_shape: torch.Size
    is_transposed: bool

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        absmax: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        is_transposed: bool = False,
    ) -> PackedWeight:
        outer = torch.Size((*shape[:-2], shape[-1], shape[-2])) if is_transposed else shape
        made: PackedWeight = Tensor._make_wrapper_subclass(
            cls, outer, dtype=dtype, device=codes.device
        )
        made.codes, made.absmax = codes, absmax
        made.packed_shape, made.is_transposed = shape, is_transposed
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "absmax"], (self.packed_shape, self.dtype, self.is_transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any = None, stride: Any = None
    ) -> PackedWeight:
        return PackedWeight(inner["codes"], inner["absmax"], *context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    @torch.no_grad()
    def pack(cls, weight: Tensor) -> PackedWeight:
        """Encode a weight of 2 or 3 dimensions. ConfigError for NaN or infinity in it.

        Experts are encoded one by one, for bitsandbytes takes several times a weight's bytes
        meanwhile. The codes are those of the whole weight if no block crosses two experts.
        """
        is_by_expert = weight.dim() == NUM_EXPERT_DIMS and weight[0].numel() % BLOCK == 0
        codes, absmax = [], []
        for part in weight if is_by_expert else [weight]:
            if not part.is_meta and not part.isfinite().all():
                raise ConfigError("a weight with NaN or infinity cannot be packed to nf4")
            packed, state = _bitsandbytes().quantize_4bit(
                part.contiguous(), quant_type="nf4", blocksize=BLOCK
            )
            codes.append(packed)
            absmax.append(state.absmax)
        return cls(torch.cat(codes), torch.cat(absmax), weight.shape, weight.dtype)

    def decode(self) -> Tensor:
        """The weight that operators compute with."""
        _bitsandbytes()  # registers the operator
        weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            self.codes, self.absmax, BLOCK, "nf4", self.packed_shape, self.dtype
        )
        return weight.transpose(-2, -1) if self.is_transposed else weight

    def changed(
        self,
        change: Callable[[Tensor], Tensor] = lambda inner: inner,
        *,
        dtype: torch.dtype | None = None,
        transpose: bool = False,
    ) -> PackedWeight:
        """The weight around what `change` makes of its inner tensors."""
        is_transposed = self.is_transposed is not transpose
        inner = change(self.codes), change(self.absmax)
        return PackedWeight(*inner, self.packed_shape, dtype or self.dtype, is_transposed)

    def _expert(self, index: int) -> PackedWeight:
        shape = self.packed_shape[1:]
        begin = index * shape.numel()  # narrow counts from the end, too
        codes = self.codes.narrow(0, begin // 2, shape.numel() // 2)
        absmax = self.absmax.narrow(0, begin // BLOCK, shape.numel() // BLOCK)
        return PackedWeight(codes, absmax, shape, self.dtype, self.is_transposed)

    def _write(self, values: Tensor) -> PackedWeight:
        if values.shape != self.shape or self.is_transposed:
            raise ConfigError(f"{self!r}: copy_ got values of shape {list(values.shape)}")
        if not isinstance(values, PackedWeight):
            values = PackedWeight.pack(values.to(self.device, self.dtype))
        packed: PackedWeight = values
        self.codes.copy_(packed.codes)
        self.absmax.copy_(packed.absmax)
        return self

    def _packed_result(self, func: Any, args: Any, kwargs: Any) -> PackedWeight | None:
        """Result of an operator that needs no values. None for all others."""
        last = [self.dim() - 2, self.dim() - 1]
        if func in (aten.detach.default, aten.alias.default):
            return self.changed(func)
        if func is aten.clone.default:
            return self.changed(torch.clone)
        if func is aten.copy_.default:
            return self._write(args[1])
        if func is aten._to_copy.default and kwargs.get("dtype", self.dtype) in DTYPES:
            device = kwargs.get("device") or self.codes.device
            return self.changed(
                lambda inner: inner.to(device, copy=True), dtype=kwargs.get("dtype")
            )
        if func is aten.t.default or (
            func is aten.transpose.int and sorted(d % self.dim() for d in args[1:3]) == last
        ):
            return self.changed(transpose=True)
        if func is aten.select.int and args[1] == 0 and self.dim() == NUM_EXPERT_DIMS:
            return self._expert(args[2]) if self.packed_shape[1:].numel() % BLOCK == 0 else None
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], PackedWeight):
            result = args[0]._packed_result(func, args, kwargs)
            if result is not None:
                return result
            if func._schema.is_mutable:
                raise ConfigError(
                    f"{func} would write into {args[0]!r}, whose values are packed: change what "
                    "decode() returns, and write it back by copy_"
                )
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.decode, (args, kwargs))
        return func(*args, **kwargs)


# A state dict that torch.save has written can be read by torch.load.
torch.serialization.add_safe_globals([PackedWeight])


# -- the weights of a model ------------------------------------------------------------------------
def packable(blocks: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """The weights of linear layers and of fused experts in these blocks, in 16 or 32 bits: the
    module that has each, and its name there. Not those of adapters: a reference, or a random
    projection."""
    for block in blocks:
        for module in _without_adapters(block):
            is_linear = isinstance(module, nn.Linear) or type(module).__name__ == CONV1D
            is_convolution = isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
            for name, parameter in module.named_parameters(recurse=False):
                is_matrix = is_linear and name == "weight" and parameter.dim() == 2
                is_fused = parameter.dim() == NUM_EXPERT_DIMS and not is_convolution
                is_dense = type(parameter.data) is Tensor and parameter.dtype in DTYPES
                if is_dense and (is_matrix or is_fused):
                    yield module, name


def _without_adapters(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all modules in it, without those that adapters have added."""
    yield module
    children = dict(module.named_children())
    adapted = [children[name] for name in ADAPTED if name in children]
    for child in adapted or children.values():
        yield from _without_adapters(child)


def pack_frozen(
    model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype | None = None
) -> None:
    """Pack the frozen weights of linear layers and of fused experts in these blocks, one by one.

    dtype  of the decoded weights. None: their own

    A weight that several modules hold stays as it is. ConfigError if there is none to pack.
    """
    held = (module.parameters(recurse=False) for module in model.modules())
    num_holders: Counter[Tensor] = Counter(chain.from_iterable(held))
    num_packed = 0
    for module, name in list(packable(blocks)):
        weight: Tensor = getattr(module, name)
        if not weight.requires_grad and num_holders[weight] == 1:
            packed = PackedWeight.pack(weight.detach().to(dtype or weight.dtype))
            setattr(module, name, nn.Parameter(packed, requires_grad=False))
            num_packed += 1
    if not num_packed:
        raise ConfigError(
            f'{KEY}: got "nf4", but no block has a frozen weight of a linear layer or of fused '
            "experts in 16 or 32 bits. Freeze the base (requires_grad_(False)) and add adapters, "
            "or leave the key out: weights that are quantised already stream as they are"
        )
