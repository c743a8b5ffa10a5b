"""Host memory that what leaves the device for a while takes in turn, pinned for transfers.

Owns one mapping and which of its bytes are taken. Pieces are given first fit by address, so that
what comes and goes as a stack (activations: forward saves, backward takes back) leaves no holes,
whatever its sizes are: what is pinned is the most that was ever taken at once, and does not grow
with the number of sizes. The training thread takes, and autograd's in backward; whoever drops the
last reference gives back, from any thread.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import torch

from stronghold.device.base import Device
from stronghold.errors import BudgetError
from stronghold.limits import available_host_bytes
from stronghold.memory.slab import map_slab

PIECE_BYTES = 512  # pieces begin at multiples of it
PAGE_BYTES = 4096
GROWTH = 8  # what is pinned grows by an eighth at least: pinning takes a call, and cuts copies


class PinnedPool:
    """At most `room_bytes` (None: what the system has when the first piece is taken)."""

    def __init__(self, device: Device, room_bytes: int | None) -> None:
        self._device = device
        self._room_bytes = room_bytes
        self._arena: torch.Tensor | None = None
        self._pinned: list[torch.Tensor] = []
        self._free: list[tuple[int, int]] = []  # [begin, end) in order and apart, all of it pinned
        # Pieces come back at any moment, also in the middle of `take`: a deque is enough of a lock.
        self._returned: deque[tuple[int, int]] = deque()
        self.num_bytes = 0  # pinned

    def take(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of it, contents undefined, until `give`; BudgetError where there is no room."""
        size = -(-nbytes // PIECE_BYTES) * PIECE_BYTES
        self._merge_returned()
        place = next((k for k, (begin, end) in enumerate(self._free) if end - begin >= size), None)
        if place is None:
            self._grow(size)
            place = len(self._free) - 1
        begin, end = self._free.pop(place)
        if end - begin > size:
            self._free.insert(place, (begin + size, end))
        assert self._arena is not None
        return self._arena[begin : begin + nbytes]

    def give(self, piece: torch.Tensor) -> None:
        """Nobody will use the piece any more, or only what is ordered before its next user."""
        begin = int(piece.storage_offset())
        self._returned.append((begin, begin + -(-piece.numel() // PIECE_BYTES) * PIECE_BYTES))

    def close(self) -> None:
        """Unpin everything. Safe to call twice."""
        for part in self._pinned:
            self._device.unpin(part)
        self._pinned.clear()
        self._free.clear()
        self._arena = None

    def _merge_returned(self) -> None:
        if not self._returned:
            return
        while self._returned:
            insort(self._free, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for begin, end in self._free:
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged

    def _grow(self, size: int) -> None:
        """Pin more, behind what is pinned: the last free range then has `size` bytes at least."""
        if self._arena is None:
            if self._room_bytes is None:
                self._room_bytes = available_host_bytes()
            pages = max(0, self._room_bytes) // PAGE_BYTES
            # Addresses, not memory: pages are committed when they are pinned or written.
            self._arena = map_slab(pages * PAGE_BYTES, torch.uint8)
        begin = self.num_bytes
        last = self._free[-1] if self._free and self._free[-1][1] == begin else (begin, begin)
        missing = size - (last[1] - last[0])
        room = self._arena.numel() - begin
        if missing > room:
            raise BudgetError(
                f"offloaded activations need {begin + missing} bytes of host memory at once, "
                f"{self._arena.numel()} are left for them beside the plan's; raise "
                'stronghold.host_memory or add RAM, set stronghold.activations to "recompute", or '
                "lower the micro-batch"
            )
        more = -(-max(missing, begin // GROWTH) // PAGE_BYTES) * PAGE_BYTES
        more = min(more, room)
        part = self._arena[begin : begin + more]
        self._device.pin(part)
        self._pinned.append(part)
        self.num_bytes += more
        if last[1] > last[0]:
            self._free.pop()
        self._free.append((last[0], begin + more))
