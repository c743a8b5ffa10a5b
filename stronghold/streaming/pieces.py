"""Kernel arguments: the gradients of a layer, and a piece of its arrays.

This file never submits an operation. The training thread makes pieces, and autograd's thread does
in backward. Lanes read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from stronghold import native
from stronghold.devices.base import Record
from stronghold.errors import StateError
from stronghold.memory.buffers import HostEntry
from stronghold.memory.layer import LayerState
from stronghold.memory.tiers import Views
from stronghold.optim.states import Format, group_size
from stronghold.plan.cost import SUM_BYTES
from stronghold.streaming.steps import ParameterStep

SUM_BLOCK_NUMEL = 65536  # kSumBlock of the kernels: it is part of the result's definition


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

    Only the parameters at `positions` have a gradient here.
    """

    state: LayerState
    positions: frozenset[int]
    source: InBuffer | PerParameter | InArray

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

    def has_any(self, begin: int, end: int) -> bool:
        """True if a parameter with elements in [begin, end) of the layer has a gradient here."""
        parameters = self.state.updated_elements(self.positions).spans
        return any(begin < at + numel and at < end for _, at, numel in parameters)

    def moved_bytes(self, bytes_each: Callable[[Format], float]) -> float:
        """Bytes that an operation moves, at `bytes_each(format)` per element of this rank."""
        numels = self.state.updated_elements(self.positions).numels
        return sum(bytes_each(element_format) * numel for element_format, numel in numels)


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
        """Dtype of the gradients: fp32 for sums over micro-batches, else the range's."""
        is_sum = self.gradients.array == "accumulated"
        return torch.float32 if is_sum else self.format.dtype

    def parameters(self) -> Iterator[tuple[int, int, int]]:
        """Yield (position, first element of the layer, number of elements) of each parameter that
        has a gradient in the piece."""
        for k, at, numel in self.gradients.state.updated_elements(self.gradients.positions).spans:
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
            fields = weight, low, gradient, numel, *moments, *numbers, scale, count, flags
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
        Piece(gradients, begin, end, views_in_memory(state, arrays, begin, end))
        for begin, end in state.shares
        if gradients.has_any(begin, end)
    ]


def views_in_memory(state: LayerState, arrays: Iterable[str], begin: int, end: int) -> Views:
    """Views of elements [begin, end), flat, of each of the arrays that their range has."""
    views: dict[str, torch.Tensor] = {}
    for array in arrays:
        view = state.view(array, begin, end)
        if view is not None:
            views[array] = view
    return views


class PieceNorms:
    """Sums the squares of each parameter's gradient over pieces, with the bits of one whole sum.

    Results are in `sums`, by position. The kernel adds up blocks of a fixed size, counted from a
    parameter's first element, and then the blocks in order ([Note: same bits] of `stronghold.h`).
    Pieces of a layer end at page borders. `PieceNorms` puts a block together that a border cuts,
    before it is summed. A sum is complete when every element was added, in order. One thread at a
    time enters.
    """

    def __init__(self, kernels: native.Kernels, sums: dict[int, float]) -> None:
        self._kernels = kernels
        self._sums = sums
        self._totals: dict[int, float] = {}  # `sums` may have an older one
        self._cut: torch.Tensor | None = None  # the block that the last piece cut

    def add(self, piece: Piece, array: str = "") -> None:
        """Add the gradients of the piece, of every parameter that has one. `array` names the array
        to read them from, "" the memory that the piece's gradients lie in."""
        flat = piece.views[array] if array else piece.flat
        gradients = piece.gradients
        whole_parameters: list[int] = []
        segments: list[tuple[int, int]] = []  # address, number of elements
        for k, first, stop in gradients.state.elements(gradients.positions):
            if gradients.state.layout.slices[k].range != piece.range:
                continue
            numel = stop - first
            is_whole = piece.begin <= first and stop <= piece.end
            # A simulation would spend most of its time on blocks.
            if is_whole or not numel or flat.is_meta:
                address = flat.data_ptr() + (first - piece.begin) * flat.element_size()
                whole_parameters.append(k)
                segments.append((address, numel))
            elif first < piece.end and piece.begin < stop:
                self.add_part(flat, piece.begin, piece.end, k, first, numel)
        sums = self._kernels.sum_squares(flat.dtype, segments)
        self._sums.update(zip(whole_parameters, sums, strict=True))

    def add_part(
        self, flat: torch.Tensor, begin: int, end: int, k: int, first: int, numel: int
    ) -> None:
        """Add the elements of parameter `k` that lie in `flat`. `flat` has the layer's elements
        [begin, end); the parameter has `numel` elements from `first` on."""
        blocks: list[torch.Tensor] = []
        at, stop = max(begin, first), min(end, first + numel)
        while at < stop:
            done = (at - first) // SUM_BLOCK_NUMEL + 1
            last = first + min(numel, done * SUM_BLOCK_NUMEL)
            block = flat[at - begin : min(stop, last) - begin]
            if self._cut is not None:
                block, self._cut = torch.cat([self._cut, block]), None
            if stop < last:
                self._cut = block.clone()
            else:
                blocks.append(block)
            at = min(stop, last)
        segments = [(block.data_ptr(), block.numel()) for block in blocks]
        for value in self._kernels.sum_squares(flat.dtype, segments):
            self._sums[k] = self._totals[k] = self._totals.get(k, 0.0) + value


def gradient_bytes(element_format: Format) -> float:
    """Bytes of the gradient of one element."""
    return element_format.dtype.itemsize


def summed_bytes(element_format: Format, *, norms: bool) -> float:
    """Bytes that move when one gradient is added to its fp32 sum. The sum is read and written, and
    read once more for a norm (`norms`)."""
    num_passes = 3 if norms else 2
    return element_format.dtype.itemsize + SUM_BYTES * num_passes


def step_bytes(element_format: Format, *, summed: bool) -> float:
    """Bytes that an update reads and writes for one element. `summed`: the gradient is an fp32 sum
    over micro-batches."""
    gradient_dtype = torch.float32 if summed else element_format.dtype
    return element_format.trained.update_bytes(gradient_dtype)


def set_or_add(target: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
    """Copy `gradient` to `target`, or add it (`add`)."""
    if add:
        target.add_(gradient)
    else:
        target.copy_(gradient)
