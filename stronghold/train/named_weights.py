"""Gives the newest weights of a live engine to another program, one tensor at a time.

A generation server takes (name, tensor) pairs after each optimizer step. This file owns the order
in which it gets them, and the copies of one tensor (of one adapted module, if adapters are merged)
that it makes on the way. There is no second copy of the model. The training thread alone enters,
between two passes.

[Note: one step]
1. A layer is given out when its update has ended. Updates run in the order of the model, so the
   server loads the first layers while the last ones are updated.
2. Hazard: a program takes a step, or loads a checkpoint, and goes on with the same iterator. The
   server would then have layers of two steps.
3. `num_changes` counts steps and loads. The iterator raises when it has changed.

[Note: merged]
1. PEFT merges in place. The base's weights may be those of other ranks or of files, and a merge in
   bf16 that is undone leaves other bits.
2. So copies take the places of one module's parameters, PEFT merges into them, and the module gets
   its parameters back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import format_of
from stronghold.model.packed_weight import PackedWeight
from stronghold.private import with_own_storage
from stronghold.train.layer import point

if TYPE_CHECKING:
    from stronghold.train.job import Job

NamedTensor = tuple[str, torch.Tensor]
# PEFT's names: its prefix of the base's names, and the method of modules that are not merged as
# layers are.
BASE_PREFIX = "base_model.model."
MERGE_SPECIAL = "unload_and_optionally_merge_module"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device and dtype of the tensors that are given out. None: as they are.

    Codes and scales of a quantised weight keep their dtypes.
    """

    device: torch.device | None
    dtype: torch.dtype | None

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or one copy. Waits for the copy."""
        dtype = self.dtype if tensor.is_floating_point() else None
        return tensor.to(device=self.device, dtype=dtype)


def named_weights(
    job: Job, placement: Placement, *, merges_adapters: bool
) -> Iterator[NamedTensor]:
    """Return an iterator over (name, newest values) of the model's state dict.

    See `StrongholdEngine.named_weights`. Raises ConfigError within a forward or backward, and while
    arrays belong to two steps.
    """
    job.check_process("engine.named_weights")
    job.trainer.check()
    job.trainer.check_between_passes("engine.named_weights")
    groups = _groups(job, merges_adapters=merges_adapters)
    return _give(job, groups, placement, job.trainer.num_changes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HeldTensors:
    """Parameters and buffers that a module holds directly, by the names that the server gets."""

    tensors: tuple[NamedTensor, ...]

    def pairs(self, device: torch.device | None) -> Iterator[NamedTensor]:
        """Yield them as the module has them."""
        yield from self.tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _QuantisedModule:
    """A module with weights that a library has quantised. Its state dict has more than its
    parameters: scales, code books, and how to read them.

    `prefix`: of the names that the server gets, with a dot at its end.
    """

    prefix: str
    module: nn.Module

    def pairs(self, device: torch.device | None) -> Iterator[NamedTensor]:
        """Yield the tensors of its state dict, without those of modules below it."""
        below = tuple(f"{self.prefix}{name}." for name, _ in self.module.named_children())
        for name, value in self.module.state_dict(prefix=self.prefix).items():
            if isinstance(value, torch.Tensor) and not name.startswith(below):
                yield name, value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AdaptedModule:
    """A module that PEFT has put in the place of the base's module `name`.

    `names`: by identity of the base's parameters, the names that the server gets.
    """

    name: str
    module: Any
    names: dict[int, str]

    def pairs(self, device: torch.device | None) -> Iterator[NamedTensor]:
        """Merge the active adapters into copies, on `device` or where the parameters lie. Yield the
        base's tensors."""
        with _copied(self.module, device) as originals, _merge_undone(self.module):
            merged = _merge(self.module)
            tensors = [
                (self.names.get(originals.get(id(tensor), 0), f"{self.name}.{key}"), tensor)
                for key, tensor in (*merged.named_parameters(), *_persistent_buffers(merged))
            ]
        while tensors:
            yield tensors.pop(0)


_Member = _HeldTensors | _QuantisedModule | _AdaptedModule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LayerGroup:
    """Tensors of neighbouring modules of the same layers.

    `layers`: the numbers of these layers.
    """

    layers: tuple[int, ...]
    members: tuple[_Member, ...]


