"""Buffers that layers take in turn: weight slots, gradient slots, and entries of host memory.

Owns no memory: `memory.host` and `memory.window` allocate the buffers. Each buffer carries an
access record (hazard tracking, `devices.base`). The record names the operations that must end
before the buffer may be overwritten.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stronghold.devices.base import Record


@dataclass(slots=True, eq=False)
class HostEntry:
    """Host memory for the gradients of one layer, or for one piece on its way from or to a file.

    `memory`: flat uint8 tensor. `record`: its access record.
    """

    memory: torch.Tensor
    record: Record = field(default_factory=Record)


class EntryRing(deque[HostEntry]):
    """Entries that are taken in turn."""

    def next(self) -> HostEntry:
        """Return the entry that was taken longest ago."""
        self.rotate(-1)
        return self[-1]


class SlotContents(NamedTuple):
    """The weights in a slot, or on their way to it: the layer's index and the weights' version."""

    layer: int
    version: int


@dataclass(slots=True, eq=False)
class Slot:
    """Device memory for the weights of one layer (a prefetch buffer).

    `weights`: flat uint8 tensor. `contents`: None while the slot is free.
    """

    weights: torch.Tensor
    contents: SlotContents | None = None
    record: Record = field(default_factory=Record)

    @property
    def layer(self) -> int | None:
        """Index of the layer that has the slot, or None."""
        return None if self.contents is None else self.contents.layer


@dataclass(slots=True, eq=False)
class GradientSlot:
    """Device memory for the gradients of one layer.

    gradients   flat uint8 tensor, laid out as the layer's weights
    sums        fp32 sums of chunks, one item per element; None where no layer needs them
    summing     by position: views of `sums` for the running call, until they are rounded
    layer       index of the layer that gathers, or None
    is_pending  the gradients stay in the slot until the step ends
    is_extra    the slot is not in the plan. Torch owns its memory, and frees it after the offload
    arrived     positions of the parameters whose gradients are in the slot
    writers     streams of the compute lane that may write the slot
    views       cache of `gradient_slots`, by place, dtype and shape
    """

    gradients: torch.Tensor
    sums: torch.Tensor | None = None
    summing: dict[int, torch.Tensor] = field(default_factory=dict)
    layer: int | None = None
    is_pending: bool = False
    is_extra: bool = False
    arrived: set[int] = field(default_factory=set)
    writers: list[object] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    views: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
