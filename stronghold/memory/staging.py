"""The staging ring: host memory through which pieces of arrays pass from and to staged homes.

Owns the slab and its registration with the device. `memory.tiers` decides what its entries hold.
The training thread opens and closes it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from stronghold.devices.base import Device
from stronghold.errors import StateError
from stronghold.memory.slab import map_slab
from stronghold.native import ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingRing:
    """Entries of `piece_bytes`, one after the other in `memory`.

    The first entry serves access from outside of the lanes. The next `num_updates` serve updates.
    The others serve fetches. `nbytes`: host memory that the ring takes.
    """

    memory: torch.Tensor
    piece_bytes: int
    num_updates: int
    nbytes: int

    @property
    def entries(self) -> tuple[torch.Tensor, ...]:
        """Each entry's memory: flat uint8 tensors of `piece_bytes`."""
        return self.memory.split(self.piece_bytes) if self.memory.numel() else ()


NO_RING = StagingRing(
    memory=torch.empty(0, dtype=torch.uint8), piece_bytes=0, num_updates=0, nbytes=0
)


def open_ring(
    num_entries: int,
    piece_bytes: int,
    undo: contextlib.ExitStack,
    *,
    num_updates: int = 0,
    device: Device | None = None,
) -> StagingRing:
    """Allocate a ring in one slab of exact size.

    `device` pins (page-locks) the slab until `undo` closes. Raises StateError unless `piece_bytes`
    is a number of whole pages.
    """
    if num_entries < 0 or piece_bytes < ALIGNMENT or piece_bytes % ALIGNMENT:
        raise StateError(f"ring: got {num_entries} entries of {piece_bytes} bytes")
    memory = map_slab(num_entries * piece_bytes, torch.uint8)
    if device is not None and memory.numel():
        device.pinning.pin(memory)
        undo.callback(device.pinning.unpin, memory)
    return StagingRing(
        memory=memory, piece_bytes=piece_bytes, num_updates=num_updates, nbytes=memory.nbytes
    )