def _give(
    job: Job, groups: Sequence[_LayerGroup], placement: Placement, num_changes: int
) -> Iterator[NamedTensor]:
    for group in groups:
        _check_same_step(job, num_changes)
        job.settle(group.layers)
        for member in group.members:
            keeps_dtypes = isinstance(member, _QuantisedModule)
            placed = replace(placement, dtype=None) if keeps_dtypes else placement
            for name, tensor in member.pairs(placement.device):
                _check_same_step(job, num_changes)
                # No name refers to the copy, so that the caller alone keeps it alive.
                yield name, placed.place(_shown(tensor))


def _check_same_step(job: Job, num_changes: int) -> None:
    """Raise ConfigError if weights have changed since the iterator was made ([Note: one step])."""
    if job.trainer.num_changes != num_changes:
        raise ConfigError(
            "engine.named_weights: a step was taken, or weights were loaded, since this iterator "
            "was made: its layers would be of two steps. Call engine.named_weights again"
        )


def _shown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that autograd does not know.

    A tensor in host memory has a storage of its own size. So a program that saves or shares it
    takes no other parameter along.
    """
    values = _dense(tensor)
    is_plain = type(values) is torch.Tensor and values.is_cpu and values.is_contiguous()
    if is_plain and values.numel():
        point(values, with_own_storage(values.detach()))
    return values


# -- the model's tensors ---------------------------------------------------------------------------
def _groups(job: Job, *, merges_adapters: bool) -> list[_LayerGroup]:
    """The tensors of the model's state dict, in registration order. Tied ones come once, under
    their first name."""
    model = job.partition.model
    adapted = _adapted_modules(model) if merges_adapters else {}
    of_adapted = {id(part) for module in adapted for part in module.modules()}
    names = {id(p): name for name, p in model.named_parameters()}
    if merges_adapters:
        names = {key: _base_name(name) for key, name in names.items()}
    given = {id(p) for module in adapted for p in _merged_parameters(module)}
    layer_of = job.layer_of_tensors()
    members: list[tuple[tuple[int, ...], _Member]] = []
    for prefix, module in model.named_modules():
        if module in adapted:
            layers = _layers_of(job, layer_of, module.parameters())
            names_of_base = {
                id(p): names[id(p)] for p in _merged_parameters(module) if id(p) in names
            }
            one = _AdaptedModule(name=_base_name(prefix), module=module, names=names_of_base)
            members.append((layers, one))
        elif id(module) not in of_adapted and _is_quantised(module):
            layers = _layers_of(job, layer_of, module.parameters(recurse=False))
            name = _base_name(prefix) if merges_adapters else prefix
            dot = "." if name else ""
            members.append((layers, _QuantisedModule(prefix=name + dot, module=module)))
        elif id(module) not in of_adapted:
            tensors = tuple(_held_tensors(module, prefix, given))
            if merges_adapters:
                tensors = tuple((_base_name(name), tensor) for name, tensor in tensors)
            layers = _layers_of(job, layer_of, (tensor for _, tensor in tensors))
            if tensors:
                members.append((layers, _HeldTensors(tensors=tensors)))
    return [
        _LayerGroup(layers=layers, members=tuple(member for _, member in neighbours))
        for layers, neighbours in itertools.groupby(members, key=itemgetter(0))
    ]


def _layers_of(
    job: Job, layer_of: dict[int, int], tensors: Iterable[torch.Tensor]
) -> tuple[int, ...]:
    """The layers to wait for before these tensors are read.

    All layers, for a parameter that a library has put together from stored tensors. None, for a
    buffer that stays on the device.
    """
    layers = set()
    for tensor in tensors:
        if id(tensor) in layer_of:
            layers.add(layer_of[id(tensor)])
        elif isinstance(tensor, nn.Parameter):
            return tuple(range(len(job.parameters)))
    return tuple(sorted(layers))


def _held_tensors(module: nn.Module, prefix: str, given: set[int]) -> Iterator[NamedTensor]:
    """Yield the parameters and persistent buffers that the module holds directly, and that are not
    in `given`. Adds them to `given`."""
    parameters = module.named_parameters(recurse=False)
    for name, tensor in (*parameters, *_own_buffers(module)):
        if id(tensor) not in given:
            given.add(id(tensor))
            yield (f"{prefix}.{name}" if prefix else name), tensor


def _own_buffers(module: nn.Module) -> list[NamedTensor]:
    transient = module._non_persistent_buffers_set
    buffers = module.named_buffers(recurse=False)
    return [(name, buffer) for name, buffer in buffers if name not in transient]


def _is_quantised(module: nn.Module) -> bool:
    """True if the module itself holds a weight that a library has quantised."""
    parameters = module.parameters(recurse=False)
    return any(_has_library_format(parameter) for parameter in parameters)


def _has_library_format(parameter: nn.Parameter) -> bool:
    """True for a weight that a library has quantised. The engine decodes its own packed ones."""
    return format_of(parameter) is not None and not isinstance(parameter, PackedWeight)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph. A packed weight is decoded."""
    return tensor.decode() if isinstance(tensor, PackedWeight) else tensor.detach()


