"""What a kernel works on: gradients of a layer, and a piece of its arrays.

Nothing here submits an operation. The training thread makes pieces, and autograd's in backward.
Lanes read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from stronghold import native
from stronghold.device.base import Record
from stronghold.memory.buffers import Entry
from stronghold.memory.layer import LayerState
from stronghold.memory.tiers import Views
from stronghold.optim.states import Format, group_size
from stronghold.plan.cost import SUM_BYTES
from stronghold.runtime.steps import ParameterStep

SUM_BLOCK_NUMEL = 65536  # kSumBlock of the kernels: it is part of the result's definition


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Gradients in one buffer, as bytes that lie as the layer's array "gradients"."""

    memory: torch.Tensor
    record: Record


@dataclass(frozen=True, slots=True, eq=False)
class Loose:
    """Gradients in one tensor for each parameter, by position. All of them are on the GPU, written
    in order with compute."""

    tensors: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class InArray:
    """Gradients in an array of their layer, in memory or in a file: "gradients" or
    "accumulated"."""

    array: str


@dataclass(slots=True, eq=False)
class Gradients:
    """Gradients of one layer, of the parameters at `positions`, and where they are now."""

    state: LayerState
    positions: frozenset[int]
    source: Flat | Loose | InArray

    @property
    def record(self) -> Record:
        """The access record of the memory that they are in."""
        if isinstance(self.source, Flat):
            return self.source.record
        if isinstance(self.source, InArray):
            return self.state.records[self.source.array]
        return Record()

    @property
    def array(self) -> str:
        """The array that they are in; "" for none."""
        return self.source.array if isinstance(self.source, InArray) else ""

    @property
    def arrays(self) -> tuple[str, ...]:
        return (self.array,) if self.array else ()

    def has_any(self, begin: int, end: int) -> bool:
        """Whether a parameter with elements in [begin, end) of the layer has a gradient here."""
        parameters = self.state.owned(self.positions).parts
        return any(begin < at + numel and at < end for _, at, numel in parameters)

    def moved_bytes(self, bytes_each: Callable[[Format], float]) -> float:
        """Bytes of an operation that moves `bytes_each(format)` for each of this rank's
        elements."""
        numels = self.state.owned(self.positions).numels
        return sum(bytes_each(made) * numel for made, numel in numels)


