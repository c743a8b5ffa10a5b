"""Host room in which gradients arrive: entries, of a layer's own or taken in turn.

Owns which entry is next. Never allocates: `memory.host` does. The training thread enters, and
autograd's in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stronghold.device.base import Fence


@dataclass(slots=True)
class GradientEntry:
    """Host room for one layer's drained gradients, and the fence after which it may be
    overwritten."""

    gradients: torch.Tensor
    free_after: Fence


class GradientRing:
    """Entries that layers take in turn."""

    def __init__(self) -> None:
        self._entries: list[GradientEntry] = []
        self._cursor = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[GradientEntry]:
        return iter(self._entries)

    def add(self, entry: GradientEntry) -> None:
        self._entries.append(entry)

    def next(self) -> GradientEntry:
        """The entry whose use lies longest back; it may be written after its `free_after`."""
        entry = self._entries[self._cursor]
        self._cursor = (self._cursor + 1) % len(self._entries)
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self._cursor = 0
