"""Gradients on their way out: gathered layer by layer in slots, drained to the host.

Owns the issue of drains. Of a layer whose state is on the device they stay there. Never computes
with a gradient, except that two parts of one are added in the slot. Entered by whoever runs
autograd's hooks: the training thread, or autograd's own on a GPU. Autograd may do so on several
streams of the compute lane: each waits for what used the slot before it first writes, and a drain
waits for all of them, recorded after the last arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter

import torch

from stronghold.device.base import Device, Fence
from stronghold.errors import StateError
from stronghold.memory.layer import Entry, GradientSlot, LayerState
from stronghold.memory.window import Window, slot_gradient_bytes
from stronghold.model.layout import ALIGN_NUMEL, ParameterSlice, Span
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Position
from stronghold.runtime.binding import Bindings
from stronghold.runtime.parts import Parts
from stronghold.runtime.update import Gathered, Updates


class ComputeSpan:
    """The compute lane's row of the trace: one span for each use of a layer, at most one open.

    A wait inside of it ends it, and what follows is a further span of the same name: the row shows
    compute alone. Entered by whoever calls hooks.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: tuple[str, object] | None = None

    def begin(self, name: object) -> None:
        if self._device.trace.recording:
            self._open = (str(name), self._device.begin_compute_span())

    def end(self) -> None:
        """Close the open span, if there is one."""
        if self._open is not None:
            name, begun = self._open
            self._device.end_compute_span(name, begun)
            self._open = None

    def drop(self) -> None:
        """The pass failed: what is open is not recorded."""
        self._open = None

    @contextmanager
    def waiting(self, fence: Fence) -> Iterator[None]:
        """Around the compute lane's wait for `fence`."""
        name = self._open[0] if self._open is not None and not fence.done else None
        if name is not None:
            self.end()
        yield
        if name is not None:
            self.begin(name)


