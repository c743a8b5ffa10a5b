"""Homes: where each array of each layer lies between two operations.

Pure. A plan chooses them, `memory` has one store for each, and kernels run on the lane of the home
of a layer's weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Home:
    """A place for arrays. `is_staged`: a kernel cannot address it, so that arrays are loaded to
    the host in pieces, and spilled from there when a piece was changed."""

    name: str
    is_staged: bool = False

    def __str__(self) -> str:
        return self.name


GPU = Home("gpu")
HOST = Home("host")
FILE = Home("file", is_staged=True)
