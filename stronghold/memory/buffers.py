"""Buffers that layers take in turn, on the device and on the host, and what lies in them.

Owns no memory: `memory.host` and `memory.window` make the buffers. A buffer may be overwritten when
the operations that its access record (`device.base`) names have ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stronghold.device.base import Record
from stronghold.model.arrays import Section

if TYPE_CHECKING:
    from stronghold.memory.layer import LayerState


@dataclass(slots=True, eq=False)
class Entry:
    """Host room for one layer's gradients, or for a piece on its way from or to a file."""

    memory: torch.Tensor
    record: Record = field(default_factory=Record)


class Ring(deque[Entry]):
    """Entries that are taken in turn."""

    def next(self) -> Entry:
        """The entry whose use lies longest back."""
        self.rotate(-1)
        return self[-1]


class Contents(NamedTuple):
    """The weights in a slot, or on their way to it: of which layer, after how many changes."""

    layer: int
    version: int


@dataclass(slots=True, eq=False)
class Slot:
    """Device room for one layer's weights, as bytes."""

    weights: torch.Tensor
    contents: Contents | None = None
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
    which is freed once the gradients have left.
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
    _views: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def view(self, state: LayerState, position: int) -> torch.Tensor:
        """The place of a parameter's gradient; layers are alike, so that each is made once."""
        part, section = state.layout.slices[position], state.sections[position]
        key = True, section.byte_of(part.offset), section.dtype, part.shape
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = state.maps["weights"].parameter(self.gradients, part)
        return found

    def sum_of(self, state: LayerState, position: int) -> torch.Tensor:
        """The place of a parameter's fp32 sum over the chunks of one call: apart from what other
        calls gave."""
        if state.sections[position].dtype is torch.float32 and position not in self.arrived:
            return self.view(state, position)
        if self.sums is None:  # what comes twice in a step is rare, and not planned
            numel = state.layout.trainable_numel
            self.sums = torch.empty(numel, dtype=torch.float32, device=self.gradients.device)
        part = state.layout.slices[position]
        key = False, part.offset, torch.float32, part.shape
        found = self._views.get(key)
        if found is None:
            flat = self.sums[part.offset : part.offset + part.numel]
            found = self._views[key] = flat.view(part.shape)
        return found

    def round_sums(self, state: LayerState) -> None:
        """The call's sums are complete: round them, and add them to what other calls gave."""
        if not self.arrived and self.summing:
            for section in state.maps["weights"].sections:
                if section.begin < state.layout.trainable_numel and self.sums is not None:
                    self._round_section(state, section)
        for position, total in self.summing.items():
            place = self.view(state, position)
            if position in self.arrived:
                place.add_(total.to(place.dtype))
            elif total is not place:
                place.copy_(total)
            self.arrived.add(position)
        self.summing.clear()

    def _round_section(self, state: LayerState, section: Section) -> None:
        """One rounding for all parameters of a section, where none had come before."""
        if section.dtype is torch.float32:
            return
        assert self.sums is not None
        place = state.maps["weights"].view(self.gradients, section.begin, section.end)
        place.copy_(self.sums[section.begin : section.end])
        done = [k for k in self.summing if state.sections[k] is section]
        self.arrived.update(done)
        for position in done:
            del self.summing[position]
