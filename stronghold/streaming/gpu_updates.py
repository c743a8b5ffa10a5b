"""Sums, norms and optimizer steps of layers that are updated on the GPU.

Everything runs on the compute lane, in one launch for all layers of a batch. Only the sums of
squares cross the link: the gate reads them. The training thread submits, and autograd's thread does
in backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stronghold import native
from stronghold.memory.gradient_slots import gradient_view
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.optim.states import Format
from stronghold.plan.cost import SUM_BYTES
from stronghold.streaming.layer_operation import Verb
from stronghold.streaming.parts import Parts
from stronghold.streaming.pieces import (
    InBuffer,
    LayerGradients,
    PerParameter,
    Piece,
    gradient_bytes,
    pieces_in_memory,
    set_or_add,
)
from stronghold.telemetry.metrics import WaitCause


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _PendingUpdate:
    """An update that waits for the factor of its gradients. Each launch takes that factor.
    `nbytes`: bytes that the update moves."""

    batch: Sequence[LayerGradients]
    launches: tuple[Callable[[float], None], ...]
    nbytes: int


class GpuUpdates:
    """Works on the arrays of layers whose home is the GPU. `window` has their gradient slots."""

    def __init__(self, parts: Parts, window: Window) -> None:
        self._device, self._steps, self._metrics = (parts.device, parts.steps, parts.metrics)
        self._window = window
        self._prepared: _PendingUpdate | None = None

    # -- gradients --------------------------------------------------------------------------------
    def set_or_add(self, batch: Sequence[LayerGradients], array: str) -> None:
        """Bring gradients to an array of their layers, "gradients" or "accumulated".

        A parameter's gradient is added if the array has one already, else it is set. Norms are
        taken at the gate, in one launch for all layers.
        """
        added = []
        for gradients in batch:
            positions = gradients.state.gradients.positions(array)
            added.append(gradients.positions & positions)
            positions |= gradients.positions
        if array == "accumulated":
            self._accumulate(batch, added)
            return
        for gradients, added_positions in zip(batch, added, strict=True):
            if gradients.state.on_gpu.own_gradient_slot is None:
                self._keep_per_parameter(gradients, added_positions)
            else:
                self._merge(gradients, added_positions)

    def _keep_per_parameter(self, gradients: LayerGradients, added: frozenset[int]) -> None:
        """Keep one tensor for each parameter. A gradient in a slot is cloned: another layer takes
        the slot next."""
        per_parameter = gradients.state.gradients.per_parameter
        is_in_slot = isinstance(gradients.source, InBuffer)
        for k, gradient in _tensors(gradients):
            if k in added:
                per_parameter[k].add_(gradient)
            else:
                per_parameter[k] = gradient.clone() if is_in_slot else gradient

    def _merge(self, gradients: LayerGradients, added: frozenset[int]) -> None:
        """Bring gradients to the layer's own slot. Nothing is queued if they lie there already."""
        state, source = gradients.state, gradients.source
        own_slot = state.on_gpu.own_gradient_slot
        assert own_slot is not None
        if isinstance(source, InBuffer) and source.memory is own_slot.gradients:
            return

        def work() -> None:
            for k, gradient in _tensors(gradients):
                set_or_add(gradient_view(own_slot, state, k), gradient, add=k in added)

        self._device.compute.submit(
            f"{Verb.MERGE.value} {state.index}",
            work,
            reads=(gradients.record,),
            writes=(own_slot.record,),
        )

    def _accumulate(self, batch: Sequence[LayerGradients], added: Sequence[frozenset[int]]) -> None:
        """Add gradients to their layers' fp32 sums. Gradients that are not `added` begin a sum."""
        added_of_layer: dict[int, frozenset[int]] = {}
        moved = 0
        for gradients, positions in zip(batch, added, strict=True):
            state = gradients.state
            added_of_layer[state.index] = positions
            for k in gradients.positions:
                sum_bytes = 2 * SUM_BYTES if k in positions else SUM_BYTES
                gradient_itemsize = state.sections[k].dtype.itemsize
                moved += state.layout.slices[k].numel * (gradient_itemsize + sum_bytes)
        work = partial(self._add_to_sums, added_of_layer)
        self._submit(Verb.ACCUMULATE, batch, ("accumulated",), work, moved)

    def _add_to_sums(
        self, added_of_layer: Mapping[int, frozenset[int]], pieces: Sequence[Piece]
    ) -> None:
        """Work of the compute lane: one launch for each dtype of gradients."""
        segments: dict[torch.dtype, list[tuple[int, int, int, bool]]] = defaultdict(list)
        for piece in pieces:
            sums = piece.views["accumulated"]
            added = added_of_layer[piece.gradients.state.index]
            for k, first, numel in piece.parameters():
                target = sums.data_ptr() + (first - piece.begin) * SUM_BYTES
                segment = (piece.address(k, first), target, numel, k in added)
                segments[piece.format.dtype].append(segment)
        for dtype, dtype_segments in segments.items():
            self._device.kernels.accumulate(dtype, dtype_segments)

    # -- the gate ---------------------------------------------------------------------------------
    def close(self, pending: Sequence[LayerGradients]) -> Callable[[], list[float]] | None:
        """The gate closes with these gradients pending: prepare their updates.

        Returns a function that waits for the sums of squares of all these gradients; None if there
        are none.
        """
        if not pending:
            return None
        sums = self._sum_squares(pending)
        self._prepared = self._prepare(pending)
        return self._device.compute.read_later(sums)

    def update_prepared(self, scale: float) -> None:
        """Update the layers that `close` got. `scale` multiplies their gradients."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return
        batch = prepared.batch
        for gradients in batch:
            self._steps.count(gradients.state, gradients.positions)
        changed = dict.fromkeys(array for g in batch for array in g.state.changed)
        work = partial(self._update, prepared, scale)
        self._submit(Verb.UPDATE, batch, tuple(changed), work, prepared.nbytes)

    def forget(self) -> None:
        """The step has ended, or is void: drop the prepared update."""
        self._prepared = None

    # -- launches ---------------------------------------------------------------------------------
    def _sum_squares(self, batch: Sequence[LayerGradients]) -> torch.Tensor:
        """Return the sum of squares of each gradient, fp64, on the device. Later work of the
        compute lane may read it."""
        sums: list[torch.Tensor] = []
        moved = sum(gradients.elements.moved_bytes(gradient_bytes) for gradients in batch)
        self._submit(Verb.NORM, batch, (), partial(self._launch_norms, sums), moved)
        return sums[0]

    def _launch_norms(self, sums: list[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """Work of the compute lane: put one tensor with all sums into `sums`."""
        segments: dict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
        for piece in pieces:
            for k, first, numel in piece.parameters():
                segments[piece.grad_dtype].append((piece.address(k, first), numel))
        kernels = self._device.kernels
        launched = [kernels.sum_squares_async(dtype, rows) for dtype, rows in segments.items()]
        sums.append(launched[0] if len(launched) == 1 else torch.cat(launched))

    def _prepare(self, batch: Sequence[LayerGradients]) -> _PendingUpdate:
        """Do the host's share of an update while the device is busy with backward.

        It takes the present hyper-parameters. The factor of the gradients is not known yet.
        """
        calls: dict[tuple[Format, torch.dtype], list[native.UpdateSegment]] = defaultdict(list)
        moved = 0
        for gradients in batch:
            state = gradients.state
            numbers = self._steps.next(state, gradients.positions, 1.0)
            steps = dict(zip(sorted(gradients.positions), numbers, strict=True))
            for piece in self._pieces(gradients, state.changed):
                calls[piece.format, piece.grad_dtype] += piece.segments(steps)
            moved += gradients.elements.moved_bytes(gradients.step_bytes)
        kernels = self._device.kernels
        launches = []
        for (range_format, gradient_dtype), segments in calls.items():
            launch = kernels.prepare_update(
                range_format.kernel,
                range_format.dtype,
                gradient_dtype,
                segments,
                lean=range_format.trained.is_lean,
            )
            launches.append(launch)
        return _PendingUpdate(batch=batch, launches=tuple(launches), nbytes=moved)

    @staticmethod
    def _update(prepared: _PendingUpdate, scale: float, _: Sequence[Piece]) -> None:
        """Work of the compute lane."""
        for launch in prepared.launches:
            launch(scale)
        # A graph that the user keeps may need the weights of before: autograd refuses it then.
        updated = [g.state.parameters[k] for g in prepared.batch for k in g.positions]
        torch.autograd.graph.increment_version(updated)

    def _submit(
        self,
        verb: Verb,
        batch: Sequence[LayerGradients],
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
            f"{verb.value} {first}{more}",
            lambda: work(pieces),
            reads=[gradients.record for gradients in batch],
            writes=records,
            nbytes=nbytes,
        )
        for seconds in self._device.compute.take_waits():
            self._metrics.waited(WaitCause.UPDATE, seconds)

    @staticmethod
    def _pieces(gradients: LayerGradients, changed: Sequence[str]) -> list[Piece]:
        present = gradients.state.in_memory(changed)
        return pieces_in_memory(gradients, (*present, *gradients.arrays))


def pending_on_gpu(state: LayerState) -> InBuffer | PerParameter:
    """Return the memory of the pending gradients of a layer that is updated on the GPU."""
    own_slot = state.on_gpu.own_gradient_slot
    if own_slot is not None:
        return InBuffer(own_slot.gradients, own_slot.record)
    return PerParameter(dict(state.gradients.per_parameter))


def _tensors(gradients: LayerGradients) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position, gradient in the shape of its parameter)."""
    state, source = gradients.state, gradients.source
    for k in sorted(gradients.positions):
        if isinstance(source, PerParameter):
            yield k, source.tensors[k]
        else:
            assert isinstance(source, InBuffer)
            yield (k, state.maps["weights"].parameter(source.memory, state.layout.slices[k]))
