"""Loads of the pieces that updates need: each in its turn, the first ones before backward begins.

Owns the order in which pieces came last, and the entries of those that were loaded and not yet
updated. The training thread enters, and autograd's in backward.

[Note: the first pieces] Updates that come as gradients do need their first moments when the first
gradients are there; what lies in files does not depend on these. So loads of the first pieces, as
many as there are entries, are queued when backward begins, in the order of the last step: the disk
does not rest until the first gradients have come. A piece that is not the next one expected, in a
step whose order is another, drops what was loaded. So does the end of backward: between steps files
may be written from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from stronghold.device.base import Device, Fence
from stronghold.memory.tiers import StagingEntry, Tiers, Views
from stronghold.runtime.ahead import Ahead


@dataclass(frozen=True, slots=True)
class LoadedPiece:
    """Elements [begin, end) of a layer's spilled arrays, in `entry` once `loaded` is done."""

    layer: int
    begin: int
    end: int
    entry: StagingEntry
    views: Views
    loaded: Fence


class PieceLoads:
    """`written[i]`: the newest write to layer i's files, kept current by whoever writes. `ahead`:
    the load lane's transfers."""

    def __init__(self, device: Device, tiers: Tiers, written: Sequence[Fence]) -> None:
        self._device = device
        self._tiers = tiers
        self._written = written
        self.ahead = Ahead()
        self._expected: deque[LoadedPiece] = deque()
        self._first: list[tuple[int, int, int]] = []  # since backward began

    def begin_backward(self) -> None:
        """Backward begins, in which layers are updated as gradients come."""
        first, self._first = self._first, []
        self._expected.extend(self._load(*piece) for piece in first)

    def drop(self) -> None:
        """Nothing that was loaded will be used: its entries are free."""
        for piece in self._expected:
            piece.entry.free_after = piece.loaded
        self._expected.clear()

    def next(self, layer: int, begin: int, end: int) -> LoadedPiece:
        """The piece, whose load is queued. The caller sets its entry's `free_after`."""
        if len(self._first) < len(self._tiers.updates):
            self._first.append((layer, begin, end))
        if self._expected:
            piece = self._expected[0]
            if (piece.layer, piece.begin, piece.end) == (layer, begin, end):
                return self._expected.popleft()
            self.drop()
        return self._load(layer, begin, end)

    def _load(self, layer: int, begin: int, end: int) -> LoadedPiece:
        arrays, entry = self._tiers.spilled(layer), self._tiers.updates.next()
        views = self._tiers.views(entry.memory, arrays, end - begin)
        loaded = self.ahead.submit(
            self._device.load,
            f"load {layer}",
            partial(self._tiers.load, layer, begin, views),
            (entry.free_after, self._written[layer]),
            nbytes=self._tiers.nbytes(arrays, end - begin),
        )
        return LoadedPiece(layer, begin, end, entry, views, loaded)
