"""A block's forward that is run again in backward.

Owns what the second run needs to be the first one again, as long as autograd's graph may recompute:
the arguments, with copies of what a block may write into, the block as it was (buffers, counters,
flags, lists, hooks), the states of random generators, autocast, the default device; and what the
second run finds, until autograd takes it. Running statistics, power iterations and counters must
not move twice in a step, and a forward that is run again must see what it saw: its own call's,
whichever calls came since, and though it grew a table or registered one. Owns also the hooks by
which Transformers' models make no caches. Entered by the training thread in forward and by
autograd's in backward.

[Note: as torch has it] torch's non-reentrant checkpoint does the same for any function, with two
more Python calls for each tensor that autograd saves, and none of the above but torch's generators,
autocast and device. Its rules are kept: the second run ends when it has found as many tensors as
the first one saved; they must have the same shapes, dtypes and devices; one that was found lives
until it is taken, or the forward's nodes are gone, and serves one backward; an argument that was
written in place meanwhile is refused.

[Note: hooks before ours] The arguments are those that our own pre-hook was given. Hooks that ran
before it (`prepend=True` after initialize, and torch's global ones) have had their part in them,
and are not run again.

[Note: no cache in training] Transformers' models make a key-value cache in every forward unless
they are told not to, and training never reads it. Keys and values joined to a cache lie in memory
differently, so that other kernels multiply them and other bits come out; and a block that
runs twice (recomputation) must not write into one twice. So a plan that changes a policy would
change bits. No pass that wants gradients makes one, wherever layers are: Trainer and gradient
checkpointing have it so, too. A cache that the caller passes in is an input, and is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import enum
import functools
import inspect
import operator
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from stronghold.config.source import warn_once
from stronghold.devices.base import Device
from stronghold.devices.random_numbers import random_state, set_random_state
from stronghold.errors import ConfigError
from stronghold.process import run_and_restore
from stronghold.runtime.attention import AttentionCalls
from stronghold.runtime.guards import OwnHook, serves
from stronghold.runtime.patches.autograd import (
    backward_group,
    backward_number,
    num_function_modes,
)
from stronghold.runtime.patches.tensors import version_of


# -- a forward and its second run ------------------------------------------------------------------
class SavedTensor(NamedTuple):
    """A saved tensor that stays where it is, and its version then."""

    tensor: torch.Tensor
    version: int


Kind = tuple[torch.Size, torch.dtype, torch.device]


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.shape, tensor.dtype, tensor.device


class _AllFoundError(Exception):
    """Ends a second run; to modules and their hooks it is an error like others."""


class Recomputation:
    """The forward of `module`, called `name` in errors, that begins now: what it was given, what it
    finds in the module and around itself, and what autograd saves of it.

    `check` comes before each further run, and raises where the module must not run again. `run` is
    what runs then, if it is not the module: a part of its forward. `store` may put the tensor that
    the module is given first elsewhere meanwhile, and returns what brings it back, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        device: Device,
        check: Callable[[], None],
        run: Callable[..., Any] | None = None,
        store: Callable[[torch.Tensor], Callable[[], torch.Tensor] | None] | None = None,
    ) -> None:
        self._forward: Callable[..., Any] = module if run is None else run
        self._name = name
        self.kind = type(module).__name__
        self._check = check
        self._store = store
        self._tensors: list[SavedTensor] = []  # among the arguments
        self._away: dict[int, Callable[[], torch.Tensor]] = {}  # by id of what stands for it
        self._call = _Copy(self._keep, records=True).of((args, kwargs))
        self._kept = KeptModule(module, (args, kwargs), device)
        device_types = {"cpu", device.torch_device.type} - {"meta"}
        self._autocast = [_autocast_of(device_type) for device_type in device_types]
        modes = num_function_modes()
        self._default_device = torch.get_default_device() if modes else None
        self.attention: AttentionCalls | None = None  # whose results are kept
        self._saved: list[Kind] = []  # what autograd saved in the first run
        self._found: dict[int, SavedTensor] = {}  # what the second one did, by place in `_saved`
        self._num_found = 0
        self._different: list[str] = []
        self._task: object = None  # the backward for which it was found

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor
        if tensor.grad_fn is not None:  # one written in place would own the graph that owns us
            store, self._store = self._store, None
            if store is not None and (back := store(tensor)) is not None:
                stands = tensor.new_empty(0)
                self._away[id(stands)] = back
                return stands
            kept = tensor.detach().requires_grad_()
        if not tensor.is_inference():
            self._tensors.append(SavedTensor(kept, version_of(kept)))
        return kept

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        back = self._away.get(id(tensor))
        return tensor if back is None else back().requires_grad_()

    def save(self, tensor: torch.Tensor) -> int:
        """Autograd saves the tensor in the first run: which one it is, for `take`."""
        self._saved.append(_kind(tensor))
        return len(self._saved) - 1

    def find(self, tensor: torch.Tensor) -> SavedTensor:
        """Autograd saves the tensor in the second run."""
        index, self._num_found = self._num_found, self._num_found + 1
        if index >= len(self._saved):  # the module went on after the error that was to end it
            raise _AllFoundError
        found = self._found[index] = SavedTensor(tensor.detach(), version_of(tensor))
        was, now = self._saved[index], _kind(tensor)
        if was != now:
            self._different.append(f"tensor {index}: got {_words(now)}, expected {_words(was)}")
        if index + 1 == len(self._saved):
            raise _AllFoundError
        return found

    def take(self, index: int, run: Callable[[Recomputation], None]) -> SavedTensor:
        """What was found for this backward, after a `run` if nothing was."""
        task = _task()
        if index not in self._found or self._task != task or task == -1:
            run(self)
        found = self._found.pop(index, None)
        if found is None:
            raise CheckpointError(
                "a tensor was saved in the forward, and not when it was run again"
            )
        return found

    def run(self) -> None:
        """Run the forward again. CheckpointError where it does not find what the first one did."""
        self._check()
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"{self._name}: its forward cannot be run again, since a tensor among its "
                    f"arguments was written in place meanwhile ({tensor.dtype} "
                    f"{list(tensor.shape)} is at version {version_of(tensor)}, expected version "
                    f"{version}); write out of place (y = y + x, not y += x), or set "
                    'stronghold.activations to "keep" or "offload"'
                )
        self._found.clear()
        self._num_found, self._different, self._task = 0, [], _task()
        args, kwargs = _Copy(self._back, records=True).of(self._call)
        with contextlib.ExitStack() as around:
            for arguments in self._autocast:
                if arguments != _autocast_of(arguments[0]):
                    around.enter_context(torch.autocast(*arguments))
            if self._default_device is not None:
                around.enter_context(self._default_device)
            self._kept.run(functools.partial(self._run_until_found, args, kwargs))
        if self._num_found < len(self._saved):
            raise CheckpointError(
                f"a forward that was run again in backward saved {self._num_found} tensors, "
                f"expected {len(self._saved)} as in the first run: it takes another way when it is "
                'run again; set stronghold.activations to "keep" or "offload"'
            )
        if self._different:
            raise CheckpointError(
                "a forward that was run again in backward found other tensors than the first run: "
                f"{'; '.join(self._different)}; set stronghold.activations to "
                '"keep" or "offload"'
            )

    def _run_until_found(self, args: Any, kwargs: Any) -> None:
        with torch.enable_grad(), contextlib.suppress(_AllFoundError):
            self._forward(*args, **kwargs)


def _words(kind: Kind) -> str:
    shape, dtype, device = kind
    return f"{dtype} {list(shape)} on {device}"


def _task() -> object:
    """The backward that runs, or what torch takes several for; -1 outside of any."""
    return backward_group() or backward_number()


_Autocast = tuple[str, torch.dtype, bool, bool]  # the arguments of torch.autocast


def _autocast_of(device_type: str) -> _Autocast:
    enabled = torch.is_autocast_enabled(device_type)
    return device_type, torch.get_autocast_dtype(device_type), enabled, _caching()


_caching = torch.is_autocast_cache_enabled


# -- the block as it was ---------------------------------------------------------------------------
_CONTAINERS = frozenset({list, dict, tuple, set, deque})
_MAX_ITEMS = 1024  # a longer list or table is data, which a forward does not change
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward_"))
_BEFORE = "_forward_pre_hooks"
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}  # nothing of the user's
# Torch's global hooks; those before a forward come first.
_GLOBAL: list[Any] = [
    getattr(nn.modules.module, f"_global{name}")
    for name in (_BEFORE, "_forward_hooks", *_HOOKS[1:3])
]
_NO_HOOKS: list[Any] = [OrderedDict() for _ in _GLOBAL]


class _Attributes(NamedTuple):
    """The names of a module's own attributes that matter, by what they hold."""

    scalars: tuple[str, ...]
    tensors: tuple[str, ...]
    containers: tuple[str, ...]
    generators: tuple[str, ...]  # or containers, which may hold some
    objects: tuple[str, ...]  # of classes that are no module's: samplers, counters


@functools.lru_cache(maxsize=1024)
def _sorted(names: tuple[str, ...], kinds: tuple[type, ...]) -> _Attributes:
    """Of a module whose attributes have these names and types, which they seldom change."""
    every = zip(names, kinds, strict=True)
    own = [(name, kind) for name, kind in every if name not in _OF_EVERY_MODULE]
    drawn = _GENERATORS | {dict, list, tuple}
    return _Attributes(
        tuple(name for name, kind in own if kind in _SCALARS),
        tuple(name for name, kind in own if issubclass(kind, torch.Tensor)),
        tuple(name for name, kind in own if kind in _CONTAINERS),
        tuple(name for name, kind in own if kind in drawn),
        tuple(name for name, kind in own if _has_state(kind)),
    )


def _has_state(kind: type) -> bool:
    """True if a forward may count or draw in an object of this class: it has attributes, and is
    neither what torch looks after nor a configuration, which a forward only reads."""
    handled = (nn.Module, torch.Tensor, type, FunctionType, functools.partial, enum.Enum)
    if not kind.__dictoffset__ or issubclass(kind, handled):
        return False
    return not any("Config" in base.__name__ for base in kind.__mro__)


class _Part(NamedTuple):
    """A module of the block: where its attributes are, and what they were of what a forward may
    change, but for what can be written into."""

    here: dict[str, Any]
    names: tuple[str, ...]  # of all of them
    scalars: dict[str, Any]
    hooks: dict[str, Any]  # copies, of the kinds that it has


class _Present(NamedTuple):
    """The block's present, while it is as it was: tables with copies of what is in them,
    parameters that are frozen now, and the states of generators."""

    tables: list[tuple[dict[str, Any], dict[str, Any]]]
    frozen: list[nn.Parameter]
    states: list[tuple[Any, Any]]

    def restore(self) -> None:
        """Put all of it back. To call it again does no harm."""
        for table, held in reversed(self.tables):
            _fill(table, held)
        for parameter in self.frozen:
            parameter.requires_grad_(False)
        _set_states(self.states)


def _fill(table: dict[str, Any], held: dict[str, Any]) -> None:
    """Let the table have what is held, and nothing else. What is in both is never missing."""
    table.update(held)
    for name in table.keys() - held.keys():
        del table[name]


