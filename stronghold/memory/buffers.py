"""Buffers: room that layers take in turn, on the device and on the host.

Owns what a buffer is; whose it is, the window, the host store and the tiers say. Every buffer
carries its record (`device.fence`): it may be overwritten when what uses it is done. The
training thread enters, and autograd's in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stronghold.device.fence import Record
from stronghold.model.layout import ParameterSlice


def view(flat: torch.Tensor, part: ParameterSlice) -> torch.Tensor:
    """The parameter's own shape inside its layer's flat array."""
    return flat[part.offset : part.offset + part.numel].view(part.shape)


@dataclass(slots=True, eq=False)
class Entry:
    """Host room for one layer's drained gradients, or for a piece on its way from or to a file."""

    memory: torch.Tensor
    record: Record = field(default_factory=Record)


class Ring:
    """Entries that are taken in turn."""

    def __init__(self, memories: Sequence[torch.Tensor] = ()) -> None:
        self._entries = [Entry(memory) for memory in memories]
        self._cursor = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, memory: torch.Tensor) -> None:
        self._entries.append(Entry(memory))

    def next(self) -> Entry:
        """The entry whose use lies longest back."""
        entry = self._entries[self._cursor]
        self._cursor = (self._cursor + 1) % len(self._entries)
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self._cursor = 0


@dataclass(slots=True, eq=False)
class Slot:
    """Device room for one layer's weights; `layer`: which one is in it, or on its way."""

    weights: torch.Tensor
    layer: int | None = None
    record: Record = field(default_factory=Record)


@dataclass(slots=True, eq=False)
class GradientSlot:
    """Device room for one layer's gradients in the compute dtype; `arrived` names the parameters
    that are in it, `writers` the compute lane's streams that may write it. `held`: gathering is
    over, and the gradients stay until the step ends. `sums`: room for fp32 sums of chunks; while
    `summed` the gradients are there, and not rounded yet."""

    gradients: torch.Tensor
    sums: torch.Tensor | None = None
    summed: bool = False
    layer: int | None = None
    held: bool = False
    arrived: set[int] = field(default_factory=set)
    writers: list[object] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    _views: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def view(self, part: ParameterSlice) -> torch.Tensor:
        """The place of a parameter's gradient; layers are alike, so that each is made once."""
        return self._view(self.gradients, part)

    def sum_of(self, part: ParameterSlice) -> torch.Tensor:
        """The place of a parameter's fp32 sum."""
        if self.sums is None:  # what comes twice in a step is rare, and not planned
            self.sums = torch.empty_like(self.gradients, dtype=torch.float32)
        if not self.summed:
            self.summed = True
            if self.arrived:
                self.sums.copy_(self.gradients)
        return self._view(self.sums, part)

    def round_sums(self) -> None:
        """The sums are complete: round them to the gradients."""
        if self.summed and self.sums is not None:
            self.gradients.copy_(self.sums)
            self.summed = False

    def _view(self, flat: torch.Tensor, part: ParameterSlice) -> torch.Tensor:
        place = flat.dtype, part.offset, part.shape
        found = self._views.get(place)
        if found is None:
            found = self._views[place] = view(flat, part)
        return found
