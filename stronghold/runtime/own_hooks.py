"""Hooks of ours on the user's modules, as copies of those modules see them.

Owns nothing. `copy.deepcopy(model)` and `torch.save(model)` take a module's hooks along: those of a
live engine would move its layers when the copy is called, and hold locks that cannot be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OwnHook:
    """Calls `call`. Of a module that is copied or pickled the copy has one that does nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a module is compiled with its hooks: never these
            return torch.compiler.disable(self._call)(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> OwnHook:
        return without_effect()

    def __reduce__(self) -> Any:
        return without_effect, ()


def without_effect() -> OwnHook:
    """What stands in a copy for a hook of the original's engine."""
    return OwnHook(_nothing)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def serves(hook: Any) -> bool:
    """Whether `hook` is one of ours whose engine has it, not a copy's."""
    return isinstance(hook, OwnHook) and hook._call is not _nothing
