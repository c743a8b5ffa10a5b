"""Kernel arguments: the gradients of a layer, and a piece of its arrays.

This file never submits an operation. The training thread makes pieces, and autograd's thread does
in backward. Lanes read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from stronghold import native
from stronghold.devices.base import Record
from stronghold.errors import StateError
from stronghold.memory.buffers import HostEntry
from stronghold.memory.layer import LayerState, UpdatedElements
from stronghold.memory.tiers import Views
from stronghold.optim.states import Format, group_size
from stronghold.plan.cost import SUM_BYTES
from stronghold.streaming.steps import ParameterStep


@dataclass(frozen=True, slots=True, eq=False)
class InBuffer:
    """Gradients in one buffer of bytes, laid out like the layer's array "gradients"."""

    memory: torch.Tensor
    record: Record


@dataclass(frozen=True, slots=True, eq=False)
class PerParameter:
    """Gradients in one tensor for each parameter, by position. They are on the GPU. The compute
    lane writes them."""

    tensors: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class InArray:
    """Gradients in an array of their layer, in memory or in a file: "gradients" or
    "accumulated"."""

    array: str


@dataclass(slots=True, eq=False)
class LayerGradients:
    """Gradients of one layer, and the memory that they lie in now.

    `elements`: of the parameters that have a gradient here.
    """

    state: LayerState
    elements: UpdatedElements
    source: InBuffer | PerParameter | InArray

    @property
    def positions(self) -> frozenset[int]:
        """Positions of the parameters that have a gradient here."""
        return self.elements.positions

    @property
    def record(self) -> Record:
        """Access record of the memory that the gradients lie in."""
        if isinstance(self.source, InBuffer):
            return self.source.record
        if isinstance(self.source, InArray):
            return self.state.records[self.source.array]
        return Record()

    @property
    def array(self) -> str:
        """Name of the layer's array that the gradients lie in; "" for other memory."""
        return self.source.array if isinstance(self.source, InArray) else ""

    @property
    def arrays(self) -> tuple[str, ...]:
        """`array` in a tuple; () for other memory."""
        return (self.array,) if self.array else ()

    def dtype(self, element_format: Format) -> torch.dtype:
        """Dtype of the gradients of a range: fp32 for sums over micro-batches, else the range's."""
        return torch.float32 if self.array == "accumulated" else element_format.dtype

    def step_bytes(self, element_format: Format) -> float:
        """Bytes that an update reads and writes for one element."""
        return element_format.trained.update_bytes(self.dtype(element_format))


def gradients_in_array(state: LayerState, array: str) -> LayerGradients:
    """The layer's gradients that wait in its `array`, "gradients" or "accumulated", on the host or
    in a file."""
    elements = state.updated_elements(frozenset(state.gradients.positions(array)))
    return LayerGradients(state, elements, InArray(array))


class _Items(NamedTuple):
    """Items of one array of a piece. One item, such as a scale, may belong to several elements.
    `begin` is 0 and `item_bytes` 0 for an array that the range does not have."""

    begin: int
    item_bytes: int
    elements_per_item: int

    def address_of(self, element: int) -> int:
        """Address of the item of the piece's `element`."""
        return self.begin + element // self.elements_per_item * self.item_bytes