@dataclass(eq=False)  # without slots: its properties are computed once
class Piece:
    """Elements [begin, end) of one range of a layer, and the arrays that an operation works on
    there. `entry` has those that are loaded from files."""

    gradients: Gradients
    begin: int
    end: int
    views: Views
    entry: Entry | None = None

    def address(self, k: int, at: int) -> int:
        """The address of the gradient of the layer's element `at`, of parameter `k`."""
        source = self.gradients.source
        if isinstance(source, Loose):
            gradient = source.tensors[k]
            offset = at - self.gradients.state.layout.slices[k].offset
            return gradient.data_ptr() + offset * gradient.element_size()
        flat = self.flat
        return flat.data_ptr() + (at - self.begin) * flat.element_size()

    @cached_property
    def flat(self) -> torch.Tensor:
        """The gradients of these elements, flat. Not for `Loose` ones."""
        source = self.gradients.source
        if isinstance(source, Flat):
            places = self.gradients.state.maps["gradients"]
            return places.view(source.memory, self.begin, self.end)
        return self.views[self.gradients.array]

    @cached_property
    def range(self) -> int:
        """The number of the range that has the elements."""
        ranges = self.gradients.state.layout.ranges
        return next(i for i, each in enumerate(ranges) if each.begin <= self.begin < each.end)

    @cached_property
    def format(self) -> Format:
        """The format of this range."""
        state = self.gradients.state
        return state.formats[state.layout.ranges[self.range].format]

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of its gradients."""
        is_sum = self.gradients.array == "accumulated"
        return torch.float32 if is_sum else self.format.dtype

    def parameters(self) -> Iterator[tuple[int, int, int]]:
        """(position, first element of the layer, number of elements) of the parameters that have a
        gradient in the piece."""
        for k, at, numel in self.gradients.state.owned(self.gradients.positions).parts:
            first, last = max(at, self.begin), min(at + numel, self.end)
            if first < last:
                yield k, first, last - first

    def targets(self) -> list[native.Target]:
        """Where an early update of the piece writes, for each of `segments`: the layer's second
        arrays."""
        state, places = self.gradients.state, list[tuple[int, int, int]]()
        for array in self.format.trained.kernel_arrays:
            flat = None
            if array is not None and array in self.views:
                flat = state.second_view(array, self.begin, self.end)
            if array is None or flat is None:
                places.append((0, 0, 1))
            else:
                places.append((flat.data_ptr(), flat.element_size(), group_size(array)))
        return [
            native.Target(*(begin + (at - self.begin) // of * size for begin, size, of in places))
            for _, at, _ in self.parameters()
        ]

    def segments(self, steps: Mapping[int, ParameterStep]) -> list[native.UpdateSegment]:
        """The update kernel's segments, one for each parameter that has a gradient in the piece.
        The caller keeps the piece's arrays alive until the kernel has run."""
        # Of each array of a segment: the address of its first item, an item's bytes, its elements.
        places: list[tuple[int, int, int]] = []
        for array in self.format.trained.kernel_arrays:
            flat = None if array is None else self.views.get(array)
            if array is None or flat is None:
                places.append((0, 0, 1))
            else:
                places.append((flat.data_ptr(), flat.element_size(), group_size(array)))
        segments = []
        for k, at, numel in self.parameters():
            i = at - self.begin
            weight, low, *moments = (begin + i // of * size for begin, size, of in places)
            numbers, scale, count, flags = steps[k]
            gradient = self.address(k, at)
            fields = weight, low, gradient, numel, *moments, *numbers, scale, count, flags
            segments.append(native.UpdateSegment._make(fields))
        return segments


def pieces_in_memory(gradients: Gradients, arrays: Sequence[str]) -> list[Piece]:
    """A layer that lies in memory, with these arrays: a piece for each range that has a
    gradient."""
    state = gradients.state
    return [
        Piece(gradients, begin, end, views_in_memory(state, arrays, begin, end))
        for begin, end in state.shares
        if gradients.has_any(begin, end)
    ]


def views_in_memory(state: LayerState, arrays: Iterable[str], begin: int, end: int) -> Views:
    """Elements [begin, end) of those arrays that their range has."""
    views: dict[str, torch.Tensor] = {}
    for array in arrays:
        view = state.view(array, begin, end)
        if view is not None:
            views[array] = view
    return views


class PieceNorms:
    """Sums of squares of parameters, by position, in `sums`, with the bits that the whole gives.

    The kernel adds up blocks of a fixed size, counted from a parameter's first element, and then
    the blocks in order ([Note: same bits] of `stronghold.h`). Pieces of a layer end wherever a page
    does, so a block that is cut is put together here before it is summed. A sum is complete once
    every element was added, in order. Entered by one thread at a time.
    """

    def __init__(self, kernels: native.Kernels, sums: dict[int, float]) -> None:
        self._kernels = kernels
        self._sums = sums
        self._totals: dict[int, float] = {}  # `sums` may have an older one
        self._cut: torch.Tensor | None = None  # the block that the last piece cut

    def add(self, piece: Piece, array: str = "") -> None:
        """Add the piece's gradients, or what lies in `array`, of every parameter that has one."""
        flat = piece.views[array] if array else piece.flat
        gradients, whole = piece.gradients, list[tuple[int, int, int]]()
        for k, at, stop in gradients.state.elements(gradients.positions):
            if gradients.state.layout.slices[k].range != piece.range:
                continue
            numel = stop - at
            inside = piece.begin <= at and at + numel <= piece.end
            # A simulation's blocks would be most of its time.
            if inside or not numel or flat.is_meta:
                address = flat.data_ptr() + (at - piece.begin) * flat.element_size()
                whole.append((k, address, numel))
            elif at < piece.end and piece.begin < at + numel:
                self.add_part(flat, piece.begin, piece.end, k, at, numel)
        sums = self._kernels.sum_squares(flat.dtype, [(at, numel) for _, at, numel in whole])
        self._sums.update(zip((k for k, _, _ in whole), sums, strict=True))

    def add_part(
        self, flat: torch.Tensor, begin: int, end: int, k: int, first: int, numel: int
    ) -> None:
        """Add what `flat`, which has elements [begin, end), has of parameter `k`: `numel` elements
        of the layer from `first` on."""
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


def gradient_bytes(made: Format) -> float:
    """Bytes of the gradient of one element."""
    return made.dtype.itemsize


def summed_bytes(made: Format, *, norms: bool) -> float:
    """Bytes of one gradient, and of its fp32 sum, which is read and written, and read once more for
    a norm."""
    return made.dtype.itemsize + SUM_BYTES * (3 if norms else 2)


def step_bytes(made: Format, *, summed: bool) -> float:
    """Bytes that an update reads and writes for one element; `summed`: its gradient is fp32."""
    return made.trained.update_bytes(torch.float32 if summed else made.dtype)


def set_or_add(target: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
    """Write a gradient to its place, or add it to what is there."""
    if add:
        target.add_(gradient)
    else:
        target.copy_(gradient)
