"""Gathers each layer's gradients in a slot on the GPU, and offloads them to the host (reduce, D2H).

1. Autograd has a gradient of a parameter. `arrived` copies it to the layer's slot.
2. The slot is complete. `_offload` queues the copy to the host. Gradients of a layer that is
   updated on the GPU stay there.
3. `PendingGradients.take` gets them: they are pending, or added to sums.

This file computes sums in the slot alone: of two gradients of one parameter, and of chunks in fp32.
The thread that runs autograd's hooks enters: the training thread, or autograd's own on a GPU.

[Note: several streams] Autograd may write a slot on several streams of the compute lane.
1. A stream waits for the slot's earlier users before it first writes (`_enter`).
2. A stream that adds to another stream's gradient waits for that stream (`_join`).
3. An offload waits for an event on each stream, recorded after the last arrival (`_produced`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import torch

from stronghold.devices.base import Fence
from stronghold.devices.compute_span import ComputeSpan
from stronghold.errors import StateError
from stronghold.memory.buffers import GradientSlot, HostEntry
from stronghold.memory.gradient_slots import gradient_view, round_sums, sum_view
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window, slot_gradient_bytes
from stronghold.model.layout import ALIGN_NUMEL, ParameterSlice, Span
from stronghold.plan.homes import GPU
from stronghold.plan.schedule import Kind
from stronghold.streaming.parts import Parts
from stronghold.streaming.pending_gradients import PendingGradients
from stronghold.streaming.pieces import InBuffer, LayerGradients
from stronghold.telemetry.metrics import WaitCause


class GradientOffload:
    """Gathers gradients, and offloads each layer that is complete.

    `expected`: the schedule's order of layers. Several ranks offload in this order. `span`: the
    span of the compute lane, for traces.
    """

    def __init__(
        self,
        parts: Parts,
        window: Window,
        pending: PendingGradients,
        expected: Sequence[int],
        *,
        span: ComputeSpan,
    ) -> None:
        self._device, self._host, self._layers = parts.device, parts.host, parts.layers
        self._window, self._pending, self._performed = window, pending, parts.performed
        self._metrics, self._team = parts.metrics, parts.team
        self._order = parts.team.order(expected, window.num_gradient_slots)
        self._span = span
        self._last: GradientSlot | None = None  # the slot that got the last gradient
        # layers, in the order of their offloads in this backward
        self._offloaded: list[int] = []
        self.offloaded_bytes = 0

    def take_order(self) -> tuple[int, ...]:
        """Return the layers in the order of their offloads since the last call."""
        order = tuple(dict.fromkeys(self._offloaded))
        self._offloaded = []
        return order

    def arrived(self, layer: int, position: int, gradient: torch.Tensor) -> None:
        """Copy a parameter's gradient to the layer's slot. Offload the slot if it is complete.

        After several forward calls more gradients may come. Such a layer waits for the end of
        backward.
        """
        state, slot = self._layers[layer], self._add(layer, [(position, gradient)])
        is_complete = len(slot.arrived) == len(state.optimizer.trained)
        if is_complete and state.gradients.expected.is_last:
            self._offload_all(self._order.complete(layer))

    def chunk_arrived(
        self, layer: int, gradients: Sequence[tuple[int, torch.Tensor]], *, last: bool
    ) -> None:
        """Add a chunk's gradients, (position, gradient), to the fp32 sums of its call.

        After the `last` chunk, round the sums. Offload the slot if no further call's gradients will
        come.
        """
        state = self._layers[layer]
        if gradients:
            self._add(layer, gradients, chunk=True)
        state.gradients.expected.chunks -= 1
        if last and state.on_gpu.gradient_slot is not None:
            with self._device.side_streams.joined():
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
            if in_both and any(k in in_both for k, _ in gradients):
                # Each gradient is added to those before it, as autograd adds them: never two of
                # them beforehand.
                self._offload(layer)
                slot = self._last = self._claim(layer)
        self._enter(slot)
        for position, gradient in gradients:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            target = gradient_view(slot, state, position)
            total = slot.summing.get(position)
            if chunk and total is None:
                slot.summing[position] = sum_view(slot, state, position).copy_(gradient)
            elif chunk and total is not None:
                self._join(layer, slot)
                total.add_(gradient)
            elif position in slot.arrived or total is target:
                self._join(layer, slot)
                target.add_(gradient)
            else:
                target.copy_(gradient)
                slot.arrived.add(position)
        return slot

    def _round(self, state: LayerState, slot: GradientSlot) -> None:
        """Round the fp32 sums of a call to the slot's dtype. All of its chunks have come."""
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
                self._offload_all(self._order.making_room(window.layers_in_shared_slots()))
                slot = window.free_gradient_slot(layer)
        if self._order.passed(layer):
            slot = self._extra_slot(layer)
        if slot is None:
            raise StateError(f"layer {layer}: no gradient slot is free after an offload")
        window.claim_gradients(slot, layer)
        return slot

    def _extra_slot(self, layer: int) -> GradientSlot:
        """Allocate a slot from torch, for gradients that come after another layer took the slot."""
        nbytes = slot_gradient_bytes(self._layers[layer])
        device = self._device.torch_device
        gradients = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return GradientSlot(gradients, is_extra=True)

    def _enter(self, slot: GradientSlot) -> None:
        """Make the calling thread's stream wait for the slot's users, before its first write."""
        stream = self._device.compute.stream()
        if stream not in slot.writers:
            for fence in slot.record.users:
                with self._span.waiting(fence):
                    self._metrics.waited(WaitCause.OFFLOAD, self._device.compute.wait(fence))
            slot.writers.append(stream)

    def _produced(self, layer: int, slot: GradientSlot) -> list[Fence]:
        """Record a fence on each stream that has written to the slot."""
        name = f"gradients {layer}"
        fences = [self._device.compute.record(name, stream) for stream in slot.writers]
        if fences:  # else backward failed while it waited for the slot
            slot.record.write(fences[-1])
        return fences

    def _join(self, layer: int, slot: GradientSlot) -> None:
        """Make the calling thread's stream wait for every other stream's writes to the slot."""
        stream = self._device.compute.stream()
        if slot.writers != [stream]:
            for produced in self._produced(layer, slot):
                self._device.compute.wait(produced)
            slot.writers[:] = [stream]  # it has waited for the others

    def flush(self) -> None:
        """Backward has ended: offload every slot that still gathers."""
        self._offload_all(self._order.rest())
        while layers := self._order.further(self._window.gathering_layers()):
            self._offload_all(layers)
        self._order.begin_again()
        self._last = None  # else the slot would outlive a change of plan

    def _offload_all(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._offload(layer)

    def _offload(self, layer: int) -> None:
        """Hand the slot's gradients to the step: it is complete, or another layer needs it."""
        state = self._layers[layer]
        slot = state.on_gpu.gradient_slot
        # another rank has gradients of the layer, and this one has none
        if slot is None:
            slot = self._window.free_gradient_slot(layer) or self._extra_slot(layer)
            self._window.claim_gradients(slot, layer)
        self._round(state, slot)
        absent = self._team.absent(state, slot)
        positions = absent.union(slot.arrived)
        # After several calls more gradients may come. Pending gradients are added to sums with all
        # others of the layer when backward has ended.
        more = state.gradients.expected.num_pending_backwards > 1 or bool(state.gradients.pending)
        self._performed.add(Kind.OFFLOAD, layer)
        self._offloaded.append(layer)
        array = self._pending.array_for(more_may_come=more)
        if state.home is GPU:
            self._keep(state, slot, positions, array)
            return
        entry = self._pending.entry_for(state, positions, array)
        if absent:
            self._enter(slot)
        for position in absent:
            gradient_view(slot, state, position).zero_()
        self._copy(state, slot, positions, entry)
        source = InBuffer(entry.memory, entry.record)
        gradients = LayerGradients(state, state.updated_elements(positions), source)
        self._pending.take([gradients], array, is_complete=not more)

    def _copy(
        self, state: LayerState, slot: GradientSlot, positions: frozenset[int], entry: HostEntry
    ) -> None:
        """Queue the copy of the slot's gradients to `entry`, and release the slot."""
        device, memory, copies = (self._device, slot.gradients, list(_copies(state, positions)))
        nbytes = sum(target.stop - target.start for target, _ in copies)

        def copy() -> None:
            if slot.is_extra:
                device.memory.keep_for_lane(memory)
            for target, source in copies:
                device.copy(entry.memory[target], memory[source])
            device.memory.poison(memory)

        produced = self._produced(state.index, slot)
        self._team.reduce(state, slot, produced)
        device.offload.submit(
            f"offload {state.index}",
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
        """Keep the gradients of a layer that is updated on the GPU: they do not cross the link.
        Pending gradients stay in the layer's own slot."""
        self._join(state.index, slot)
        source = InBuffer(slot.gradients, slot.record)
        gradients = LayerGradients(state, state.updated_elements(positions), source)
        self._pending.take([gradients], array)
        if array == "gradients" and slot is state.on_gpu.own_gradient_slot:
            self._window.hold_gradients(slot)
            return
        self._window.release_gradients(slot)
        self._device.memory.poison(slot.gradients)


def _copies(state: LayerState, arrived: Iterable[int]) -> Iterator[tuple[slice, slice]]:
    """Yield (bytes of the host's entry, bytes of the slot) of this rank's gradients of the
    parameters at the positions `arrived`."""
    slices, shares = state.layout.slices, state.shares
    host, device = state.maps["gradients"], state.maps["weights"]
    for number, parts in groupby(map(slices.__getitem__, sorted(arrived)), attrgetter("range")):
        first, last = shares[number]  # trainable ranges are the layer's first
        for low, high in _runs(list(parts)):
            begin, end = max(low, first), min(high, last)
            if begin < end:
                yield host.bytes_of(begin, end), device.bytes_of(begin, end)


def _runs(slices: Sequence[ParameterSlice]) -> list[Span]:
    """Spans of elements that cover `slices` of one range.

    Neighbours are joined across their padding. A range whose gradients all arrived takes one
    transfer.
    """
    runs: list[Span] = []
    for part in slices:
        begin, end = part.offset, part.offset + part.numel
        if runs and 0 <= begin - runs[-1][1] < ALIGN_NUMEL:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs
