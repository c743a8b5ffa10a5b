"""Stored tensors: the dense tensors of a model that move as bytes.

1. An ordinary parameter is one stored tensor.
2. A quantised parameter of a library (bitsandbytes, torchao) is several: its inner tensors
   (`inner_tensors`): packed codes, absolute maxima, a code book. They are frozen.
3. The engine packs a frozen weight if the config has `stronghold.frozen`. Then its packed tensors
   (`packed_formats`) are stored in its place.
4. Buffers are none: they stay on the device. A module that keeps quantised weights in buffers, as
   GPTQ's and AWQ's do, is refused.

The engine points each stored tensor at its place: `tensor.data = view`. Reads no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import (
    InnerTensor,
    decoded,
    format_of,
    has_codes,
    inner_tensors,
    settle,
)
from stronghold.model.packed_formats import PackedFormat

_CODES_IN_BUFFERS = "qweight"  # the buffer's name in the modules of GPTQ and AWQ


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
    quantised  the ones that a library quantised or that are codes, and all others of their modules
    fixed      those, and packed tensors: no rule casts them to another dtype
    aliases    further tensor objects of a library over the memory of a stored tensor
    num_weights  number of weights that a tensor of a quantised parameter stands for: all of the
               parameter's for the first one, 0 for the others
    packed     parameters whose packed tensors are listed in their place
    """

    names: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    quantised: set[torch.Tensor] = field(default_factory=set)
    fixed: set[torch.Tensor] = field(default_factory=set)
    _of_module: dict[nn.Module, list[torch.Tensor]] = field(default_factory=dict)
    aliases: dict[torch.Tensor, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    num_weights: dict[torch.Tensor, int] = field(default_factory=dict)
    packed: Mapping[nn.Parameter, PackedParameter] = field(default_factory=dict)

    def held_by(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """The stored tensors of the parameters that the module holds directly."""
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
    """List the model's stored tensors. ConfigError for a parameter of an unknown class, and for
    quantised weights in buffers."""
    settle(model)
    stored = StoredTensors(packed=packed)
    for prefix, module in model.named_modules(remove_duplicate=False):
        held: dict[torch.Tensor, None] = {}
        dot = "." if prefix else ""
        if _CODES_IN_BUFFERS in dict(module.named_buffers(recurse=False)):
            raise ConfigError(
                f"{prefix or 'the model'} is a {type(module).__name__}, which keeps quantised "
                f"weights in buffers ({_CODES_IN_BUFFERS}), as GPTQ and AWQ do: buffers do not "
                "stream. Load the model unquantised, and quantise it with bitsandbytes, torchao or "
                'stronghold.frozen "nf4"'
            )
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
        stored._of_module[module] = list(held)
        if has_codes(module):
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
