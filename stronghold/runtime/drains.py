"""Gradients on their way out: gathered layer by layer in slots, drained to the host.

Owns the issue of drains, on behalf of the executor; what `residents` updates on the device stays
there. Never computes with a gradient, except that two
parts of one are added in the slot. Entered by whoever runs autograd's hooks: the training thread,
or autograd's own on a GPU. Races and what prevents them:
  * a gradient slot is filled while it drains -> compute waits for the slot's drain: each of its
                                                 streams before it first writes
  * gradients drain before they exist         -> the drain waits for compute's fences, recorded on
                                                 each of these streams after the last arrival
  * a host entry is overwritten in use        -> the drain waits for the entry's last reader
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stronghold.device.base import Device, Fence
from stronghold.errors import StateError
from stronghold.memory.host import HostStore
from stronghold.memory.window import GradientSlot, Window
from stronghold.model.layout import ALIGN_NUMEL, ParameterSlice
from stronghold.runtime.adam import AdamSteps
from stronghold.runtime.residents import Residents
from stronghold.runtime.spans import ComputeSpan
from stronghold.runtime.updater import Updater
from stronghold.telemetry.metrics import Metrics


class GradientDrains:
    """Gathers, and drains or hands to `residents`. `last_fetch(layer)`: the fence of the layer's
    newest fetch; no update may overtake it. `span` is the compute lane's open one, if any.
    """

    def __init__(
        self,
        *,
        device: Device,
        host: HostStore,
        window: Window,
        updater: Updater,
        adam: AdamSteps,
        metrics: Metrics,
        last_fetch: Callable[[int], Fence],
        residents: Residents | None = None,
        span: ComputeSpan | None = None,
        aliased: Callable[[int], bool] = lambda layer: False,
    ) -> None:
        self._aliased = aliased
        self._device = device
        self._host = host
        self._window = window
        self._updater = updater
        self._adam = adam
        self._metrics = metrics
        self._last_fetch = last_fetch
        self._residents = residents
        self._span = span or ComputeSpan(device)
        self._last: GradientSlot | None = None  # into which the last gradient went
        self.drained_bytes = 0

    def arrived(
        self,
        layer: int,
        position: int,
        part: ParameterSlice,
        parameter: torch.Tensor,
        calls: Sequence[int],
    ) -> None:
        """Move `parameter.grad` to the layer's slot, and drain the slot when the layer is complete.

        `calls`: forward calls of each layer since the last backward; after several, more parts of a
        gradient may come, and the layer waits for the end of backward.
        """
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        slot = self._last
        if slot is None or slot.layer != layer:
            slot = self._last = self._slot_for(layer, calls)
        self._enter(slot)
        target = slot.view(part)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if position in slot.arrived:
            self._join(layer, slot)
            target.add_(gradient)
        else:
            target.copy_(gradient)
            slot.arrived.add(position)
        if len(slot.arrived) == self._adam.num_trained(layer) and calls[layer] <= 1:
            self._drain(layer, calls[layer])

    def prepare(self, calls: Sequence[int]) -> None:
        """Backward is about to begin. `calls`: forward calls of each layer since the last one."""

    def reached(self, layer: int) -> None:
        """Backward has come to the layer, or would have: this rank may not use it."""

    def _slot_for(self, layer: int, calls: Sequence[int]) -> GradientSlot:
        return self._window.gradient_slot_of(layer) or self._claim(layer, calls)

    def _claim(self, layer: int, calls: Sequence[int]) -> GradientSlot:
        slot = self._window.free_gradient_slot(layer)
        if slot is None:
            # Every slot gathers for a layer whose other parameters may never get a gradient.
            sharing = (g for g in self._window.gathering() if self._window.shares_gradient_slots(g))
            oldest = next(sharing)
            self._drain(oldest, calls[oldest])
            slot = self._window.free_gradient_slot(layer)
            if slot is None:
                raise StateError(f"layer {layer}: no gradient slot is free after a drain")
        self._window.claim_gradients(slot, layer)
        return slot

    def _enter(self, slot: GradientSlot) -> None:
        """The calling thread's stream is about to write to the slot."""
        stream = self._device.compute_stream()
        if stream not in slot.writers:
            with self._span.waiting(slot.free_after):
                self._metrics.waited("drain", self._device.compute_wait(slot.free_after))
            slot.writers.append(stream)

    def _produced(self, layer: int, slot: GradientSlot) -> list[Fence]:
        """The fences of what was written to the slot, on every stream."""
        name = f"gradients {layer}"
        return [self._device.record_compute(name, stream) for stream in slot.writers]

    def _join(self, layer: int, slot: GradientSlot) -> None:
        """The calling thread's stream goes on after what every other one has written."""
        here = self._device.compute_stream()
        if slot.writers != [here]:
            for produced in self._produced(layer, slot):
                self._device.compute_wait(produced)

    def flush(self, calls: Sequence[int]) -> None:
        """Backward has ended: drain what is left."""
        for layer in self._window.gathering():
            self._drain(layer, calls[layer])

    def abandon(self) -> None:
        """Backward has failed: give the slots back undrained."""
        for layer in self._window.gathering():
            slot = self._window.gradient_slot_of(layer)
            if slot is not None:
                self._join(layer, slot)
                after = self._device.record_compute(f"abandon gradients {layer}")
                self._window.release_gradients(slot, after)

    def _drain(self, layer: int, calls: int) -> None:
        slot = self._window.gradient_slot_of(layer)
        assert slot is not None
        if self._residents is not None and layer in self._residents:
            self._join(layer, slot)
            self._residents.gathered(layer, slot)
            return
        if self._aliased(layer):  # backward may need what the alias shows: no update before its end
            calls = max(calls, 2)
        arrived = frozenset(slot.arrived)
        entry = self._updater.entry_for(layer, arrived, calls)
        slices = self._host.layers[layer].layout.slices
        ranges = _runs([slices[position] for position in sorted(arrived)])
        device, gradients = self._device, slot.gradients

        def copy() -> None:
            for begin, end in ranges:
                device.copy(entry.gradients[begin:end], gradients[begin:end])
            device.poison(gradients)

        nbytes = sum(end - begin for begin, end in ranges) * gradients.element_size()
        after = (*self._produced(layer, slot), entry.free_after)
        drained = device.drain.submit(f"drain {layer}", copy, after=after, nbytes=nbytes)
        self._window.release_gradients(slot, drained)
        self.drained_bytes += nbytes
        self._updater.drained(layer, arrived, entry, drained, self._last_fetch(layer), calls)


def _runs(slices: Sequence[ParameterSlice]) -> list[tuple[int, int]]:
    """Element ranges that cover `slices`, neighbours joined across their padding: one transfer for
    a layer whose gradients all arrived.
    """
    runs: list[tuple[int, int]] = []
    for part in slices:
        begin, end = part.offset, part.offset + part.numel
        if runs and 0 <= begin - runs[-1][1] < ALIGN_NUMEL:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs
