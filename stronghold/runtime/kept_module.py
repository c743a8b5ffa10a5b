"""A block as it was when its forward began, for the recomputation of that forward.

Owns copies of what a forward may change: buffers, plain attributes (counters, flags, lists), hooks,
and the states of random generators, as long as autograd's graph may recompute. Running statistics,
power iterations and counters must not move twice in a step, and a forward that is run again must
see what it saw: its own call's, whichever calls came since, and though it grew a table or
registered one. Entered by autograd's thread in backward.

[Note: hooks before ours] A recomputation's arguments are those that our own pre-hook was given.
Hooks that ran before it (`prepend=True` after initialize, and torch's global ones) have had their
part in them, and are not run again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.runtime.kept_arguments import SCALARS, copied
from stronghold.runtime.own_hooks import serves
from stronghold.runtime.random_states import OF_EVERY_MODULE, generators, set_states, states

Held = dict[str, torch.Tensor | None]
Undo = Callable[[], None]

_CONTAINERS = frozenset({list, dict, tuple, set, deque})
_MAX_ITEMS = 1024  # a longer list or table is data, which a forward does not change
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward_"))
_BEFORE = "_forward_pre_hooks"
# Torch's global ones; those before a forward come first.
_GLOBAL: list[Any] = [
    getattr(nn.modules.module, f"_global{name}")
    for name in (_BEFORE, "_forward_hooks", *_HOOKS[1:3])
]


class KeptModule:
    """A context: inside it `module` and its parts are as they were when this was made; afterwards
    as they are now, untouched. It may be entered again. `arguments` may bring generators.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        self._parts = list(module.modules())
        self._buffers = _copies([part._buffers for part in self._parts])
        self._names = [frozenset(vars(part)) for part in self._parts]
        plain = [_plain(part) for part in self._parts]
        self._versions = [
            (part, name, value, value._version)
            for part, of_part in zip(self._parts, plain, strict=True)
            for name, value in of_part.items()
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]
        self._attributes = _copied(plain)
        self._hooks = [_hooks_of(part) for part in self._parts]
        self._hooks[0][_BEFORE] = _from_ours_on(self._hooks[0].get(_BEFORE, OrderedDict()))
        self._globals = [hooks.copy() for hooks in _GLOBAL]
        self._states = states(generators(self._parts, arguments))
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> KeptModule:
        with contextlib.ExitStack() as inside:
            for undo in self._exchange():
                inside.callback(undo)
            self._inside = inside.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._inside.close()

    def _exchange(self) -> Iterator[Undo]:
        """Put what was kept in its place, one after the other, and say how to undo it."""
        for part, name, tensor, version in self._versions:
            if tensor._version != version:
                raise ConfigError(
                    f"{type(part).__name__}.{name}: a tensor that is no buffer was written "
                    "in place since its block's forward began, and cannot be had as it was for the "
                    "recomputation: register it as a buffer, or set stronghold.activations to "
                    '"keep" or "offload"'
                )
        yield _exchange_buffers(self._parts, _copies(self._buffers))
        attributes = _copied(self._attributes)
        each = zip(self._parts, attributes, self._hooks, self._names, strict=True)
        for part, kept, hooks, names in each:
            yield _exchange_attributes(part, kept | _living(part, hooks), names)
        yield _exchange_states(self._states)
        yield _exchange_globals(self._parts[0], self._globals)


def _exchange_buffers(parts: list[nn.Module], kept: list[Held]) -> Undo:
    outside = [dict(part._buffers) for part in parts]

    def put(buffers: list[Held]) -> None:
        for part, held in zip(parts, buffers, strict=True):
            part._buffers.clear()
            part._buffers.update(held)

    put(kept)
    return lambda: put(outside)


def _exchange_attributes(part: nn.Module, kept: dict[str, Any], names: frozenset[str]) -> Undo:
    now = vars(part)
    outside = dict(now)
    for name in now.keys() - names:  # the forward makes them
        del now[name]
    now.update(kept)

    def undo() -> None:
        now.clear()
        now.update(outside)

    return undo


def _exchange_states(kept: list[tuple[Any, Any]]) -> Undo:
    outside = states(generator for generator, _ in kept)
    set_states(kept)
    return lambda: set_states(outside)


def _exchange_globals(module: nn.Module, kept: list[Any]) -> Undo:
    """Global hooks as they were; those before a forward from `module`'s own hooks on, since they
    are there for its parts."""
    outside = [hooks.copy() for hooks in _GLOBAL]
    if not any(kept) and not any(outside):
        return lambda: None

    def put(all_hooks: list[Any]) -> None:
        for hooks, other in zip(_GLOBAL, all_hooks, strict=True):
            hooks.clear()
            hooks.update(other)

    put([{}, *kept[1:]])
    own = vars(module)[_BEFORE]
    own[-1] = lambda *_: _GLOBAL[0].update(kept[0])
    own.move_to_end(-1, last=False)
    return lambda: put(outside)


def _from_ours_on(hooks: Any) -> Any:
    """[Note: hooks before ours]"""
    ours = [position for position, hook in enumerate(hooks.values()) if serves(hook)]
    before = list(hooks)[: ours[-1]] if ours else []
    for key in before:
        if not serves(hooks[key]):
            del hooks[key]
    return hooks


def _hooks_of(part: nn.Module) -> dict[str, Any]:
    """Copies of the hooks that the part has, by kind."""
    here = vars(part)
    return {name: here[name].copy() for name in _HOOKS if here[name]}


def _living(part: nn.Module, kept: dict[str, Any]) -> dict[str, Any]:
    """What stands for the part's hooks, by kind: copies of those that were kept, without those of
    an engine that has been closed since."""
    here = vars(part)
    found = {}
    for name in _HOOKS:
        if name in kept:
            found[name] = kept[name].copy()
            for key, hook in kept[name].items():
                if serves(hook) and key not in here[name]:
                    del found[name][key]
        elif here[name]:
            found[name] = OrderedDict()
    return found


def _plain(part: nn.Module) -> dict[str, Any]:
    """What a forward may rebind or fill: numbers, flags, tensors, lists and tables of its own."""
    here = vars(part)
    found = {"training": part.training}
    for name in here.keys() - OF_EVERY_MODULE:
        value = here[name]
        kind = type(value)
        if (
            kind in SCALARS
            or isinstance(value, torch.Tensor)
            or (kind in _CONTAINERS and len(value) <= _MAX_ITEMS)
        ):
            found[name] = value
    return found


def _copied(attributes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of what can be written into; what several parts share they share again."""
    found = [dict(of_part) for of_part in attributes]
    inner = [
        (k, name, value)
        for k, of_part in enumerate(attributes)
        for name, value in of_part.items()
        if type(value) not in SCALARS
    ]
    for k, name, value in copied(inner, _detached, records=False) if inner else ():
        found[k][name] = value
    return found


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph, which would else keep those of all the steps before it."""
    if tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copies(buffers: list[Held]) -> list[Held]:
    """Copies of all tensors; what several parts share they share again."""
    known: dict[int, torch.Tensor] = {}
    for held in buffers:
        for tensor in held.values():
            if tensor is not None and id(tensor) not in known:
                known[id(tensor)] = tensor.detach().clone()
    return [
        {name: None if tensor is None else known[id(tensor)] for name, tensor in held.items()}
        for held in buffers
    ]
