"""Gradients on their way out: they gather in a slot for each layer, and are offloaded to the host.

1. Autograd has a gradient of a parameter. `arrived` copies it to the layer's slot.
2. The slot is complete. `_offload` queues the copy to the host. Gradients of a layer that is
   updated on the GPU stay there.
3. `OptimizerStep.take` gets them: they are pending, or added to sums.

Computes nothing but sums in the slot: of two gradients of one parameter, and of chunks in fp32.
Entered by the thread that runs autograd's hooks: the training thread, or autograd's own on a GPU.
Autograd may do so on several streams of the compute lane. Each waits for what used the slot before
it first writes, and an offload waits for all of them, recorded after the last arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import torch

from stronghold.device.base import Fence
from stronghold.errors import StateError
from stronghold.memory.buffers import Entry, GradientSlot
from stronghold.memory.gradient_slots import gradient_view, round_sums, sum_view
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window, slot_gradient_bytes
from stronghold.model.layout import ALIGN_NUMEL, ParameterSlice, Span
from stronghold.plan.homes import GPU
from stronghold.plan.schedule import Kind
from stronghold.runtime.compute_span import ComputeSpan
from stronghold.runtime.optimizer_step import OptimizerStep
from stronghold.runtime.parts import Parts
from stronghold.runtime.pieces import Flat, Gradients


class GradientOffload:
    """Gathers gradients, and offloads each layer that is complete. Where ranks need one order of
    layers, it is `expected`, the schedule's. `span` is the compute lane's."""

    def __init__(
        self,
        parts: Parts,
        window: Window,
        step: OptimizerStep,
        expected: Sequence[int],
        *,
        span: ComputeSpan,
    ) -> None:
        self._device, self._host, self._layers = parts.device, parts.host, parts.layers
        self._window, self._step, self._performed = window, step, parts.performed
        self._metrics, self._team = parts.metrics, parts.team
        self._order = parts.team.order(expected, window.num_gradient_slots)
        self._span = span
        self._last: GradientSlot | None = None  # the slot that got the last gradient
        self._came: list[int] = []  # layers, in the order of their offloads in this backward
        self.offloaded_bytes = 0

    def take_order(self) -> tuple[int, ...]:
        """The layers in the order of their offloads since this was asked last."""
        came, self._came = tuple(dict.fromkeys(self._came)), []
        return came

    def arrived(self, layer: int, position: int, gradient: torch.Tensor) -> None:
        """Copy a parameter's gradient to the layer's slot, and offload the slot when the layer is
        complete. After several forward calls more gradients may come, so the layer waits for the
        end of backward."""
        state, slot = self._layers[layer], self._add(layer, [(position, gradient)])
        is_complete = len(slot.arrived) == len(state.optimizer.trained)
        if is_complete and state.gradients.expected.is_last:
            self._offload_all(self._order.complete(layer))

    def chunk_arrived(
        self, layer: int, gradients: Sequence[tuple[int, torch.Tensor]], *, last: bool
    ) -> None:
        """Add a chunk's gradients, (position, gradient), to the fp32 sums of its call. Round these
        after the `last` chunk, and offload the slot when no further call's gradients will come."""
        state = self._layers[layer]
        if gradients:
            self._add(layer, gradients, chunk=True)
        state.gradients.expected.chunks -= 1
        if last and state.on_gpu.gradient_slot is not None:
            with self._device.joined():
                self._round(state, state.on_gpu.gradient_slot)
                if state.gradients.expected.is_last:
                    self._offload_all(self._order.complete(layer))

    def _add(
        self, layer: int, gradients: Sequence[tuple[int, torch.Tensor]], *, chunk: bool = False
    ) -> GradientSlot:
        slot = self._last
        if slot is None or slot.layer != layer:
            slot = self._last = self._layers[layer].on_gpu.gradient_slot or self._claim(layer)
        state = self._layers[layer]
        if not slot.summing:
            in_both = slot.arrived & state.gradients.pending
            if any(k in in_both for k, _ in gradients):
                # Each gradient is added to those before it, as autograd adds them: never two of
                # them beforehand.
                self._offload(layer)
                slot = self._last = self._claim(layer)
        self._enter(slot)
        for position, gradient in gradients:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            place, total = gradient_view(slot, state, position), slot.summing.get(position)
            if chunk and total is None:
                slot.summing[position] = sum_view(slot, state, position).copy_(gradient)
            elif chunk or position in slot.arrived or total is place:
                self._join(layer, slot)
                (total if chunk and total is not None else place).add_(gradient)
            else:
                place.copy_(gradient)
                slot.arrived.add(position)
        return slot

    def _round(self, state: LayerState, slot: GradientSlot) -> None:
        """No further chunk of a call will come."""
        if slot.summing:
            self._join(state.index, slot)
            round_sums(slot, state)

    def reached(self, layer: int) -> None:
        """Backward has come to the layer."""
        self._offload_all(self._order.reached(layer))

    def _claim(self, layer: int) -> GradientSlot:
        window, slot = self._window, None
        if not self._order.passed(layer):
            slot = window.free_gradient_slot(layer)
            if slot is None:
                # Every slot gathers for a layer whose other parameters may never get a gradient.
                self._offload_all(self._order.making_room(window.taking_turns()))
                slot = window.free_gradient_slot(layer)
        if self._order.passed(layer):
            slot = self._extra_slot(layer)
        if slot is None:
            raise StateError(f"layer {layer}: no gradient slot is free after an offload")
        window.claim_gradients(slot, layer)
        return slot

    def _extra_slot(self, layer: int) -> GradientSlot:
        """Memory of torch's, for gradients that come when the layer's slot has another layer."""
        nbytes = slot_gradient_bytes(self._layers[layer])
        device = self._device.torch_device
        gradients = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return GradientSlot(gradients, is_extra=True)

    def _enter(self, slot: GradientSlot) -> None:
        """The calling thread's stream is about to write to the slot."""
        stream = self._device.compute_stream()
        if stream not in slot.writers:
            for fence in slot.record.users:
                with self._span.waiting(fence):
                    self._metrics.waited("drain", self._device.compute_wait(fence))
            slot.writers.append(stream)

    def _produced(self, layer: int, slot: GradientSlot) -> list[Fence]:
        """The fences of what was written to the slot, on every stream."""
        name = f"gradients {layer}"
        found = [self._device.record_compute(name, stream) for stream in slot.writers]
        if found:  # else backward failed while it waited for the slot
            slot.record.write(found[-1])
        return found

    def _join(self, layer: int, slot: GradientSlot) -> None:
        """The calling thread's stream goes on after what every other one has written."""
        here = self._device.compute_stream()
        if slot.writers != [here]:
            for produced in self._produced(layer, slot):
                self._device.compute_wait(produced)
            slot.writers[:] = [here]  # and with it the others

    def flush(self) -> None:
        """Backward has ended: offload what is left."""
        self._offload_all(self._order.rest())
        while layers := self._order.further(self._window.gathering()):
            self._offload_all(layers)
        self._order.begin_again()
        self._last = None  # or it outlives a plan that is changed

    def _offload_all(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._offload(layer)

    def _offload(self, layer: int) -> None:
        """Hand the slot's gradients to the step: it has what will come, or is needed for others."""
        state = self._layers[layer]
        slot = state.on_gpu.gradient_slot
        if slot is None:  # another rank has gradients of the layer, and this one has none
            slot = self._window.free_gradient_slot(layer) or self._extra_slot(layer)
            self._window.claim_gradients(slot, layer)
        self._round(state, slot)
        absent = self._team.absent(state, slot)
        positions = absent.union(slot.arrived)
        # After several calls more gradients may come. Pending gradients are added to sums with all
        # others of the layer when backward has ended.
        more = state.gradients.expected.calls > 1 or bool(state.gradients.pending)
        array = self._step.array_for(more_may_come=more)
        self._performed.add(Kind.OFFLOAD, layer)
        self._came.append(layer)
        if state.home is GPU:
            self._keep(state, slot, positions, array)
            return
        entry = self._entry(state, positions, array)
        if absent:
            self._enter(slot)
        for position in absent:
            gradient_view(slot, state, position).zero_()
        self._copy(state, slot, positions, entry)
        source = Flat(entry.memory, entry.record)
        self._step.take([Gradients(state, positions, source)], array, is_complete=not more)

    def _entry(self, state: LayerState, positions: frozenset[int], array: str) -> Entry:
        """The host buffer for these gradients: the array in which they will be pending, if it is in
        memory and has none of them yet, else the next one of the ring."""
        is_staged = state.home_of("gradients").is_staged
        is_pending = array == "gradients"
        if is_pending and not is_staged and not positions & state.gradients.pending:
            return self._host.held_entry(state.index)
        return self._host.ring_entry()

    def _copy(
        self, state: LayerState, slot: GradientSlot, positions: frozenset[int], entry: Entry
    ) -> None:
        """Queue the copy of the slot's gradients to `entry`, and give the slot back."""
        device, memory, copies = self._device, slot.gradients, list(_copies(state, positions))
        nbytes = sum(target.stop - target.start for target, _ in copies)

        def copy() -> None:
            if slot.is_extra:
                device.keep_for_lane(memory)
            for target, source in copies:
                device.copy(entry.memory[target], memory[source])
            device.poison(memory)

        produced = self._produced(state.index, slot)
        self._team.reduce(state, slot, produced)
        device.drain.submit(
            f"drain {state.index}",
            copy,
            produced,
            reads=(slot.record,),
            writes=(entry.record,),
            nbytes=nbytes,
        )
        self._window.release_gradients(slot)
        self.offloaded_bytes += nbytes

    def _keep(
        self, state: LayerState, slot: GradientSlot, positions: frozenset[int], array: str
    ) -> None:
        """Gradients of a layer that is updated on the GPU do not cross the link. They stay in the
        layer's own slot while they are pending."""
        self._join(state.index, slot)
        self._step.take([Gradients(state, positions, Flat(slot.gradients, slot.record))], array)
        if array == "gradients" and slot is state.on_gpu.own_gradient_slot:
            self._window.hold_gradients(slot)
            return
        self._window.release_gradients(slot)
        self._device.poison(slot.gradients)


def _copies(state: LayerState, arrived: Iterable[int]) -> Iterator[tuple[slice, slice]]:
    """(bytes of the host's entry, bytes of the slot) of this rank's gradients of the parameters."""
    slices, shares = state.layout.slices, state.shares
    host, device = state.maps["gradients"], state.maps["weights"]
    for number, parts in groupby(map(slices.__getitem__, sorted(arrived)), attrgetter("range")):
        first, last = shares[number]  # trainable ranges are the layer's first
        for low, high in _runs(list(parts)):
            begin, end = max(low, first), min(high, last)
            if begin < end:
                yield host.bytes_of(begin, end), device.bytes_of(begin, end)


def _runs(slices: Sequence[ParameterSlice]) -> list[Span]:
    """Spans of elements that cover `slices` of one range, neighbours joined across their padding:
    one transfer for a range whose gradients all arrived."""
    runs: list[Span] = []
    for part in slices:
        begin, end = part.offset, part.offset + part.numel
        if runs and 0 <= begin - runs[-1][1] < ALIGN_NUMEL:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs
