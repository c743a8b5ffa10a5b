"""Optimizer steps of layers that are updated on the host: in place, or early into second arrays.

`layer_operation` has the path through memory or files. The training thread submits, and autograd's
thread submits early steps in backward. The lane of updates computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from stronghold import native
from stronghold.devices.base import Fence
from stronghold.memory.layer import LayerState
from stronghold.model.layout import ParameterSlice
from stronghold.streaming.layer_operation import LayerOperations, Verb
from stronghold.streaming.parts import Parts
from stronghold.streaming.pieces import LayerGradients, Piece, pieces_in_memory
from stronghold.streaming.steps import ParameterStep


class HostUpdates:
    """Steps layers whose home is the host, or a file."""

    def __init__(self, parts: Parts) -> None:
        self._device, self._kernels, self._team = (parts.device, parts.kernels, parts.team)
        self._operations = LayerOperations(parts.device, parts.host.tiers)

    def update_in_place(self, gradients: LayerGradients, steps: Sequence[ParameterStep]) -> None:
        """Queue one optimizer step of a layer, in place. `steps` has one entry for each parameter
        with a gradient, in the order of positions."""
        numbers = dict(zip(sorted(gradients.positions), steps, strict=True))
        work = partial(self._step, numbers=numbers, targets=None)
        changed = gradients.state.changed
        publish = partial(self._team.publishing, gradients.state)
        self._operations.queue(
            Verb.UPDATE, gradients, changed, work, gradients.step_bytes, last=publish
        )
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

        return self._device.update.submit(
            f"update early {state.index}",
            work,
            reads=(gradients.record, *state.records_of(second.arrays)),
            writes=tuple(second.records.values()),
            nbytes=gradients.elements.moved_bytes(gradients.step_bytes),
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


def _without_step(
    state: LayerState, part: ParameterSlice
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (view in a second array, view in the array) of a parameter, for each changed array."""
    begin, end = part.offset, part.offset + part.numel
    for array in state.changed:
        source, target = (state.view(array, begin, end), state.second_view(array, begin, end))
        if source is not None and target is not None:
            yield target, source