class KeptModule:
    """`module`, its parts, and the generators that they may draw from, as they are when this is
    made. `arguments` may bring generators."""

    def __init__(self, module: nn.Module, arguments: Any, device: Device) -> None:
        drawn: dict[int, Any] = {}
        _look(arguments, drawn, depth=3)
        self._parts: list[_Part] = []
        self._versions: list[tuple[str, SavedTensor]] = []
        inner: list[tuple[int, str, Any]] = []  # what can be written into, by part and name
        self._objects: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # by id
        buffers: dict[int, dict[str, torch.Tensor | None]] = {}
        # Of a chunk they are views of a slot, which nobody may hold.
        self._trained: list[weakref.ref[nn.Parameter]] = []
        for k, part in enumerate(module.modules()):
            here, own_class = vars(part), cast(Any, type(part))
            names = tuple(here)
            own = _sorted(names, tuple(map(type, here.values())))
            hooks = {name: here[name].copy() for name in _HOOKS if here[name]}
            self._parts.append(
                _Part(here, names, {name: here[name] for name in own.scalars}, hooks)
            )
            for parameter in here["_parameters"].values():
                if parameter is not None and parameter.requires_grad:
                    self._trained.append(weakref.ref(parameter))
            for name in own.tensors:
                if not (value := here[name]).is_inference():
                    saved = SavedTensor(_detached(value), version_of(value))
                    self._versions.append((f"{own_class.__name__}.{name}", saved))
                inner.append((k, name, value))
            for name in own.objects:
                self._keep_object(own_class.__name__, name, here[name])
            for name in own.containers:
                if len(here[name]) <= _MAX_ITEMS:
                    inner.append((k, name, here[name]))
            for name in own.generators:
                _look(here[name], drawn, depth=1)
            for where, name in _generators_read(own_class):
                _look(_drawn_from(where.get(name)), drawn, depth=1)
            if here["_buffers"]:
                buffers[k] = here["_buffers"]
        self._buffers = _Copy(_cloned).of(buffers)  # what several parts share they share again
        self._inner = _Copy(_detached).of(inner)
        _remove_before_ours(self._parts[0].hooks.get(_BEFORE, {}))
        self._globals = [hooks.copy() for hooks in _GLOBAL] if any(_GLOBAL) else _NO_HOOKS
        self._states = _states([PYTHONS, torch.default_generator, device, *drawn.values()])

    def _keep_object(self, owner: str, name: str, value: Any) -> None:
        """The attributes of an object that a module has, but for modules and parameters."""
        if id(value) in self._objects:
            return
        held = {
            key: _detached(found) if isinstance(found, torch.Tensor) else found
            for key, found in vars(value).items()
            if not isinstance(found, nn.Module | nn.Parameter)
        }
        self._objects[id(value)] = vars(value), held
        for key, found in held.items():
            if isinstance(found, torch.Tensor) and not found.is_inference():
                saved = SavedTensor(_detached(found), version_of(found))
                self._versions.append((f"{owner}.{name}.{key}", saved))

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` while all is as it was. Afterwards all is as it is now, untouched.
        ConfigError, before anything is changed, for a tensor that cannot be had as it was."""
        for place, (tensor, version) in self._versions:
            if version_of(tensor) != version:
                raise ConfigError(
                    f"{place}: a tensor that is no buffer was written "
                    "in place since its block's forward began, and cannot be had as it was for the "
                    "recomputation: register it as a buffer, or set stronghold.activations to "
                    '"keep" or "offload"'
                )
        present = _Present([], self._frozen(), _states(generator for generator, _ in self._states))
        run_and_restore(functools.partial(self._run, work, present), present.restore)

    def _run(self, work: Callable[[], object], present: _Present) -> None:
        for parameter in present.frozen:
            parameter.requires_grad_(True)
        self._exchange(present.tables)
        _set_states(self._states)
        work()

    def _frozen(self) -> list[nn.Parameter]:
        """Those that were frozen since: the first run saved tensors for their gradients."""
        held = (parameter() for parameter in self._trained)
        return [p for p in held if p is not None and not p.requires_grad]

    def _exchange(self, tables: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Put what was kept in its place; `tables` gets each one before it is changed, and what is
        in it."""
        buffers = _Copy(_cloned).of(self._buffers)
        for k, part in enumerate(self._parts):
            here, kept = part.here, part.hooks
            tables.append((here, dict(here)))
            if tuple(here) != part.names:
                for name in here.keys() - set(part.names):  # the forward makes them
                    del here[name]
            here.update(part.scalars)
            for name in _HOOKS if kept or any(map(here.__getitem__, _HOOKS)) else ():
                if here[name] or name in kept:
                    here[name] = _living(kept.get(name), here[name])
            if here["_buffers"] or k in buffers:
                tables.append((here["_buffers"], dict(here["_buffers"])))
                _fill(here["_buffers"], buffers.get(k, {}))
        for table, held in self._objects.values():
            tables.append((table, dict(table)))
            table.update(held)
        for k, name, value in _Copy(_detached).of(self._inner):
            self._parts[k].here[name] = value
        if any(self._globals) or any(_GLOBAL):
            for hooks, held in zip(_GLOBAL, self._globals, strict=True):
                tables.append((hooks, dict(hooks)))
                hooks.clear()  # else they would run in another order
                hooks.update(held)
            # Those before a forward are there for the block's parts: from its own hooks on.
            before, held = _GLOBAL[0], self._globals[0]
            before.clear()
            block = self._parts[0].here
            own = block[_BEFORE] = block[_BEFORE].copy()
            own[-1] = lambda *_: before.update(held)
            own.move_to_end(-1, last=False)


def _remove_before_ours(hooks: dict[int, Any]) -> None:
    """[Note: hooks before ours]"""
    ours = [key for key, hook in hooks.items() if serves(hook)]
    for key in list(hooks) if ours else ():
        if key == ours[-1]:
            return
        if key not in ours:
            del hooks[key]


def _living(kept: Any, now: Any) -> Any:
    """Of one kind of a module's hooks those that were kept, without those of an engine that has
    been closed since."""
    found = OrderedDict() if kept is None else kept.copy()
    for key, hook in list(found.items()):
        if key not in now and serves(hook):
            del found[key]
    return found


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph, which would else keep those of all the steps before it."""
    if tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


# -- copies of what can be written into ------------------------------------------------------------
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_COPYING = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")


class _Copy:
    """Copies of all containers; `leaf` says what stands for a tensor. With `records` also of
    namespaces, dataclasses and objects of the user's plain classes, but not of what such an object
    refers to, which may be anything. What is in several places is again one. All else, modules too,
    is as it is."""

    def __init__(
        self, leaf: Callable[[torch.Tensor], torch.Tensor], *, records: bool = False
    ) -> None:
        self._leaf = leaf
        self._records = records
        self._known: dict[int, Any] = {}

    def of(self, value: Any, *, in_record: bool = False) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        known = self._known
        if id(value) in known:
            return known[id(value)]
        made: Any
        if isinstance(value, torch.Tensor):
            made = known[id(value)] = self._leaf(value)
        elif isinstance(value, dict):
            made = known[id(value)] = copy.copy(value)
            for key, part in value.items():
                made[key] = self.of(part, in_record=in_record)
        elif isinstance(value, (list, deque)):
            made = known[id(value)] = copy.copy(value)
            for index, part in enumerate(value):
                made[index] = self.of(part, in_record=in_record)
        elif isinstance(value, (set, bytearray)):
            made = known[id(value)] = copy.copy(value)
        elif isinstance(value, tuple) and kind is not torch.Size:
            parts = [self.of(part, in_record=in_record) for part in value]
            if all(map(operator.is_, parts, value)):
                return value
            made = kind(*parts) if hasattr(value, "_fields") else kind(parts)
            known[id(value)] = made
        elif self._records and (_is_record(value, plain=not in_record) or _holds_keys(value)):
            made = known[id(value)] = copy.copy(value)
            for name, part in list(_attributes(value)):
                object.__setattr__(made, name, self.of(part, in_record=True))
        else:
            return value
        return made


def _is_record(value: Any, *, plain: bool) -> bool:
    """Whether it is data; with `plain` also of a class that says nothing about copying."""
    kind = type(value)
    if isinstance(value, (type, nn.Module)) or callable(value):
        return False
    if isinstance(value, _NAMESPACES) or dataclasses.is_dataclass(value):
        return True
    return (
        plain
        and hasattr(value, "__dict__")
        and not hasattr(kind, "__copy__")
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _COPYING)
    )


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


# -- generators that a block may draw from ---------------------------------------------------------
# Python's own, which `random.random()` draws from. The user's and NumPy's are found as attributes
# of the block and its parts, in its arguments, and as names that its code reads.
PYTHONS: random.Random = random._inst
_GENERATORS = frozenset(
    {torch.Generator, random.Random, np.random.Generator, np.random.RandomState}
)


def _look(value: Any, found: dict[int, Any], *, depth: int) -> None:
    kind = type(value)
    if kind in _GENERATORS:
        found[id(value)] = value
    elif depth and (kind is dict or kind is list or kind is tuple):
        for part in value.values() if kind is dict else value:
            _look(part, found, depth=depth - 1)


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """What reads its state, and what writes it."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, Device):
        device = generator.torch_device
        return functools.partial(random_state, device), functools.partial(set_random_state, device)
    if hasattr(generator, "bit_generator"):  # of NumPy
        bits = generator.bit_generator
        return lambda: bits.state, functools.partial(setattr, bits, "state")
    return generator.get_state, generator.set_state


def _states(of: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each generator with its state now; a device that has none of its own is left out."""
    found = ((generator, _access(generator)[0]()) for generator in of)
    return [(generator, state) for generator, state in found if state is not None]


def _set_states(kept: Iterable[tuple[Any, Any]]) -> None:
    """The generators go on from these states."""
    for generator, state in kept:
        _access(generator)[1](state)


def _drawn_from(value: Any) -> Any:
    """NumPy's global generator for the module that draws from it; others are what they are."""
    if isinstance(value, types.ModuleType) and value.__name__ in ("numpy", "numpy.random"):
        return np.random.mtrand._rand
    return value


@functools.lru_cache(maxsize=1024)
def _generators_read(kind: type) -> tuple[tuple[dict[str, Any], str], ...]:
    """Those that the code of the class's methods names: where it looks, and the name."""
    read = []
    for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for function in vars(owner).values():
            if not isinstance(function, FunctionType):
                continue
            code = function.__code__
            places = [(function.__globals__, name) for name in _global_names(code)]
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # a name that has no value yet
                    places.append(({name: cell.cell_contents}, name))
            for names, name in places:
                found: dict[int, Any] = {}
                _look(_drawn_from(names.get(name)), found, depth=1)
                if found:
                    read.append((names, name))
    return tuple(read)


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Also of functions that are made inside."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _global_names(inner)


# -- key-value caches ------------------------------------------------------------------------------
def forbid_caches(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """A pass of the model that wants gradients makes no key-value cache, until `undo` is closed."""
    for module in model.modules():
        if _comes_from_transformers(type(module), "PreTrainedModel"):
            hook = OwnHook(_without_cache)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled() or any(map(is_cache, (*args, *kwargs.values()))):
        return None
    # Of what is called now: frameworks put other functions in the place of a module's forward.
    names = list(inspect.signature(module.forward).parameters)
    if "use_cache" not in names:
        return None
    position = names.index("use_cache")
    given = args[position] if len(args) > position else kwargs.get("use_cache")
    if given:
        warn_once(
            f"{type(module).__name__} was asked for a key-value cache (use_cache=True) while "
            "gradients are wanted: none is made. Call it under torch.no_grad(), or pass a cache of "
            "your own as past_key_values."
        )
    if len(args) > position:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments without empty key-value caches, which nobody reads in training.
    Transformers' own checkpointing drops them in the same way. One that came with keys is an input
    (prefix tuning): the second run gets it as it was."""
    args = tuple(None if _is_empty_cache(value) else value for value in args)
    kwargs = {name: None if _is_empty_cache(value) else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _is_empty_cache(value: Any) -> bool:
    return is_cache(value) and not value.get_seq_length()


def _holds_keys(value: Any) -> bool:
    """Whether it is one of Transformers' caches, or a layer of one."""
    return is_cache(value) or _comes_from_transformers(type(value), "CacheLayerMixin")


def is_cache(value: Any) -> bool:
    """Whether the value is one of Transformers' key-value caches."""
    if value is None or isinstance(value, (torch.Tensor, bool, tuple)):
        return False
    return _comes_from_transformers(type(value), "Cache")


def _comes_from_transformers(kind: type, name: str) -> bool:
    # By name: transformers need not be installed, and importing it takes seconds.
    return any(
        base.__name__ == name and base.__module__.startswith("transformers")
        for base in kind.__mro__
    )
