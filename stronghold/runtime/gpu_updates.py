"""Sums, norms and optimizer steps of the layers that are updated on the GPU.

Everything runs on the compute lane, in one launch for all layers of a batch. Nothing crosses the
link but the sums of squares, which the gate reads. The training thread submits, and autograd's in
backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from stronghold import native
from stronghold.memory.gradient_slots import gradient_view
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.optim.states import Format
from stronghold.runtime.parts import Parts
from stronghold.runtime.pieces import (
    Flat,
    Gradients,
    Loose,
    Piece,
    gradient_bytes,
    pieces_in_memory,
    set_or_add,
    step_bytes,
)


class GpuUpdates:
    """Works on the arrays of layers whose home is the GPU. `window` has their gradient slots."""

    def __init__(self, parts: Parts, window: Window) -> None:
        self._device, self._steps, self._metrics = parts.device, parts.steps, parts.metrics
        self._window = window
        # What updates the layers once the factor of their gradients is known.
        self._prepared: tuple[Sequence[Gradients], Callable[[float], None]] | None = None

    # -- gradients --------------------------------------------------------------------------------
    def set_or_add(self, batch: Sequence[Gradients], array: str, *, norms: bool) -> None:
        """Bring gradients to an array of their layers: add to what it has of a parameter, else set
        it. Norms are taken at the gate, in one launch for all layers."""
        del norms
        added = []
        for gradients in batch:
            positions = gradients.state.gradients.positions(array)
            added.append(gradients.positions & positions)
            positions |= gradients.positions
        if array == "accumulated":
            self._accumulate(batch, added)
            return
        for gradients, of_layer in zip(batch, added, strict=True):
            if gradients.state.on_gpu.own_gradient_slot is None:
                self._keep_loose(gradients, of_layer)
            else:
                self._merge(gradients, of_layer)

    def _keep_loose(self, gradients: Gradients, added: frozenset[int]) -> None:
        """Keep one tensor for each parameter. What is in a slot is cloned, since the slot is
        another layer's next."""
        loose = gradients.state.gradients.loose
        for k, gradient in _tensors(gradients):
            if k in added:
                loose[k].add_(gradient)
            else:
                is_in_slot = isinstance(gradients.source, Flat)
                loose[k] = gradient.clone() if is_in_slot else gradient

    def _merge(self, gradients: Gradients, added: frozenset[int]) -> None:
        """Bring gradients to the layer's own slot. They may be there already."""
        state, source = gradients.state, gradients.source
        own_slot = state.on_gpu.own_gradient_slot
        assert own_slot is not None
        if isinstance(source, Flat) and source.memory is own_slot.gradients:
            return

        def work() -> None:
            for k, gradient in _tensors(gradients):
                set_or_add(gradient_view(own_slot, state, k), gradient, add=k in added)

        self._device.compute.submit(
            f"merge {state.index}", work, reads=(gradients.record,), writes=(own_slot.record,)
        )

    def _accumulate(self, batch: Sequence[Gradients], added: Sequence[frozenset[int]]) -> None:
        """Add gradients to their layers' fp32 sums; those that are not `added` begin one."""
        added_to = {g.state.index: of_layer for g, of_layer in zip(batch, added, strict=True)}

        def work(pieces: Sequence[Piece]) -> None:
            segments: dict[torch.dtype, list[tuple[int, int, int, bool]]] = defaultdict(list)
            for piece in pieces:
                sums, of_layer = piece.views["accumulated"], added_to[piece.gradients.state.index]
                for k, at, numel in piece.parameters():
                    place = sums.data_ptr() + (at - piece.begin) * 4
                    segment = piece.address(k, at), place, numel, k in of_layer
                    segments[piece.format.dtype].append(segment)
            for dtype, of_dtype in segments.items():
                self._device.kernels.accumulate(dtype, of_dtype)

        moved = sum(
            state.layout.slices[k].numel * (state.sections[k].dtype.itemsize + more)
            for gradients in batch
            for state in (gradients.state,)
            for k in gradients.positions
            for more in (8 if k in added_to[state.index] else 4,)
        )
        self._submit("accumulate", batch, ("accumulated",), work, moved)

    # -- the gate ---------------------------------------------------------------------------------
    def close(self, pending: Sequence[Gradients]) -> Callable[[], list[float]] | None:
        """The gate closes with these gradients pending. Prepares their updates, and returns what
        waits for the sums of squares of all gradients of the step; None where there are none."""
        if not pending:
            return None
        sums = self._sum_squares(pending)
        self._prepared = pending, self._prepare(pending)
        return self._device.read_later(sums)

    def update_prepared(self, scale: float) -> None:
        """Update the layers of `close`."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            batch, update = prepared
            for gradients in batch:
                self._steps.count(gradients.state, gradients.positions)
            update(scale)

    def forget(self) -> None:
        """The step has ended, or is void: what was prepared is not done."""
        self._prepared = None

    # -- launches ---------------------------------------------------------------------------------
    def _sum_squares(self, batch: Sequence[Gradients]) -> torch.Tensor:
        """The sum of squares of each gradient, fp64, on the device: valid for later compute."""
        sums: list[torch.Tensor] = []

        def work(pieces: Sequence[Piece]) -> None:
            segments: dict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
            for piece in pieces:
                for k, at, numel in piece.parameters():
                    segments[piece.grad_dtype].append((piece.address(k, at), numel))
            kernels = self._device.kernels
            made = [kernels.sum_squares_async(dtype, each) for dtype, each in segments.items()]
            sums.append(made[0] if len(made) == 1 else torch.cat(made))

        moved = sum(gradients.moved_bytes(gradient_bytes) for gradients in batch)
        self._submit("norm", batch, (), work, int(moved))
        return sums[0]

    def _prepare(self, batch: Sequence[Gradients]) -> Callable[[float], None]:
        """The host's share of an update, done while the device is still busy with backward: all but
        the gradients' scale, with this moment's hyper-parameters. The result does the rest."""
        calls: dict[tuple[Format, torch.dtype], list[native.UpdateSegment]] = defaultdict(list)
        moved = 0.0
        for gradients in batch:
            state = gradients.state
            numbers = self._steps.next(state, gradients.positions, 1.0)
            steps = dict(zip(sorted(gradients.positions), numbers, strict=True))
            for piece in self._pieces(gradients, state.changed):
                calls[piece.format, piece.grad_dtype] += piece.segments(steps)
            summed = gradients.array == "accumulated"
            moved += gradients.moved_bytes(partial(step_bytes, summed=summed))
        updates = [
            self._device.kernels.prepare_update(
                made.kernel, made.dtype, dtype, segments, lean=made.trained.is_lean
            )
            for (made, dtype), segments in calls.items()
        ]

        def work(scale: float, _: Sequence[Piece]) -> None:
            for update in updates:
                update(scale)
            # A graph that was kept may need the weights of before: autograd refuses it then.
            torch.autograd.graph.increment_version(
                [g.state.parameters[k] for g in batch for k in g.positions]
            )

        changed = tuple(dict.fromkeys(a for gradients in batch for a in gradients.state.changed))
        return lambda scale: self._submit(
            "update", batch, changed, partial(work, scale), int(moved)
        )

    def _submit(
        self,
        verb: str,
        batch: Sequence[Gradients],
        changed: Sequence[str],
        work: Callable[[Sequence[Piece]], None],
        nbytes: int,
    ) -> None:
        """Run `work` on the compute lane, in one launch for all layers of `batch`."""
        pieces = [piece for gradients in batch for piece in self._pieces(gradients, changed)]
        records = [
            gradients.state.records[array]
            for gradients in batch
            for array in changed
            if gradients.state.array(array) is not None
        ]
        first = batch[0].state.index
        more = f" and {len(batch) - 1} more layers" if len(batch) > 1 else ""
        self._device.compute.submit(
            f"{verb} {first}{more}",
            lambda: work(pieces),
            reads=[gradients.record for gradients in batch],
            writes=records,
            nbytes=nbytes,
        )
        for seconds in self._device.compute.take_waits():
            self._metrics.waited("update", seconds)

    @staticmethod
    def _pieces(gradients: Gradients, changed: Sequence[str]) -> list[Piece]:
        present = (a for a in changed if gradients.state.array(a) is not None)
        return pieces_in_memory(gradients, (*present, *gradients.arrays))


def pending_on_gpu(state: LayerState) -> Flat | Loose:
    """Where the pending gradients of a layer that is updated on the GPU are."""
    own_slot = state.on_gpu.own_gradient_slot
    if own_slot is not None:
        return Flat(own_slot.gradients, own_slot.record)
    return Loose(dict(state.gradients.loose))


def _tensors(gradients: Gradients) -> Iterator[tuple[int, torch.Tensor]]:
    """Each gradient by itself, in the shape of its parameter, by position."""
    state, source = gradients.state, gradients.source
    for k in sorted(gradients.positions):
        if isinstance(source, Loose):
            yield k, source.tensors[k]
        else:
            assert isinstance(source, Flat)
            yield k, state.maps["weights"].parameter(source.memory, state.layout.slices[k])
