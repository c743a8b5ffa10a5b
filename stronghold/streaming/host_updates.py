"""Sums, norms and optimizer steps of layers that are updated on the host.

`layer_operation` has the path that all of them take, in memory or through files. The training
thread submits, and autograd's thread does in backward. Lanes compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from stronghold import native
from stronghold.devices.base import Fence
from stronghold.memory.layer import LayerState
from stronghold.model.layout import ParameterSlice
from stronghold.plan.cost import SUM_BYTES
from stronghold.streaming.layer_operation import LayerOperations, Verb
from stronghold.streaming.parts import Parts
from stronghold.streaming.pieces import (
    LayerGradients,
    Piece,
    PieceNorms,
    gradient_bytes,
    pieces_in_memory,
    set_or_add,
    step_bytes,
    summed_bytes,
)
from stronghold.streaming.steps import ParameterStep


class HostUpdates:
    """Works on the arrays of layers whose home is the host, or a file.

    Sums and norms run on the lane of gradients, and optimizer steps on the lane of updates.
    """

    def __init__(self, parts: Parts) -> None:
        self._device, self._kernels, self._team = parts.device, parts.kernels, parts.team
        self._host = parts.host
        self._operations = LayerOperations(parts.device, parts.host.tiers)

    # -- the three operations ---------------------------------------------------------------------
    def set_or_add(self, batch: Sequence[LayerGradients], array: str, *, norms: bool) -> None:
        """Bring gradients to an array of their layers, "gradients" or "accumulated".

        A parameter's gradient is added if the array has one already, else it is set. `norms`: take
        sums of squares of the result.
        """
        for gradients in batch:
            state = gradients.state
            positions = state.gradients.positions(array)
            added = gradients.positions & positions
            is_first = not positions
            positions |= gradients.positions
            taken = PieceNorms(self._kernels, state.gradients.square_sums) if norms else None
            is_sum = array == "accumulated"
            verb = Verb.ACCUMULATE if is_sum else Verb.NORM if norms else Verb.MERGE
            self._operations.queue(
                verb,
                gradients,
                (array,),
                partial(self._set_or_add, array, added, taken),
                partial(summed_bytes, norms=norms) if is_sum else gradient_bytes,
                also_writes=(state.records["norms"],) if norms or is_sum else (),
                is_first=is_first,
            )

    def _set_or_add(
        self, array: str, added: frozenset[int], norms: PieceNorms | None, piece: Piece
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
        elif target.data_ptr() != piece.flat.data_ptr():  # the offload has written them elsewhere
            for k, at, numel in piece.parameters():
                elements = slice(at - piece.begin, at - piece.begin + numel)
                set_or_add(target[elements], piece.flat[elements], add=k in added)
        if norms is not None:
            norms.add(piece, array)

    def update_in_place(self, gradients: LayerGradients, steps: Sequence[ParameterStep]) -> None:
        """Queue one optimizer step of a layer, in place. `steps` has one entry for each parameter
        with a gradient, in the order of positions."""
        numbers = dict(zip(sorted(gradients.positions), steps, strict=True))
        work = partial(self._step, numbers=numbers, targets=None)
        changed = gradients.state.changed
        bytes_each = partial(step_bytes, summed=gradients.array == "accumulated")
        publish = partial(self._team.publishing, gradients.state)
        self._operations.queue(Verb.UPDATE, gradients, changed, work, bytes_each, last=publish)
        self._team.exchange(gradients.state)

    def update_early(self, gradients: LayerGradients, steps: Sequence[ParameterStep]) -> Fence:
        """Queue the same step out of place: it reads the layer's arrays and writes its second ones.

        It writes every element of the second arrays: parameters without a step are copied. The
        layer lies in memory. Returns the update's fence.
        """
        state, second = gradients.state, gradients.state.second
        assert second is not None
        numbers = dict(zip(sorted(gradients.positions), steps, strict=True))
        # Hazard: when the lane runs, the gate may have exchanged the arrays. So all addresses are
        # taken now.
        pieces = pieces_in_memory(gradients, (*state.changed, *gradients.arrays))
        targets = [piece.targets() for piece in pieces]
        others = sorted(frozenset(range(len(state.parameters))) - gradients.positions)
        copies = [copy for k in others for copy in _without_step(state, state.layout.slices[k])]

        def work() -> None:
            for piece, of_piece in zip(pieces, targets, strict=True):
                self._step(piece, numbers, targets=of_piece)
            for target, source in copies:
                target.copy_(source)

        bytes_each = partial(step_bytes, summed=gradients.array == "accumulated")
        return self._device.update.submit(
            f"update early {state.index}",
            work,
            reads=(gradients.record, *state.records_of(second.arrays)),
            writes=tuple(second.records.values()),
            nbytes=int(gradients.moved_bytes(bytes_each)),
        )

    def _step(
        self,
        piece: Piece,
        numbers: Mapping[int, ParameterStep],
        targets: list[native.Target] | None,
    ) -> None:
        """Work of a lane: run the update kernel over one piece."""
        self._kernels.update(
            piece.format.kernel,
            piece.format.dtype,
            piece.grad_dtype,
            piece.segments(numbers),
            lean=piece.format.trained.is_lean,
            targets=targets,
        )

    # -- square sums ------------------------------------------------------------------------------
    def square_sums(self, state: LayerState) -> list[float]:
        """Return the sums of squares of the layer's gradients. Their operations have ended.

        A parameter that was summed before, and got no gradient in the last micro-batch, has no sum
        of squares yet. It is computed here.
        """
        gradients = state.gradients
        arrived = gradients.arrived
        for k in sorted(arrived - gradients.square_sums.keys()):
            self._take_square_sum(state, k)
        return [gradients.square_sums[k] for k in arrived]

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


def _without_step(
    state: LayerState, part: ParameterSlice
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (view in a second array, view in the array) of a parameter, for each changed array."""
    begin, end = part.offset, part.offset + part.numel
    for array in state.changed:
        source, target = state.view(array, begin, end), state.second_view(array, begin, end)
        if source is not None and target is not None:
            yield target, source
