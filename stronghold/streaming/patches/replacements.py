"""Replacements of names of other packages in this process, and how they are given back.

Owns, for each name that it has replaced, the original and the replacement. Changes nothing on disk.
The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replacements:
    """Names of other packages that are replaced in this process. Start with none."""

    def __init__(self) -> None:
        # The original, the replacement, and whether the owner had the name from a base class.
        self._replaced: dict[tuple[Any, str], tuple[Any, Any, bool]] = {}

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by what `make` returns for it. Without effect for a name that is
        replaced already: another wrapper around ours would be wrapped again, in a circle."""
        if (owner, name) not in self._replaced:
            original = getattr(owner, name)
            replacement, is_inherited = make(original), name not in vars(owner)
            self._replaced[owner, name] = original, replacement, is_inherited
            setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put the originals back. Where another wrapper stands around a replacement both stay, and
        the replacement passes every call on."""
        for (owner, name), (original, replacement, is_inherited) in list(self._replaced.items()):
            if getattr(owner, name) is replacement:
                if is_inherited:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
                del self._replaced[owner, name]
