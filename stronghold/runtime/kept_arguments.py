"""A call's arguments as they were when it began: copies of what a block may write into.

Owns nothing. Pure. A block that fills a dict, a list or a namespace that it was given would find
its own work there when its forward is run again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn

Leaf = Callable[[Any], Any]
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})
_COPYING = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")


class _Records(Enum):
    """Which objects are data, and copied: namespaces and dataclasses; and those of the user's plain
    classes, but not what such an object refers to, which may be anything."""

    NONE = "none"
    PLAIN = "plain"
    ALL = "all"


class Place:
    """Where a tensor stood that is kept elsewhere, in the order of `taken`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def taken(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A copy of `value` with a `Place` for each tensor, and the tensors."""
    tensors: list[torch.Tensor] = []

    def leave(tensor: torch.Tensor) -> Place:
        tensors.append(tensor)
        return Place(len(tensors) - 1)

    return copied(value, leave), tensors


def put_back(kept: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """A copy of what `taken` kept, with these tensors in their places."""
    return copied(kept, lambda place: tensors[place.index])


def copied(value: Any, leaf: Leaf, *, records: bool = True) -> Any:
    """Copies of all containers and, if wanted, records; `leaf` says what stands for a tensor, or
    for a `Place`. What is in several places is again one. All else, modules too, is as it is.
    """
    return _copied(value, leaf, {}, _Records.ALL if records else _Records.NONE)


def _copied(value: Any, leaf: Leaf, known: dict[int, Any], records: _Records) -> Any:
    kind = type(value)
    if kind in SCALARS:
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, (torch.Tensor, Place)):
        made = known[id(value)] = leaf(value)
        return made

    def inner(part: Any) -> Any:
        return _copied(part, leaf, known, records)

    if isinstance(value, dict):
        made = known[id(value)] = copy.copy(value)
        for key, part in value.items():
            made[key] = inner(part)
    elif isinstance(value, (list, deque)):
        made = known[id(value)] = copy.copy(value)
        for index, part in enumerate(value):
            made[index] = inner(part)
    elif isinstance(value, (set, bytearray)):
        made = known[id(value)] = copy.copy(value)
    elif isinstance(value, tuple) and not isinstance(value, torch.Size):
        parts = [inner(part) for part in value]
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        made = kind(*parts) if hasattr(value, "_fields") else kind(parts)
        known[id(value)] = made
    elif _is_record(value, records):
        made = known[id(value)] = copy.copy(value)
        for name, part in list(_attributes(value)):
            object.__setattr__(
                made,
                name,
                _copied(part, leaf, known, _Records.PLAIN if records is _Records.ALL else records),
            )
    else:
        return value
    return made


def _is_record(value: Any, records: _Records) -> bool:
    kind = type(value)
    if records is _Records.NONE or isinstance(value, (type, nn.Module)) or callable(value):
        return False
    if isinstance(value, _NAMESPACES) or dataclasses.is_dataclass(value):
        return True
    return (
        records is _Records.ALL
        and hasattr(value, "__dict__")
        and not hasattr(kind, "__copy__")
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _COPYING)
    )


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
