"""Snapshots of the state that a block's forward may change, compared by identity.

Owns references, and no copy of a tensor. A snapshot lists the tables that a block reaches: the
attributes of its submodules, their buffers and hooks, lists, dicts, sets and plain objects. It
keeps a reference to every item in them, the version of every tensor, and the state of every random
generator. Two snapshots are equal if every item is the same object. So one comparison takes some
20 us. Never reads the values of a tensor. The training thread enters in forward, and autograd's
thread in backward.

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
MAX_ITEMS = 1024  # a longer container is compared by its length alone
MAX_ARRAY_BYTES = 4096  # a larger NumPy array is compared by identity alone

# Compared by value.
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size})
# Functions and classes: a forward never reads a change of them as a value.
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
# threading.Thread: devices/ alone makes them
_THREAD = type(threading.main_thread()).__mro__[1]
# Objects that a snapshot does not enter.
_NO_STATE = (*_CODE, nn.Module, enum.Enum, types.ModuleType, logging.Logger, _THREAD)
_ABSENT = object()
BEFORE = "_forward_pre_hooks"
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward_"))
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Torch's global hooks. The hooks before a forward come first.
_GLOBAL_NAMES = (BEFORE, "_forward_hooks", *_HOOKS[1:3])
GLOBAL_HOOKS: list[dict[Any, Any]] = [
    getattr(nn.modules.module, f"_global{name}") for name in _GLOBAL_NAMES
]


class _Slots:
    """The attributes of an object without a `__dict__`."""

    def __init__(self, target: Any, names: tuple[str, ...]) -> None:
        self.target = target
        self.names = names

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self.target, name, _ABSENT) for name in self.names)


class _TableItems(NamedTuple):
    """The items of a table at one moment; `keys` is None where the items have none."""

    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]

    def are(self, others: _TableItems) -> bool:
        """True if these are the same objects under the same keys."""
        if len(self.values) != len(others.values) or self.keys != others.keys:
            return False
        return all(map(operator.is_, self.values, others.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """One container, by reference, and its items at the moment of the snapshot."""

    name: str
    target: Any
    items: _TableItems
    holds_hooks: bool

    def difference(self) -> str | None:
        """Return the name of the first item that has changed, or None."""
        now = _items(self.target)
        if now.keys is None or self.items.keys is None:
            has_changed = len(now.values) != len(self.items.values)
            has_changed = has_changed or any(map(_differ, self.items.values, now.values))
            return self.name if has_changed else None
        if self.holds_hooks:
            return None if self.items.are(now) else self.name
        before = dict(zip(self.items.keys, self.items.values, strict=True))
        after = dict(zip(now.keys, now.values, strict=True))
        for key in {**before, **after}:
            if _differ(before.get(key, _ABSENT), after.get(key, _ABSENT)):
                return f"{self.name}.{key}"
        return None

    def fill(self, items: _TableItems, *, keep_code: bool = False) -> None:
        """Make these the table's items.

        An item that is in the table before and after is never missing, unless it is a hook.
        `keep_code` leaves functions as they are, and puts back no hook of a closed engine.
        """
        target, values = self.target, items.values
        if isinstance(target, set):
            target.clear()
            target.update(values)
        elif isinstance(target, deque):
            target.clear()
            target.extend(values)
        elif isinstance(target, list):
            target[:] = values
        elif isinstance(target, _Slots):
            for name, value in zip(target.names, values, strict=True):
                if value is not _ABSENT:
                    object.__setattr__(target.target, name, value)
        else:
            self._fill_dict(items, keep_code=keep_code)

    def _fill_dict(self, items: _TableItems, *, keep_code: bool) -> None:
        target = self.target
        new = dict(zip(items.keys or (), items.values, strict=True))
        if self.holds_hooks:
            if keep_code:
                new = _without_closed_hooks(new, target)
            target.clear()
        elif keep_code:
            new = _with_code_of(target, new)
        # Some subclasses refuse their own methods: call those of the base.
        base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
        base.update(target, new)
        for key in target.keys() - new.keys():
            base.__delitem__(target, key)


def _without_closed_hooks(hooks: dict[Any, Any], present_hooks: dict[Any, Any]) -> dict[Any, Any]:
    """Return the hooks without those of ours that are present no more."""
    result = {}
    for key, hook in hooks.items():
        if key in present_hooks or not serves(hook):
            result[key] = hook
    return result


def _with_code_of(present: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return `items` with the functions and classes of `present` in place of their own."""
    result = {}
    for key, value in items.items():
        if not isinstance(value, _CODE):
            result[key] = value
    for key, value in present.items():
        if isinstance(value, _CODE):
            result[key] = value
    return result


