"""Gradients of layers that are updated on the host: sets or adds them, and sums their squares.

`layer_operation` has the path through memory or files. The training thread submits, and autograd's
thread does in backward. The lane of gradients computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from stronghold import native
from stronghold.memory.layer import LayerState
from stronghold.plan.cost import SUM_BYTES
from stronghold.streaming.layer_operation import LayerOperations, Verb
from stronghold.streaming.parts import Parts
from stronghold.streaming.pieces import (
    LayerGradients,
    Piece,
    gradient_bytes,
    set_or_add,
    summed_bytes,
)

# kSumBlock of the kernels: it is part of the result's definition
SUM_BLOCK_NUMEL = 65536


class HostGradients:
    """Brings gradients to arrays whose home is the host, or a file."""

    def __init__(self, parts: Parts) -> None:
        self._kernels, self._host = parts.kernels, parts.host
        self._operations = LayerOperations(parts.device, parts.host.tiers)

    def set_or_add(self, batch: Sequence[LayerGradients], array: str, *, norms: bool) -> None:
        """Bring gradients to an array of their layers, "gradients" or "accumulated".

        A parameter's gradient is added if the array has one already, else it is set. `norms`: take
        sums of squares of the result.
        """
        for gradients in batch:
            state = gradients.state
            positions = state.gradients.positions(array)
            added = gradients.positions & positions
            needs_load = bool(positions)
            positions |= gradients.positions
            square_sums = state.gradients.square_sums
            taken = PieceNorms(self._kernels, square_sums) if norms else None
            is_sum = array == "accumulated"
            verb = Verb.ACCUMULATE if is_sum else Verb.NORM if norms else Verb.MERGE
            self._operations.queue(
                verb,
                gradients,
                (array,),
                partial(self._set_or_add, array, added, taken, square_sums),
                partial(summed_bytes, norms=norms) if is_sum else gradient_bytes,
                also_writes=(state.records["norms"],) if norms or is_sum else (),
                needs_load=needs_load,
            )

    def _set_or_add(
        self,
        array: str,
        added: frozenset[int],
        norms: PieceNorms | None,
        square_sums: dict[int, float],
        piece: Piece,
    ) -> None:
        """Work of a lane: set the gradients of one piece, or add those of parameters in `added`."""
        target = piece.views[array]
        if array == "accumulated":
            segments = [
                (
                    piece.address(k, at),
                    target.data_ptr() + (at - piece.begin) * SUM_BYTES,
                    numel,
                    k in added,
                )
                for k, at, numel in piece.parameters()
            ]
            if segments:
                self._kernels.accumulate(piece.format.dtype, segments)
        # the offload has written them elsewhere
        elif target.data_ptr() != piece.flat.data_ptr():
            for k, at, numel in piece.parameters():
                elements = slice(at - piece.begin, at - piece.begin + numel)
                set_or_add(target[elements], piece.flat[elements], add=k in added)
        if norms is not None:
            norms.add(piece, array)
            return
        for k, _, _ in piece.parameters():  # a sum of before is that of another gradient
            square_sums.pop(k, None)

    def sum_squares(self, state: LayerState) -> None:
        """Compute the sums of squares that the layer lacks. All operations on its gradients have
        ended.

        A parameter lacks its own if it was summed before, and got no gradient in the last
        micro-batch, or if a program has set its gradient.
        """
        for k in sorted(state.gradients.without_square_sum):
            self._take_square_sum(state, k)

    def _take_square_sum(self, state: LayerState, k: int) -> None:
        ((_, begin, end),) = state.elements((k,))
        norms = PieceNorms(self._kernels, state.gradients.square_sums)
        state.gradients.square_sums[k] = 0.0
        parameter, array = state.layout.slices[k], state.gradients.array
        state.records[array].wait()
        first, stop = parameter.offset, parameter.offset + parameter.numel
        for elements, views in self._host.access.pieces(state.index, (array,), first, stop):
            piece_begin, piece_end = first + elements.start, first + elements.stop
            norms.add_part(views[array], piece_begin, piece_end, k, begin, end - begin)


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
            if is_whole or not numel:
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
