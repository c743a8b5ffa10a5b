"""Partition: module -> layers. Says of every parameter which layer it moves with, or that it stays.

Owns the law that every parameter is in exactly one layer, and the register of models that were
built without values, which it does not keep alive. Never reads a parameter's data, never runs or
changes the model. Made once by the training thread; immutable afterwards.

[Note: residents] A block's parameters may leave the GPU only because nothing but the block's own
forward uses them. A parameter that two blocks hold, or a block and something outside, leaves its
block and stays resident, as does every parameter outside the blocks: embedding, final norm, head.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stronghold.errors import ConfigError, StateError
from stronghold.model.blocks import find_blocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedParameter:
    """A parameter with all its names: `name` is its first in `model.named_parameters()`, `aliases`
    has that one and, when it is tied, the others, in registration order."""

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """The unit that moves (`streamed`), or parameters that never do. `name` is the dotted path of
    the block, or of a resident group's first holder; "" is the root. `modules` are those whose
    forward uses the parameters: the block, or every direct holder of a resident parameter.
    `parameters`: each once, trainable first, then frozen, otherwise in registration order."""

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[NamedParameter, ...]
    streamed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """`layers` in the order of registration, in which forward is expected to use them."""

    layers: tuple[Layer, ...]
    model: nn.Module

    @property
    def streamed(self) -> tuple[Layer, ...]:
        """The layers that move."""
        return tuple(layer for layer in self.layers if layer.streamed)


def partition(model: nn.Module, layers: str | Sequence[str] | None = None) -> Partition:
    """Split `model` into layers; `layers` is the config key `stronghold.layers`. ConfigError when
    no blocks are found, a path is unknown, or a parameter cannot be moved (`_check_movable`). A
    later change of `requires_grad` or of the module tree is not seen: partition again."""
    names = _names(model)
    _check_movable(names)
    owners = _owners(model, find_blocks(model, layers))
    holders = _holders(model)
    members: dict[tuple[nn.Module, bool], list[nn.Parameter]] = {}
    for parameter in names:
        block = owners[parameter]
        key = (holders[parameter][0], False) if block is None else (block, True)
        members.setdefault(key, []).append(parameter)
    found: list[Layer] = []
    for module_name, module in model.named_modules():
        for streamed in (False, True):
            mine = members.get((module, streamed), [])
            if not mine:
                continue
            mine.sort(key=lambda parameter: not parameter.requires_grad)
            shared = dict.fromkeys(holder for parameter in mine for holder in holders[parameter])
            found.append(
                Layer(
                    index=len(found),
                    name=module_name,
                    modules=(module,) if streamed else tuple(shared),
                    parameters=tuple(
                        NamedParameter(name=names[p][0], aliases=tuple(names[p]), parameter=p)
                        for p in mine
                    ),
                    streamed=streamed,
                )
            )
    _check_exactly_once(names, found)
    return Partition(layers=tuple(found), model=model)


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with all its names, both in registration order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _holders(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Every parameter with the modules that hold it directly, in registration order."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    return holders


def _owners(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Parameter, nn.Module | None]:
    """Every parameter with the one block that alone uses it, or None: it is resident ([Note:
    residents])."""
    users: dict[nn.Parameter, list[nn.Module | None]] = {}
    for block in blocks:
        for parameter in block.parameters():
            users.setdefault(parameter, []).append(block)
    for module in _outside(model, set(blocks)):
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(None)
    return {parameter: who[0] if len(who) == 1 else None for parameter, who in users.items()}


def _outside(model: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that are reached without entering a block; one that a block holds too is among
    them."""
    seen: set[nn.Module] = set(blocks)
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            waiting.extend(module.children())


def _check_movable(names: dict[nn.Parameter, list[str]]) -> None:
    """ConfigError for what no slab can hold or keep: parameters without a shape yet, parameters
    that are not floating point (quantised), and trainable parameters whose memory overlaps
    another's, a tie that moving would cut."""
    for parameter, (name, *_) in names.items():
        if is_lazy(parameter):
            raise ConfigError(
                f'parameter "{name}" has no shape yet (lazy module): run one forward of the model '
                "before wrapping it."
            )
        if not parameter.is_floating_point():
            raise ConfigError(
                f'parameter "{name}" is {parameter.dtype}, expected a floating-point type: '
                "quantised weights are not supported; what is no weight belongs in a buffer "
                "(register_buffer)."
            )
    # Without an address (the meta device, tensors that wrap others) there is nothing to compare.
    spans = sorted(
        (
            (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), p.device.type, name, p)
            for p, (name, *_) in names.items()
            if p.numel() and p.is_contiguous() and p.data_ptr()
        ),
        key=lambda span: (span[2], span[0]),
    )
    for (_, end, device, first, one), (start, _, other, second, two) in pairwise(spans):
        if device == other and start < end and (one.requires_grad or two.requires_grad):
            raise ConfigError(
                f'parameters "{first}" and "{second}" are two nn.Parameter objects over the same '
                "memory; tie them by assigning the same nn.Parameter to both modules."
            )


def _check_exactly_once(names: dict[nn.Parameter, list[str]], layers: list[Layer]) -> None:
    placed = Counter(named.parameter for layer in layers for named in layer.parameters)
    for parameter, aliases in names.items():
        if placed[parameter] != 1:
            raise StateError(
                f'parameter "{aliases[0]}" is in {placed[parameter]} layers, expected exactly one'
            )
    if len(placed) != len(names):
        raise StateError(f"{len(placed) - len(names)} parameters in layers are not the model's own")


# -- where the values of meta parameters come from ------------------------------------------------


class WeightSource(Protocol):
    """Values by parameter: names change when a model is wrapped."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether it knows the parameter's values."""

    def read_into(self, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Fill contiguous CPU memory of the parameter's shape, cast to the target's dtype."""


_SOURCES: weakref.WeakKeyDictionary[nn.Module, WeightSource] = weakref.WeakKeyDictionary()


def set_source(model: nn.Module, source: WeightSource) -> None:
    """`stronghold.initialize` will fill the model's meta parameters from `source`."""
    _SOURCES[model] = source


def source_of(model: nn.Module) -> WeightSource | None:
    """The source of the model, or of the one that it wraps; None for one that has its values."""
    return next((_SOURCES[module] for module in model.modules() if module in _SOURCES), None)


def forget_source(model: nn.Module) -> None:
    """The model has its values now."""
    for module in model.modules():
        _SOURCES.pop(module, None)


def materialize(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a meta parameter `values`; it stays the same object. `.data` cannot cross from the meta
    device: what the object wraps is exchanged instead."""
    real = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)