def _items(target: Any) -> _TableItems:
    if isinstance(target, dict):
        return _TableItems(tuple(target), tuple(target.values()))
    return _TableItems(None, tuple(target))


def _differ(before: Any, now: Any) -> bool:
    """True if two items differ for a forward. Functions never do."""
    if before is now:
        return False
    if type(before) is type(now) and type(before) in _SCALARS:
        return bool(before != now)
    if type(before) is tuple and type(now) is tuple and len(before) == len(now):
        return any(map(_differ, before, now))
    return not all(item is _ABSENT or isinstance(item, _CODE) for item in (before, now))


class _TensorVersion(NamedTuple):
    """A tensor, and its version counter at the moment of the snapshot."""

    name: str
    tensor: torch.Tensor
    version: int


class _LongContainer(NamedTuple):
    """A container of more than `MAX_ITEMS` items, and its length."""

    name: str
    container: Any
    length: int


class _ReadState(NamedTuple):
    """The state of a random generator or a small array, and the function that reads it."""

    name: str
    read: Callable[[], Any]
    state: Any


class BlockState:
    """A snapshot of everything that `module` and `arguments` reach.

    Modules among the arguments are skipped, and so are modules behind attributes that are no
    submodules.
    """

    def __init__(self, module: nn.Module | None, arguments: Any = ()) -> None:
        self._visited: set[int] = set()  # ids
        self._tables: list[_Table] = []
        self._tensors: list[_TensorVersion] = []
        self._states: list[_ReadState] = []
        self._long: list[_LongContainer] = []
        # Tables of values, and dicts whose keys a forward may change.
        self._others: list[Any] = []
        if module is not None:
            for hooks in GLOBAL_HOOKS:
                self._add("torch's global hooks", hooks, holds_hooks=True)
            for submodule in module.modules():
                self._add_module(submodule)
        for argument in arguments:
            self._walk(f"an argument ({type(argument).__name__})", argument, MAX_DEPTH)
        self._dicts: list[dict[Any, Any]] = []
        self._empty: list[Any] = []
        for table in self._tables:
            if not table.items.values:
                self._empty.append(table.target)
            elif isinstance(table.target, dict):
                self._dicts.append(table.target)
            else:
                self._others.append(table.target)
        self._values = self._present_values()
        self._versions = [version for _, _, version in self._tensors]

    @property
    def has_graph(self) -> bool:
        """True if one of the tensors belongs to a graph."""
        return any(tensor.grad_fn is not None for _, tensor, _ in self._tensors)

    # -- the snapshot -----------------------------------------------------------------------------
    def _add(self, name: str, target: Any, *, holds_hooks: bool = False) -> None:
        items = _items(target)
        table = _Table(name=name, target=target, items=items, holds_hooks=holds_hooks)
        self._tables.append(table)

    def _add_module(self, module: nn.Module) -> None:
        attributes, name = vars(module), type(module).__name__
        self._visited.add(id(module))
        self._add(name, attributes)
        self._add(f"{name} (submodules)", attributes["_modules"])
        for hooks in _HOOKS:
            self._add(f"{name}.{hooks}", attributes[hooks], holds_hooks=True)
        self._add(name, attributes["_buffers"])
        for key, value in (*attributes["_buffers"].items(), *attributes.items()):
            if key not in _MODULE_ATTRIBUTES:
                self._walk(f"{name}.{key}", value, MAX_DEPTH)

    def _walk(self, name: str, value: Any, depth: int) -> None:
        value_type = type(value)
        if value_type in _SCALARS or id(value) in self._visited or isinstance(value, _NO_STATE):
            return
        self._visited.add(id(value))
        if isinstance(value, torch.Tensor):
            # The engine writes parameters, and refuses a backward with newer values.
            if not isinstance(value, nn.Parameter) and not value.is_inference():
                self._tensors.append(_TensorVersion(name, value, version_of(value)))
        elif (read := _state_reader(value)) is not None:
            self._states.append(_ReadState(name, read, read()))
        elif isinstance(value, (dict, list, tuple, set, deque)):
            self._walk_container(name, value, depth)
        elif depth and not value_type.__module__.startswith(("torch._", "stronghold.")):
            self._walk_object(name, value, depth)

    def _walk_container(self, name: str, value: Any, depth: int) -> None:
        if len(value) > MAX_ITEMS:
            self._long.append(_LongContainer(name, value, len(value)))
            return
        if not isinstance(value, tuple):
            self._add(name, value)
        if isinstance(value, dict):
            self._others.append(value)
        if not depth:
            return
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            self._walk(name, item, depth - 1)

    def _walk_object(self, name: str, value: Any, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._add(name, attributes)
            for key, item in attributes.items():
                self._walk(f"{name}.{key}", item, depth - 1)
        slots = _slot_names(type(value))
        if slots and not type(value).__module__.startswith(("torch", "numpy", "builtins")):
            self._add(name, _Slots(value, tuple(slots)))
            for slot in slots:
                self._walk(f"{name}.{slot}", getattr(value, slot, None), depth - 1)

    # -- comparing --------------------------------------------------------------------------------
    def _present_values(self) -> list[Any]:
        """Return all items of all tables that had items."""
        return [
            *itertools.chain.from_iterable(map(dict.values, self._dicts)),
            *itertools.chain.from_iterable(self._others),
        ]

    def _is_untouched(self) -> bool:
        """True if every table has its old items. False may mean that they are equal."""
        now = self._present_values()
        return (
            len(now) == len(self._values)
            and all(map(operator.is_, now, self._values))
            and not any(self._empty)
        )

    def _written(self) -> str | None:
        """Return the name of a tensor that was written in place, or of a long container."""
        if [version_of(tensor) for _, tensor, _ in self._tensors] != self._versions:
            for name, tensor, version in self._tensors:
                if version_of(tensor) != version:
                    return name
        for name, container, length in self._long:
            if len(container) != length:
                return name
        return None

    def difference(self) -> str | None:
        """Return the name of something that has changed; None if nothing has."""
        if not self._is_untouched():
            for table in self._tables:
                if (name := table.difference()) is not None:
                    return name
        if (name := self._written()) is not None:
            return name
        for name, read, state in self._states:
            if read() != state:
                return name
        return None

    # -- the block as it was ----------------------------------------------------------------------
    def run(self, work: Callable[[], object]) -> None:
        """Call `work` while all tables have their old items, and then restore the present ones.

        ConfigError for a tensor that was written in place since: nothing has its old values.
        """
        self._refuse_written("since its block's forward")
        present = None
        if not self._is_untouched():
            present = [_items(table.target) for table in self._tables]
        run_and_restore(
            functools.partial(self._run, work, present), functools.partial(self.restore, present)
        )
        self._refuse_written("when its block's forward ran again, and not before")

    def _run(self, work: Callable[[], object], present: list[_TableItems] | None) -> None:
        if present is not None:
            for table in self._tables:
                if table.difference() is not None:
                    table.fill(table.items, keep_code=True)
        work()

    def restore(self, present: list[_TableItems] | None = None) -> None:
        """Give all tables the items that they had (or `present`). Safe to call twice."""
        if present is None and self._is_untouched():
            return
        restored = [table.items for table in self._tables] if present is None else present
        for table, items in zip(self._tables, restored, strict=True):
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


def _slot_names(value_type: type) -> list[str]:
    """The names in `__slots__` of a type and its bases."""
    names = []
    for base in value_type.__mro__:
        for name in getattr(base, "__slots__", ()):
            if isinstance(name, str) and name not in ("__dict__", "__weakref__"):
                names.append(name)
    return names


# -- states of generators and arrays ---------------------------------------------------------------
def _state_reader(value: Any) -> Callable[[], Any] | None:
    """Return a function that reads the state of a random generator, or the bytes of a small array.

    None for all other values.
    """
    if isinstance(value, torch.Generator):
        return functools.partial(_torch_state, value)
    if isinstance(value, random.Random):
        return value.getstate
    if isinstance(value, np.random.Generator):
        return functools.partial(_numpy_state, value)
    if isinstance(value, np.random.RandomState):
        return functools.partial(_old_numpy_state, value)
    if isinstance(value, bytearray):
        return functools.partial(bytes, value)
    if isinstance(value, np.ndarray) and value.nbytes <= MAX_ARRAY_BYTES:
        return value.tobytes
    return None


def _torch_state(generator: torch.Generator) -> list[int]:
    state: list[int] = generator.get_state().tolist()
    return state


def _numpy_state(generator: np.random.Generator) -> bytes:
    return pickle.dumps(generator.bit_generator.state)


def _old_numpy_state(generator: np.random.RandomState) -> bytes:
    return pickle.dumps(generator.get_state(legacy=False))