@dataclass(eq=False)  # without slots: its properties are computed once
class Piece:
    """Elements [begin, end) of one range of a layer, in every array that an operation works on.

    `views` has these elements by array, flat. `entry` is the staging buffer of arrays that were
    loaded from files.
    """

    gradients: LayerGradients
    begin: int
    end: int
    views: Views
    entry: HostEntry | None = None

    def address(self, k: int, at: int) -> int:
        """Address of the gradient of the layer's element `at`, which belongs to parameter `k`."""
        source = self.gradients.source
        if isinstance(source, PerParameter):
            gradient = source.tensors[k]
            offset = at - self.gradients.state.layout.slices[k].offset
            return gradient.data_ptr() + offset * gradient.element_size()
        flat = self.flat
        return flat.data_ptr() + (at - self.begin) * flat.element_size()

    @cached_property
    def flat(self) -> torch.Tensor:
        """Gradients of these elements, flat. `PerParameter` gradients have no such tensor."""
        source = self.gradients.source
        if isinstance(source, InBuffer):
            places = self.gradients.state.maps["gradients"]
            return places.view(source.memory, self.begin, self.end)
        return self.views[self.gradients.array]

    @cached_property
    def range(self) -> int:
        """Number of the range that has the elements."""
        for number, candidate in enumerate(self.gradients.state.layout.ranges):
            if candidate.begin <= self.begin < candidate.end:
                return number
        raise StateError(f"no range of the layer has element {self.begin}")

    @cached_property
    def format(self) -> Format:
        """Format of this range."""
        state = self.gradients.state
        return state.formats[state.layout.ranges[self.range].format]

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the gradients in this range."""
        return self.gradients.dtype(self.format)

    def parameters(self) -> Iterator[tuple[int, int, int]]:
        """Yield (position, first element of the layer, number of elements) of each parameter that
        has a gradient in the piece."""
        for k, at, numel in self.gradients.elements.spans:
            first, last = max(at, self.begin), min(at + numel, self.end)
            if first < last:
                yield k, first, last - first

    def targets(self) -> list[native.Target]:
        """Output addresses of an early update, one target for each of `segments`. They lie in the
        layer's second arrays."""
        state = self.gradients.state
        views: dict[str, torch.Tensor] = {}
        for array in self.format.trained.kernel_arrays:
            if array is not None and array in self.views:
                second = state.second_view(array, self.begin, self.end)
                if second is not None:
                    views[array] = second
        items = self._kernel_items(views)
        targets = []
        for _, first, _ in self.parameters():
            addresses = (item.address_of(first - self.begin) for item in items)
            targets.append(native.Target(*addresses))
        return targets

    def segments(self, steps: Mapping[int, ParameterStep]) -> list[native.UpdateSegment]:
        """Segments of the update kernel, one for each parameter that has a gradient in the piece.
        The caller keeps the piece's arrays alive until the kernel has run."""
        items = self._kernel_items(self.views)
        segments = []
        for k, first, numel in self.parameters():
            addresses = [item.address_of(first - self.begin) for item in items]
            weight, low, *moments = addresses
            numbers, scale, count, flags = steps[k]
            gradient = self.address(k, first)
            fields = (weight, low, gradient, numel, *moments, *numbers, scale, count, flags)
            segments.append(native.UpdateSegment._make(fields))
        return segments

    def _kernel_items(self, views: Views) -> list[_Items]:
        """Items of each array that the kernel takes, in the kernel's order."""
        items = []
        for array in self.format.trained.kernel_arrays:
            flat = None if array is None else views.get(array)
            if array is None or flat is None:
                items.append(_Items(0, 0, 1))
            else:
                items.append(_Items(flat.data_ptr(), flat.element_size(), group_size(array)))
        return items


def pieces_in_memory(gradients: LayerGradients, arrays: Sequence[str]) -> list[Piece]:
    """Make a piece for each range that has a gradient, of a layer whose `arrays` lie in memory."""
    state = gradients.state
    return [
        Piece(gradients, begin, end, state.views_of(arrays, begin, end))
        for begin, end in state.shares
        if gradients.elements.has_any(begin, end)
    ]


def gradient_bytes(element_format: Format) -> float:
    """Bytes of the gradient of one element."""
    return element_format.dtype.itemsize


def summed_bytes(element_format: Format, *, norms: bool) -> float:
    """Bytes that move when one gradient is added to its fp32 sum. The sum is read and written, and
    read once more for a norm (`norms`)."""
    num_passes = 3 if norms else 2
    return element_format.dtype.itemsize + SUM_BYTES * num_passes


def set_or_add(target: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
    """Copy `gradient` to `target`, or add it (`add`)."""
    if add:
        target.add_(gradient)
    else:
        target.copy_(gradient)
