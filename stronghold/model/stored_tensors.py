"""Stored tensors: the dense tensors of a model that move as bytes.

1. An ordinary parameter is one stored tensor.
2. A quantised parameter of a library (bitsandbytes, torchao) is several: its inner tensors
   (`inner_tensors`): packed codes, absolute maxima, a code book. They are frozen.
3. The engine packs a frozen weight if the config has `stronghold.frozen`. Then its packed tensors
   (`packed_formats`) are stored in its place.
4. A quantised module may keep its weights in buffers, as GPTQ and AWQ do. Its large buffers are
   stored tensors, too, and frozen.

The engine points each stored tensor at its place: `tensor.data = view`. Reads no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from stronghold.model.inner_tensors import (
    InnerTensor,
    decoded,
    format_of,
    has_codes,
    inner_tensors,
    settle,
)
from stronghold.model.packed_formats import PackedFormat

# Integers in a buffer that is at least this large are quantised weights.
QUANTISED_BUFFER_BYTES = 1 << 16
# Buffers of a quantised module that are at least this large move.
MOVED_BUFFER_BYTES = 1 << 12
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedParameter:
    """A frozen parameter whose packed tensors are stored in its place.

    `dtype`: the dtype that computes. `inner`: the packed tensors by name. They have no memory until
    the engine points them at some.
    """

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    format: PackedFormat
    inner: Mapping[str, torch.Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return tuple(self.parameter.shape)


NOTHING_PACKED: Mapping[nn.Parameter, PackedParameter] = MappingProxyType({})


def tensor_has_memory(tensor: torch.Tensor) -> bool:
    """False on the meta device, and for a packed tensor that points at no memory yet."""
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes


def pack(
    name: str, parameter: nn.Parameter, packed_format: PackedFormat, dtype: torch.dtype
) -> PackedParameter:
    """Describe a parameter that will be packed. Nothing is read or allocated.

    `dtype`: the dtype that computes.
    """
    inner = {}
    for described in packed_format.inner(tuple(parameter.shape)):
        one_item = torch.empty(1, dtype=described.dtype)
        inner[described.name] = one_item.expand(described.shape)
    return PackedParameter(
        name=name, parameter=parameter, dtype=dtype, format=packed_format, inner=inner
    )


@dataclass(slots=True, eq=False)
class StoredTensors:
    """The stored tensors of a model.

    names      all names of each, both in registration order
    buffers    the ones that are buffers
    quantised  the ones that a library quantised or that are codes, and all others of their modules
    fixed      those, and packed tensors: no rule casts them to another dtype
    aliases    further tensor objects of a library over the memory of a stored tensor
    num_weights  number of weights that a tensor of a quantised parameter stands for: all of the
               parameter's for the first one, 0 for the others
    packed     parameters whose packed tensors are listed in their place
    """

    names: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    buffers: set[torch.Tensor] = field(default_factory=set)
    quantised: set[torch.Tensor] = field(default_factory=set)
    fixed: set[torch.Tensor] = field(default_factory=set)
    _of_module: dict[nn.Module, list[torch.Tensor]] = field(default_factory=dict)
    aliases: dict[torch.Tensor, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    num_weights: dict[torch.Tensor, int] = field(default_factory=dict)
    packed: Mapping[nn.Parameter, PackedParameter] = field(default_factory=dict)

    def held_by(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """The stored tensors of the parameters and buffers that the module holds directly."""
        return self._of_module.get(module, ())

    def packed_among(self, tensors: Iterable[torch.Tensor]) -> tuple[PackedParameter, ...]:
        """The packed parameters whose packed tensors are among `tensors`."""
        among = set(tensors)
        return tuple(
            packed
            for packed in self.packed.values()
            if any(inner in among for inner in packed.inner.values())
        )


def stored_tensors(
    model: nn.Module, packed: Mapping[nn.Parameter, PackedParameter] = NOTHING_PACKED
) -> StoredTensors:
    """List the model's stored tensors. ConfigError for a parameter of an unknown class."""
    settle(model)
    stored = StoredTensors(packed=packed)
    for prefix, module in model.named_modules(remove_duplicate=False):
        held: dict[torch.Tensor, None] = {}
        dot = "." if prefix else ""
        is_quantised = has_codes(module)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{prefix}{dot}{name}"
            inner = _inner(full_name, parameter, packed)
            has_format = parameter not in packed and format_of(parameter) is not None
            if has_format or parameter in packed:
                numel = math.prod(decoded(parameter).shape)
                stored.num_weights.update(dict.fromkeys((tensor.tensor for tensor in inner), 0))
                stored.num_weights[inner[0].tensor] = numel
            for tensor in inner:
                inner_name = f"{full_name}.{tensor.name}" if tensor.name else full_name
                stored.names.setdefault(tensor.tensor, []).append(inner_name)
                held[tensor.tensor] = None
                if tensor.aliases:
                    stored.aliases[tensor.tensor] = tensor.aliases
        for name, buffer in _moved_buffers(module):
            stored.names.setdefault(buffer, []).append(f"{prefix}{dot}{name}")
            stored.buffers.add(buffer)
            held[buffer] = None
            is_quantised = True
        stored._of_module[module] = list(held)
        if is_quantised:
            stored.quantised.update(held)
    of_packed = (inner for described in packed.values() for inner in described.inner.values())
    stored.fixed.update(stored.quantised, of_packed)
    return stored


def _inner(
    name: str, parameter: nn.Parameter, packed: Mapping[nn.Parameter, PackedParameter]
) -> tuple[InnerTensor, ...]:
    """The stored tensors of a parameter: itself, its inner tensors, or its packed tensors."""
    if parameter not in packed:
        return inner_tensors(parameter, name)
    inner = packed[parameter].inner
    return tuple(InnerTensor(name=key, tensor=tensor) for key, tensor in inner.items())


def _moved_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, buffer) of the large buffers of a module that keeps quantised weights in buffers."""
    buffers = list(module.named_buffers(recurse=False))
    is_quantised = any(
        buffer.dtype in _INTEGERS and buffer.nbytes >= QUANTISED_BUFFER_BYTES
        for _, buffer in buffers
    )
    if not is_quantised:
        return []
    return [(name, buffer) for name, buffer in buffers if buffer.nbytes >= MOVED_BUFFER_BYTES]
