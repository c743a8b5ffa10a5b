"""Gradients between their slot and the optimizer's step: pending, or summed over micro-batches.

`PendingGradients` decides in which array the gradients of a layer wait, and whether more of them
may come. `host_gradients` and `gpu_updates` move them, by the home of the layer. The training
thread enters, and autograd's thread in backward. The two never run at once.

[Note: where gradients wait] After its slot a gradient waits in one of four places
(`memory.layer.GradientRecord`). A model that is whole on the GPU has place 3 alone, and no slot.
1. pending, in the layer's array "gradients", in RAM or in a file;
2. pending, in the layer's own slot on the GPU, if the layer is updated there;
3. pending, in one tensor per parameter, if the whole model fits on the GPU (`per_parameter`);
4. summed over micro-batches, in the fp32 array "accumulated", in RAM, in a file or on the GPU.

[Note: a gradient that comes twice] All of this is allowed. `take` decides where a gradient goes,
`HostGradients.set_or_add` and `GpuUpdates.set_or_add` add it.
1. Twice in one backward (two forward calls on a GPU, reentrant checkpoints): added to the array
   "gradients", in the compute dtype, as autograd adds.
2. A second backward before the step, without accumulation: the same as 1. `micro_steps` does not
   move: `engine.step` counts, and a backward does not.
3. Accumulation: the gradients of one backward are pending until its end. Then they are added to the
   array "accumulated", in fp32.
4. A second backward of a layer cancels its early update: its gradients have changed.
5. A second backward of one graph (`retain_graph`) fetches weights again, and runs recomputed blocks
   once more (`activations.recompute`). Weights that were written since are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stronghold.memory.buffers import HostEntry
from stronghold.memory.layer import LayerState
from stronghold.memory.tiers import Mode
from stronghold.memory.window import Window
from stronghold.plan.homes import GPU
from stronghold.plan.plan import Plan
from stronghold.streaming.early_updates import EarlyUpdates
from stronghold.streaming.gpu_updates import GpuUpdates, pending_on_gpu
from stronghold.streaming.host_gradients import HostGradients
from stronghold.streaming.ledger import Ledger
from stronghold.streaming.parts import Parts
from stronghold.streaming.pieces import InArray, LayerGradients, PerParameter, gradients_in_array


class PendingGradients:
    """Takes gradients that have left their slots, and has them until the step uses them.

    `window` has the gradient slots on the GPU.
    """

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        plan: Plan,
        window: Window,
        on_gpu: GpuUpdates,
        early: EarlyUpdates,
    ) -> None:
        self._host, self._layers, self._window = parts.host, parts.layers, window
        self._team = parts.team
        self._ledger, self._plan, self._early = ledger, plan, early
        self._on_host, self._on_gpu = HostGradients(parts), on_gpu

    # -- gradients come ---------------------------------------------------------------------------
    def array_for(self, *, more_may_come: bool) -> str:
        """Return the array for gradients that have left their slot.

        It is "gradients" for pending ones, or "accumulated" for sums over micro-batches. If more
        gradients may come in this backward, they are pending until its end.
        """
        return "gradients" if more_may_come or not self._plan.accumulates else "accumulated"

    def entry_for(self, state: LayerState, positions: frozenset[int], array: str) -> HostEntry:
        """Return the host buffer for gradients of the parameters at `positions`, on their way to
        `array`.

        It is the layer's array "gradients", if they will be pending there, the array is in memory,
        and it has none of them yet. Otherwise it is the next entry of the staging ring.
        """
        is_staged = state.home_of("gradients").is_staged
        is_pending = array == "gradients"
        if is_pending and not is_staged and not positions & state.gradients.pending:
            return self._host.held_entry(state.index)
        return self._host.ring_entry()

    def take(
        self, batch: Sequence[LayerGradients], array: str, *, is_complete: bool = False
    ) -> None:
        """Queue the sum of these gradients and those in `array`.

        The layers of `batch` have one home; on the GPU one launch adds all of them. `is_complete`:
        no more gradients of these layers are expected in this backward.
        """
        if not batch:
            return
        self._early.cancel(gradients.state.index for gradients in batch)
        if batch[0].state.home is GPU:
            self._on_gpu.set_or_add(batch, array)
            return
        ends_step = self._ledger.boundary if array == "accumulated" else not self._plan.accumulates
        self._on_host.set_or_add(batch, array, norms=ends_step)
        if is_complete and self._ledger.boundary:
            for gradients in batch:
                self._early.complete(gradients.state)

    def end_backward(self) -> None:
        """Backward has ended: add pending gradients to the sums over micro-batches, if the plan has
        such sums. No more gradients will come."""
        for state in self._layers if self._plan.accumulates else ():
            if state.gradients.pending:
                gradients = self._in_array(state, "gradients")
                state.gradients.pending.clear()
                self.take([gradients], "accumulated")
                state.gradients.per_parameter.clear()
                self._window.drop_held_gradients(state.index)

    # -- gradients that wait ----------------------------------------------------------------------
    def of(self, state: LayerState) -> LayerGradients:
        """The layer's gradients that the gate will use: pending ones, or sums."""
        return self._in_array(state, state.gradients.array)

    def _in_array(self, state: LayerState, array: str) -> LayerGradients:
        """The layer's gradients in `array`."""
        if array == "gradients" and state.home is GPU:
            elements = state.updated_elements(frozenset(state.gradients.pending))
            return LayerGradients(state, elements, pending_on_gpu(state))
        return gradients_in_array(state, array)

    def sum_squares(self, state: LayerState) -> None:
        """Compute the sums of squares that a layer on the host lacks."""
        self._on_host.sum_squares(state)

    def pieces(
        self, state: LayerState, k: int, *, mode: Mode = "read"
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield this rank's pieces of the gradient of parameter `k` that the step will use.

        Each is (elements of the parameter, a flat tensor of them), as `ArrayAccess.pieces`. The
        caller queues no operation of the layer meanwhile.
        """
        gradients = self.of(state)
        state.records["norms"].writer.wait()
        gradients.record.wait()
        parameter, source = state.layout.slices[k], gradients.source
        begin, end = parameter.offset, parameter.offset + parameter.numel
        if isinstance(source, InArray):
            for elements, views in self._host.access.pieces(
                state.index, gradients.arrays, begin, end, mode=mode
            ):
                yield elements, views[source.array]
        elif isinstance(source, PerParameter):
            yield slice(0, parameter.numel), source.tensors[k].view(-1)
        else:
            ((_, first, last),) = state.elements((k,))
            flat = state.maps["gradients"].view(source.memory, first, last)
            yield slice(first - begin, last - begin), flat
