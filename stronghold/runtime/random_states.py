"""Random generators that a block may draw from, beside torch's own, and their states.

Owns nothing. Python's and NumPy's and the user's generators: as attributes of the block and its
parts, in its arguments, and as names that its code reads. Those of torch, one per device, are the
business of torch's checkpoint.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

Names = tuple[tuple[dict[str, Any], str], ...]

OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes that hold nothing of the user's
# Python's own, which `random.random()` draws from.
PYTHONS: random.Random = random._inst
_read: weakref.WeakKeyDictionary[type, Names] = weakref.WeakKeyDictionary()


def generators(parts: Iterable[nn.Module], arguments: Any) -> list[Any]:
    """Those that a forward of a module with these parts may draw from, each once."""
    kinds = _kinds()
    interesting = kinds | {dict, list, tuple}
    found: dict[int, Any] = {id(PYTHONS): PYTHONS}
    _look(arguments, kinds, found, depth=3)
    for part in parts:
        here = vars(part)
        for name in here.keys() - OF_EVERY_MODULE:
            if type(here[name]) in interesting:
                _look(here[name], kinds, found, depth=1)
        kind = type(part)
        read = _read.get(kind)
        if read is None:
            read = _read[kind] = tuple(_names_read(kind, kinds))
        for names, name in read:
            _look(_drawn_from(names.get(name)), kinds, found, depth=1)
    return list(found.values())


def _look(value: Any, kinds: frozenset[type], found: dict[int, Any], *, depth: int) -> None:
    kind = type(value)
    if kind in kinds:
        found[id(value)] = value
    elif depth and (kind is dict or kind is list or kind is tuple):
        for part in value.values() if kind is dict else value:
            _look(part, kinds, found, depth=depth - 1)


def states(of: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each generator with its state now."""
    return [(generator, _state(generator)) for generator in of]


def set_states(kept: Iterable[tuple[Any, Any]]) -> None:
    """The generators go on from these states."""
    for generator, state in kept:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _kinds() -> frozenset[type]:
    """Types of generators; importing NumPy is not ours to do."""
    found: set[type] = {torch.Generator, random.Random}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found |= {numpy.Generator, numpy.RandomState}
    return frozenset(found)


def _drawn_from(value: Any) -> Any:
    """NumPy's global generator for the module that draws from it; others are what they are."""
    if isinstance(value, types.ModuleType) and value.__name__ in ("numpy", "numpy.random"):
        return sys.modules["numpy.random"].mtrand._rand
    return value


def _names_read(kind: type, kinds: frozenset[type]) -> Iterator[tuple[dict[str, Any], str]]:
    """The generators that the code of the class's methods names: where it looks, and the name."""
    for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for function in vars(owner).values():
            if not isinstance(function, types.FunctionType):
                continue
            code = function.__code__
            places = [(function.__globals__, name) for name in _global_names(code)]
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # a name that has no value yet
                    places.append(({name: cell.cell_contents}, name))
            for names, name in places:
                found: dict[int, Any] = {}
                _look(_drawn_from(names.get(name)), kinds, found, depth=1)
                if found:
                    yield names, name


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Also of functions that are made inside."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _global_names(inner)
