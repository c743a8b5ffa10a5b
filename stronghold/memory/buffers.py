"""Buffers that layers take in turn, on the device and on the host, and what lies in them.

Owns no memory: `memory.host` and `memory.window` make the buffers. A buffer may be overwritten when
the operations that its access record (`device.base`) names have ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stronghold.device.base import Record


@dataclass(slots=True, eq=False)
class HostEntry:
    """Host room for one layer's gradients, or for a piece on its way from or to a file."""

    memory: torch.Tensor
    record: Record = field(default_factory=Record)


class EntryRing(deque[HostEntry]):
    """Entries that are taken in turn."""

    def next(self) -> HostEntry:
        """The entry whose use lies longest back."""
        self.rotate(-1)
        return self[-1]


class SlotContents(NamedTuple):
    """The weights in a slot, or on their way to it: of which layer, after how many changes."""

    layer: int
    version: int


@dataclass(slots=True, eq=False)
class Slot:
    """Device room for one layer's weights, as bytes."""

    weights: torch.Tensor
    contents: SlotContents | None = None
    record: Record = field(default_factory=Record)

    @property
    def layer(self) -> int | None:
        """The layer that has the slot."""
        return None if self.contents is None else self.contents.layer


@dataclass(slots=True, eq=False)
class GradientSlot:
    """Device room for one layer's gradients, as bytes that lie as those of its weights.

    `arrived` names the parameters that are in it, `writers` the compute lane's streams that may
    write it. `sums`: room for fp32 sums of chunks, an item for each element; `summing`: by
    position, where those of the running call are, until they are rounded. `is_pending`: the
    gradients stay until the step ends. `is_extra`: not one of the plan's slots, but torch's memory,
    which is freed once the gradients have left. `views` are
    kept by place and shape (`gradient_slots`).
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