class GradientDrains:
    """Gathers, and hands over what is complete: by `plan`, and of the layers in the order
    `expected` by the schedule, where ranks need one. `span` is the compute lane's."""

    def __init__(
        self,
        parts: Parts,
        window: Window,
        updates: Updates,
        plan: Plan,
        expected: Sequence[int],
        *,
        span: ComputeSpan,
        bindings: Bindings,
    ) -> None:
        self._device, self._host, self._layers = parts.device, parts.host, parts.layers
        self._window, self._updates, self._bindings = window, updates, bindings
        self._plan = plan
        self._metrics, self._team = parts.metrics, parts.team
        self._order = parts.team.order(expected, window.num_gradient_slots)
        self._span = span
        self._last: GradientSlot | None = None  # into which the last gradient went
        self.drained_bytes = 0

    def arrived(self, layer: int, position: int, gradient: torch.Tensor) -> None:
        """Copy a parameter's gradient to the layer's slot, and drain the slot when the layer is
        complete: after several forward calls more parts of a gradient may come, and the layer waits
        for the end of backward."""
        state, slot = self._layers[layer], self._add(layer, [(position, gradient)])
        complete = len(slot.arrived) == len(state.trained)
        if complete and state.calls <= 1 and not state.chunks:
            self._drain_all(self._order.complete(layer))

    def chunk_arrived(
        self, layer: int, gradients: Sequence[tuple[int, torch.Tensor]], *, last: bool
    ) -> None:
        """Add a chunk's gradients, (position, gradient), to the fp32 sums of its call, round these
        after the `last` one, and drain the slot when no further call's will come."""
        state = self._layers[layer]
        if gradients:
            self._add(layer, gradients, chunk=True)
        state.chunks -= 1
        if last and state.gathering is not None:
            with self._device.joined():
                self._round(state, state.gathering)
                if state.chunks == 0 and state.calls <= 1:
                    self._drain_all(self._order.complete(layer))

    def _add(
        self, layer: int, gradients: Sequence[tuple[int, torch.Tensor]], *, chunk: bool = False
    ) -> GradientSlot:
        slot = self._last
        if slot is None or slot.layer != layer:
            slot = self._last = self._layers[layer].gathering or self._claim(layer)
        state = self._layers[layer]
        here = slot.arrived
        gone = state.parts if self._updates.parts_wait(state) else state.arrived
        if gone and not slot.summing and any(k in here and k in gone for k, _ in gradients):
            # Each part is added to those before it, as autograd adds them: never two beforehand.
            self._drain(layer)
            slot = self._last = self._claim(layer)
        self._enter(slot)
        for position, gradient in gradients:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            place, total = slot.view(state, position), slot.summing.get(position)
            if chunk and total is None:
                slot.summing[position] = slot.sum_of(state, position).copy_(gradient)
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
            slot.round_sums(state)

    def reached(self, layer: int) -> None:
        """Backward has come to the layer, or would have: this rank may not use it."""
        self._drain_all(self._order.reached(layer))

    def _claim(self, layer: int) -> GradientSlot:
        window, slot = self._window, None
        if not self._order.passed(layer):
            slot = window.free_gradient_slot(layer)
            if slot is None:
                # Every slot gathers for a layer whose other parameters may never get a gradient.
                self._drain_all(self._order.making_room(window.taking_turns()))
                slot = window.free_gradient_slot(layer)
        if self._order.passed(layer):
            slot = self._spare(layer)
        if slot is None:
            raise StateError(f"layer {layer}: no gradient slot is free after a drain")
        window.claim_gradients(slot, layer)
        return slot

    def _spare(self, layer: int) -> GradientSlot:
        """Memory of torch's, for what comes when the layer's slot is not its own any more."""
        nbytes = slot_gradient_bytes(self._layers[layer])
        device = self._device.torch_device
        gradients = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return GradientSlot(gradients, is_spare=True)

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
        """Backward has ended: drain what is left."""
        self._drain_all(self._order.rest())
        while layers := self._order.further(self._window.gathering()):
            self._drain_all(layers)
        self._order.begin_again()
        self._last = None  # or it outlives a plan that is changed

    def abandon(self) -> None:
        """Backward has failed: give the slots back undrained."""
        for layer in self._window.gathering():
            slot = self._layers[layer].gathering
            if slot is not None:
                self._join(layer, slot)
                slot.record.write(self._device.record_compute(f"abandon gradients {layer}"))
                self._window.release_gradients(slot)
        self._order.begin_again()

    def _drain_all(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._drain(layer)

    def _drain(self, layer: int) -> None:
        state = self._layers[layer]
        slot = state.gathering
        if slot is None:  # of several ranks another has gradients of the layer
            slot = self._window.free_gradient_slot(layer) or self._spare(layer)
            self._window.claim_gradients(slot, layer)
        self._round(state, slot)
        absent = self._team.absent(state, slot)
        arrived = absent.union(slot.arrived)
        # More may come after several calls, and backward may need what an alias shows.
        late = state.calls > 1 or self._bindings.aliased_at_rest(layer)
        at_once = self._plan.updates[layer] is Position.DRAIN
        found = Gathered(state, arrived, at_once=at_once and not late)
        found.part = late and self._updates.parts_wait(state)
        found.repeated = arrived & state.parts
        if late:
            state.parts |= arrived
        if state.on_device:
            self._keep(slot, found)
            return
        entry = self._entry(found)
        copies = list(_copies(state, arrived))
        device, gradients = self._device, slot.gradients
        if absent:
            self._enter(slot)
        for position in absent:
            slot.view(state, position).zero_()

        def copy() -> None:
            if slot.is_spare:
                device.keep_for_lane(gradients)
            for target, source in copies:
                device.copy(entry.memory[target], gradients[source])
            device.poison(gradients)

        nbytes = sum(target.stop - target.start for target, _ in copies)
        produced = self._produced(layer, slot)
        self._team.reduce(state, slot, produced)
        device.drain.submit(
            f"drain {layer}",
            copy,
            produced,
            reads=(slot.record,),
            writes=(entry.record,),
            nbytes=nbytes,
        )
        self._window.release_gradients(slot)
        self.drained_bytes += nbytes
        found.memory, found.record = entry.memory, entry.record
        self._updates.gathered([found])

    def _entry(self, found: Gathered) -> Entry:
        """Where these gradients go: an entry of the layer's own when they wait there and none of
        them is there yet, else one of the ring."""
        state = found.state
        in_memory = not self._host.tiers.holds(state.index, "gradients")
        waits = (found.part or not (self._plan.accumulates or found.at_once)) and in_memory
        if waits and not (found.repeated if found.part else found.arrived & state.arrived):
            return self._host.held_entry(state.index)
        return self._host.ring_entry()

    def _keep(self, slot: GradientSlot, found: Gathered) -> None:
        """Nothing of a layer that is updated on the device crosses the link."""
        self._join(found.state.index, slot)
        found.memory, found.record = slot.gradients, slot.record
        if self._updates.gathered([found]):
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