def _persistent_buffers(module: nn.Module) -> Iterator[NamedTensor]:
    for prefix, part in module.named_modules():
        for name, buffer in _own_buffers(part):
            yield (f"{prefix}.{name}" if prefix else name), buffer


# -- adapters --------------------------------------------------------------------------------------
def _adapted_modules(model: nn.Module) -> dict[nn.Module, None]:
    """PEFT's modules in the model, without those inside others. ConfigError for adapters that
    cannot be merged."""
    adapted: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        config = getattr(module, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise ConfigError(
                f"engine.named_weights(merge_adapters=True): {name or 'the model'} learns a "
                "prompt, which no weight can hold: leave merge_adapters out"
            )
        is_adapted = hasattr(module, MERGE_SPECIAL) or (
            hasattr(module, "base_layer") and hasattr(module, "merge")
        )
        if is_adapted and module not in inside:
            _refuse_quantised(name, module)
            adapted[module] = None
            inside.update(module.modules())
    return adapted


def _refuse_quantised(name: str, module: Any) -> None:
    """Raise ConfigError if the base's weights are a library's quantised ones."""
    for key, parameter in module.named_parameters():
        is_code = not parameter.is_floating_point() or parameter.itemsize == 1
        if is_code or _has_library_format(parameter):
            raise ConfigError(
                f"engine.named_weights(merge_adapters=True): {name}.{key} is quantised "
                f"({type(parameter).__name__}, {parameter.dtype}), and a merge adds to "
                "floating-point weights: leave merge_adapters out and give the server the "
                "adapters, or pack a bf16 base with stronghold.frozen, which is decoded here"
            )


def _merged_parameters(module: Any) -> list[nn.Parameter]:
    """The base's parameters into which the adapters are merged: none if a trained copy takes the
    place of the base's module."""
    return [] if hasattr(module, MERGE_SPECIAL) else list(module.get_base_layer().parameters())


def _merge(module: Any) -> nn.Module:
    """Merge as PEFT's `merge_and_unload` does. Returns the module that stays."""
    with torch.no_grad():
        if hasattr(module, MERGE_SPECIAL):
            special: nn.Module = getattr(module, MERGE_SPECIAL)(
                merge=True, safe_merge=False, adapter_names=None
            )
            return special
        module.merge(safe_merge=False, adapter_names=None)
        base: nn.Module = module.get_base_layer()
        return base


@contextlib.contextmanager
def _copied(module: nn.Module, device: torch.device | None) -> Iterator[dict[int, int]]:
    """Context manager: copies take the places of the module's parameters and buffers.

    `device`: of the copies. None: that of the module's first parameter, the base's weight. Yields
    the identity of the original by that of its copy.
    """
    tables = [part._parameters for part in module.modules()]
    places = [
        (table, key, parameter)
        for table in tables
        for key, parameter in table.items()
        if parameter is not None
    ]
    buffers = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    if device is None and places:
        device = places[0][2].device
    copies: dict[int, nn.Parameter] = {}
    for _, _, parameter in places:
        if id(parameter) not in copies:
            values = _dense(parameter).to(device=device, copy=True)
            copies[id(parameter)] = nn.Parameter(values, requires_grad=False)
    try:
        for table, key, parameter in places:
            table[key] = copies[id(parameter)]
        for part, name, buffer in buffers:
            setattr(part, name, buffer.to(device=device))
        yield {id(copy): original for original, copy in copies.items()}
    finally:
        for table, key, parameter in places:
            table[key] = parameter
        for part, name, buffer in buffers:
            setattr(part, name, buffer)


@contextlib.contextmanager
def _merge_undone(module: nn.Module) -> Iterator[None]:
    """Context manager: PEFT's lists of merged adapters are as before at its end."""
    lists = [
        merged
        for part in module.modules()
        if isinstance(merged := getattr(part, "merged_adapters", None), list)
    ]
    before = [list(merged) for merged in lists]
    try:
        yield
    finally:
        for merged, names in zip(lists, before, strict=True):
            merged[:] = names


def _base_name(name: str) -> str:
    """The name that a tensor has in the base without PEFT."""
    return name.replace(BASE_PREFIX, "", 1).replace(".base_layer", "")
