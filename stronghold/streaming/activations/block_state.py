"""The state that a block's forward may change: a snapshot, compared by identity.

Owns no copy of anything. A snapshot lists the tables that a block reaches: the attributes of its
submodules, their buffers and hooks, lists, dicts, sets and plain objects. It keeps a reference to
every item in them, the version of every tensor, and the state of every random generator. Two
snapshots are equal if every item is the same object, so that one comparison takes some 20 us. Never
reads the values of a tensor. The training thread enters in forward, and autograd's in backward.

[Note: outside of a snapshot] A snapshot does not see globals, closures, the elements of large NumPy
arrays, and the inside of objects of C. `recompute` compares values for these ([Note: run again]).
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import operator
import pickle
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.streaming.guards import serves
from stronghold.streaming.interrupts import run_and_restore
from stronghold.streaming.patches.tensors import version_of

MAX_DEPTH = 5  # containers and objects inside one another, from an attribute on
MAX_ITEMS = 1024  # of a longer container the length alone is compared
MAX_ARRAY_BYTES = 4096  # of a larger NumPy array the identity alone is compared

_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size})
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
_THREAD = type(threading.main_thread()).__mro__[1]  # threading.Thread: devices/ alone makes them
_NO_STATE = (*_CODE, nn.Module, enum.Enum, types.ModuleType, logging.Logger, _THREAD)
_ABSENT = object()
BEFORE = "_forward_pre_hooks"
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward_"))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Torch's global hooks; those before a forward come first.
GLOBAL_HOOKS: list[dict[Any, Any]] = [
    getattr(nn.modules.module, f"_global{name}")
    for name in (BEFORE, "_forward_hooks", *_HOOKS[1:3])
]


class _Slots:
    """The attributes of an object without a `__dict__`."""

    def __init__(self, target: Any, names: tuple[str, ...]) -> None:
        self.target, self.names = target, names

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self.target, name, _ABSENT) for name in self.names)


class _Items(NamedTuple):
    """The items of a table at one moment; `keys` is None where the items have none."""

    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]

    def are(self, others: _Items) -> bool:
        """True if these are the same objects."""
        same = len(self.values) == len(others.values) and self.keys == others.keys
        return same and all(map(operator.is_, self.values, others.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """One container, by reference, and its items when the snapshot was taken."""

    name: str
    target: Any
    items: _Items
    holds_hooks: bool

    def difference(self) -> str | None:
        """The name of the first item that has changed."""
        now = _items(self.target)
        if now.keys is None or self.items.keys is None:
            same = len(now.values) == len(self.items.values)
            same = same and not any(map(_differ, self.items.values, now.values))
            return None if same else self.name
        if self.holds_hooks:
            return None if self.items.are(now) else self.name
        before = dict(zip(self.items.keys, self.items.values, strict=True))
        after = dict(zip(now.keys, now.values, strict=True))
        for key in {**before, **after}:
            if _differ(before.get(key, _ABSENT), after.get(key, _ABSENT)):
                return f"{self.name}.{key}"
        return None

    def fill(self, items: _Items, *, keep_code: bool = False) -> None:
        """Make these the table's items. An item in both is never missing, unless it is a hook.

        `keep_code` leaves functions as they are, and hooks of a closed engine away.
        """
        target, (keys, values) = self.target, items
        kind: Any = OrderedDict if isinstance(target, OrderedDict) else dict
        if isinstance(target, (set, deque)):
            target.clear()
            target.update(values) if isinstance(target, set) else target.extend(values)
        elif isinstance(target, list):
            target[:] = values
        elif isinstance(target, _Slots):
            for name, value in zip(target.names, values, strict=True):
                if value is not _ABSENT:
                    object.__setattr__(target.target, name, value)
        else:
            held = dict(zip(keys or (), values, strict=True))
            if self.holds_hooks:
                if keep_code:
                    held = {k: hook for k, hook in held.items() if k in target or not serves(hook)}
                target.clear()
            elif keep_code:
                held = {key: value for key, value in held.items() if not isinstance(value, _CODE)}
                held |= {key: value for key, value in target.items() if isinstance(value, _CODE)}
            kind.update(target, held)  # some subclasses refuse their own
            for key in target.keys() - held.keys():
                kind.__delitem__(target, key)


def _items(target: Any) -> _Items:
    if isinstance(target, dict):
        return _Items(tuple(target), tuple(target.values()))
    return _Items(None, tuple(target))


def _differ(before: Any, now: Any) -> bool:
    """True if two items differ for a forward, which never reads what stands for a function."""
    if before is now:
        return False
    if type(before) is type(now) and type(before) in _SCALARS:
        return bool(before != now)
    if type(before) is tuple and type(now) is tuple and len(before) == len(now):
        return any(map(_differ, before, now))
    return not all(item is _ABSENT or isinstance(item, _CODE) for item in (before, now))


class BlockState:
    """A snapshot of `module`, of all that it reaches, and of what `arguments` reach.

    Modules among the arguments, and behind attributes that are no submodules, are not looked at.
    """

    def __init__(self, module: nn.Module | None, arguments: Any = ()) -> None:
        self._known: set[int] = set()
        self._tables: list[_Table] = []
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        self._states: list[tuple[str, Callable[[], Any], Any]] = []
        self._long: list[tuple[str, Any, int]] = []
        self._others: list[Any] = []  # tables of values, and dicts whose keys a forward may change
        if module is not None:
            for hooks in GLOBAL_HOOKS:
                self._add("torch's global hooks", hooks, holds_hooks=True)
            for part in module.modules():
                self._add_module(part)
        for argument in arguments:
            self._walk(f"an argument ({type(argument).__name__})", argument, MAX_DEPTH)
        filled = [table.target for table in self._tables if table.items.values]
        self._dicts: list[dict[Any, Any]] = [each for each in filled if isinstance(each, dict)]
        self._others += [each for each in filled if not isinstance(each, dict)]
        self._empty = [table.target for table in self._tables if not table.items.values]
        self._values = self._present_values()
        self._versions = [version for _, _, version in self._tensors]

    @property
    def has_graph(self) -> bool:
        """Whether one of the tensors belongs to a graph."""
        return any(tensor.grad_fn is not None for _, tensor, _ in self._tensors)

    # -- the snapshot -----------------------------------------------------------------------------
    def _add(self, name: str, target: Any, *, holds_hooks: bool = False) -> None:
        items = _items(target)
        table = _Table(name=name, target=target, items=items, holds_hooks=holds_hooks)
        self._tables.append(table)

    def _add_module(self, part: nn.Module) -> None:
        attributes, name = vars(part), type(part).__name__
        self._known.add(id(part))
        self._add(name, attributes)
        self._add(f"{name} (submodules)", attributes["_modules"])
        for hooks in _HOOKS:
            self._add(f"{name}.{hooks}", attributes[hooks], holds_hooks=True)
        self._add(name, attributes["_buffers"])
        for key, value in (*attributes["_buffers"].items(), *attributes.items()):
            if key not in _OF_EVERY_MODULE:
                self._walk(f"{name}.{key}", value, MAX_DEPTH)

    def _walk(self, name: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _SCALARS or id(value) in self._known or isinstance(value, _NO_STATE):
            return
        self._known.add(id(value))
        if isinstance(value, torch.Tensor):
            # A parameter's values are the engine's, which refuses a backward with newer ones.
            if not isinstance(value, nn.Parameter) and not value.is_inference():
                self._tensors.append((name, value, version_of(value)))
        elif (read := _state_of(value)) is not None:
            self._states.append((name, read, read()))
        elif isinstance(value, (dict, list, tuple, set, deque)):
            self._walk_container(name, value, depth)
        elif depth and not kind.__module__.startswith(("torch._", "stronghold.")):
            self._walk_object(name, value, depth)

    def _walk_container(self, name: str, value: Any, depth: int) -> None:
        if len(value) > MAX_ITEMS:
            self._long.append((name, value, len(value)))
            return
        if not isinstance(value, tuple):
            self._add(name, value)
        if isinstance(value, dict):
            self._others.append(value)
        for item in (value.values() if isinstance(value, dict) else value) if depth else ():
            self._walk(name, item, depth - 1)

    def _walk_object(self, name: str, value: Any, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._add(name, attributes)
            for key, item in attributes.items():
                self._walk(f"{name}.{key}", item, depth - 1)
        slots = [
            slot
            for kind in type(value).__mro__
            for slot in getattr(kind, "__slots__", ())
            if isinstance(slot, str) and slot not in ("__dict__", "__weakref__")
        ]
        if slots and not type(value).__module__.startswith(("torch", "numpy", "builtins")):
            self._add(name, _Slots(value, tuple(slots)))
            for slot in slots:
                self._walk(f"{name}.{slot}", getattr(value, slot, None), depth - 1)

    # -- comparing --------------------------------------------------------------------------------
    def _present_values(self) -> list[Any]:
        return [
            *itertools.chain.from_iterable(map(dict.values, self._dicts)),
            *itertools.chain.from_iterable(self._others),
        ]

    def _is_untouched(self) -> bool:
        """True if every table has the items that it had. False may mean that they are equal."""
        now = self._present_values()
        return (
            len(now) == len(self._values)
            and all(map(operator.is_, now, self._values))
            and not any(self._empty)
        )

    def _written(self) -> str | None:
        """The name of a tensor that was written in place, or of a long container."""
        if [version_of(tensor) for _, tensor, _ in self._tensors] != self._versions:
            return next(name for name, one, version in self._tensors if version_of(one) != version)
        return next((name for name, one, length in self._long if len(one) != length), None)

    def difference(self) -> str | None:
        """The name of something that is not as it was; None if all is."""
        if not self._is_untouched():
            for table in self._tables:
                if (name := table.difference()) is not None:
                    return name
        if (name := self._written()) is not None:
            return name
        return next((name for name, read, state in self._states if read() != state), None)

    # -- the block as it was ----------------------------------------------------------------------
    def run(self, work: Callable[[], object]) -> None:
        """Call `work` while all tables have the items that they had, and put back what they have
        now. ConfigError for a tensor that was written in place since: nothing has its old values.
        """
        self._refuse_written("since its block's forward")
        present = None
        if not self._is_untouched():
            present = [_items(table.target) for table in self._tables]
        run_and_restore(
            functools.partial(self._run, work, present),
            functools.partial(self._restore, present),
        )
        self._refuse_written("when its block's forward ran again, and not before")

    def _run(self, work: Callable[[], object], present: list[_Items] | None) -> None:
        if present is not None:
            for table in self._tables:
                if table.difference() is not None:
                    table.fill(table.items, keep_code=True)
        work()

    def _restore(self, present: list[_Items] | None) -> None:
        if present is None and self._is_untouched():
            return
        before = [table.items for table in self._tables] if present is None else present
        for table, items in zip(self._tables, before, strict=True):
            if not _items(table.target).are(items):
                table.fill(items)

    def _refuse_written(self, when: str) -> None:
        name = self._written()
        if name is not None:
            raise ConfigError(
                f"{name} was written in place {when}, so that it cannot be recomputed: write it "
                'before the forward or after the backward, or set stronghold.activations to "keep" '
                'or "offload"'
            )


def _state_of(value: Any) -> Callable[[], Any] | None:
    """Reads the state of a random generator, or the bytes of a small array; None for all else."""
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate
    if isinstance(value, np.random.Generator):
        return lambda: pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return lambda: pickle.dumps(value.get_state(legacy=False))
    if isinstance(value, bytearray):
        return lambda: bytes(value)
    if isinstance(value, np.ndarray) and value.nbytes <= MAX_ARRAY_BYTES:
        return value.tobytes
    return None
