"""Replacements of names of other packages in this process (monkey patches), and their undoing.

Owns the original and the replacement of each name that was replaced. Changes nothing on disk. The
training thread alone enters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replaced:
    """A name that was replaced. `is_inherited`: the owner had the name from a base class."""

    original: Any
    replacement: Any
    is_inherited: bool


class Replacements:
    """Names of other packages that are replaced in this process. Start with none."""

    def __init__(self) -> None:
        self._replaced: dict[tuple[Any, str], _Replaced] = {}

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by what `make(original)` returns. Does nothing to a name that is
        replaced already: another wrapper around ours would be wrapped again, in a circle."""
        if (owner, name) in self._replaced:
            return
        original = getattr(owner, name)
        replacement = make(original)
        is_inherited = name not in vars(owner)
        self._replaced[owner, name] = _Replaced(
            original=original, replacement=replacement, is_inherited=is_inherited
        )
        setattr(owner, name, replacement)

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace the function `owner.name` by one that returns `call(original, *args, **kwargs)`.
        Does nothing to a name that is replaced already."""
        self.put(owner, name, functools.partial(_wrapper, call))

    def undo(self) -> None:
        """Put the originals back.

        Another package may have put a wrapper around a replacement. Then both stay, and the
        replacement calls the original.
        """
        for (owner, name), replaced in list(self._replaced.items()):
            if getattr(owner, name) is not replaced.replacement:
                continue
            if replaced.is_inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, replaced.original)
            del self._replaced[owner, name]


def _wrapper(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function. A class binds it to its instances, as it does with `original`."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return replacement
