"""Fetches (unshard, prefetch) and releases (reshard, evict) the weights of layers on the GPU.

No other file does. `executor` decides when a layer is fetched. The training thread enters, and on a
GPU autograd's thread in backward. The two never run at once.

[Note: a weight slot is reused] Gradient slots: `gradients`, [Note: several streams].
1. A fetch reads a layer's weights at home, and writes a slot.
2. Compute waits for the slot's writer. Then the layer is READY.
3. A release makes compute a reader of the slot. Nothing is copied back.
4. The next fetch into the slot waits for that reader. If the layer was released before it was
   READY, compute has not read the slot: the next fetch waits for the fetch before.
5. A resident layer keeps its slot. A fetch of its new weights makes compute a reader first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch

from stronghold.devices.base import timed
from stronghold.devices.lane_name import LaneName
from stronghold.errors import ConfigError
from stronghold.memory.buffers import Slot
from stronghold.memory.layer import LayerState, Residency
from stronghold.memory.window import Window
from stronghold.plan.plan import Plan
from stronghold.streaming.decoded_weights import DecodedWeights
from stronghold.streaming.parameter_views import Bindings, refuse_aliases
from stronghold.streaming.parts import Parts
from stronghold.telemetry.metrics import WaitCause


class LayerWeights:
    """Fetches layers to slots of `window` and releases them, and binds their parameters."""

    def __init__(self, parts: Parts, window: Window, plan: Plan, bindings: Bindings) -> None:
        self._device, self._layers = parts.device, parts.layers
        self._tiers, self._team, self._metrics = (parts.host.tiers, parts.team, parts.metrics)
        self._window, self._plan, self._bindings = window, plan, bindings
        # Resident layers that are updated on the host. Other residents are never outdated.
        self.refreshed = plan.resident - plan.updated_on_gpu
        # Addresses of weights that stay on the device: a saved tensor there needs no copy. Each
        # parameter has a storage of its own, which begins where the parameter begins.
        self.staying: set[int] = set()
        for layer in plan.updated_on_gpu:
            state = parts.layers[layer]
            self.staying.update(_addresses(state, state.weights))
        for layer in self.refreshed:
            slot = parts.layers[layer].on_gpu.slot
            assert slot is not None
            self.staying.update(_addresses(parts.layers[layer], slot.weights))
        # Storage of a slot -> the streamed layer that is in it, for saved tensors.
        self.layer_at: dict[int, int] = {}
        self.decoded = DecodedWeights(parts)
        self.num_fetches = 0
        self.fetched_bytes = 0

    # -- questions --------------------------------------------------------------------------------
    def needs_fetch(self, layer: int) -> bool:
        """True if no slot has, or will have, the layer's newest weights."""
        return layer not in self._plan.updated_on_gpu and not self._layers[layer].is_fetched

    def has_room(self, layer: int) -> bool:
        """True if the layer can be fetched without a release."""
        return layer in self._plan.resident or self._window.free_slot() is not None

    def outdated_residents(self) -> list[int]:
        """Resident layers whose newest weights compute has not waited for yet."""
        states = (self._layers[layer] for layer in self.refreshed)
        return [
            state.index
            for state in states
            if not state.is_fetched or state.on_gpu.residency is not Residency.READY
        ]

    def slot_of(self, layer: int) -> Slot:
        """The slot that the layer lies in."""
        slot = self._layers[layer].on_gpu.slot
        assert slot is not None
        return slot

    # -- actions ----------------------------------------------------------------------------------
    def make_ready(self, layer: int) -> None:
        """Make compute wait for the layer's queued fetch, and bind its parameters to the slot."""
        state, slot = self._layers[layer], self.slot_of(layer)
        if state.on_gpu.residency is Residency.FETCHING:
            updated = state.records["weights"].writer
            if not updated.done:
                self._metrics.waited(WaitCause.UPDATE, timed(updated.wait))
            fetched = self._device.compute.wait_everywhere(slot.record.writer)
            self._metrics.waited(WaitCause.FETCH, fetched)
            self._window.make_ready(layer)
        self._bindings.bind(layer, slot.weights)
        self._bindings.show(layer)

    def fetch(self, layer: int, *, keep: Collection[int], together: bool) -> None:
        """Queue a fetch of the layer.

        If no slot is free, the layer whose slot was taken first is released. Layers in `keep` are
        never released. `together`: all ranks fetch the layer now. Raises ConfigError if every slot
        is kept.
        """
        window = self._window
        state, resident = self._layers[layer], layer in self._plan.resident
        slot = state.on_gpu.slot if resident else window.free_slot()
        if slot is None:
            busy = {layer, *keep}
            victim = next((held for held in window.held_layers() if held not in busy), None)
            if victim is None:
                raise ConfigError(
                    f"layer {state.name} is called inside another layer, and the window of "
                    f"{self._plan.window} slots is full; raise stronghold.window"
                )
            self.release(victim)
            slot = window.free_slot()
            assert slot is not None
        if resident:
            slot.record.read(self._device.compute.record(f"before fetch {layer}"))
        window.claim(slot, layer)
        nbytes = self._fill(slot, layer, together=together)
        if not resident:
            self.layer_at[slot.weights.untyped_storage().data_ptr()] = layer
        self.num_fetches += 1
        self.fetched_bytes += nbytes

    def _fill(self, slot: Slot, layer: int, *, together: bool) -> int:
        """Queue the copy of the layer's newest weights to its slot. Weights in a file are copied
        piece by piece. Returns the bytes."""
        device, tiers, state = self._device, self._tiers, self._layers[layer]
        source, copy, bytes_of = (state.weights, device.copy, state.maps["weights"].bytes_of)
        target, weights = slot.weights, state.records["weights"]
        if not state.home_of("weights").is_staged:
            parts = self._team.fetched(state, together=together)
            nbytes: int = sum(part.stop - part.start for part in parts)

            def fetch() -> None:
                for part in parts:
                    copy(target[part], source[part])

            device.fetch.submit(
                f"fetch {layer}", fetch, reads=(weights,), writes=(slot.record,), nbytes=nbytes
            )
            self._team.gather(state, slot, together=together)
            return nbytes
        for begin, end in tiers.piece_spans(layer, ("weights",)):
            entry = tiers.fetches.next()
            views = tiers.queue_load(
                device, state, begin, end, ("weights",), entry, lane=LaneName.STAGE
            )
            loaded: torch.Tensor = views["weights"].view(torch.uint8)
            device.fetch.submit(
                f"fetch {layer}",
                partial(copy, target[bytes_of(begin, end)], loaded),
                reads=(entry.record,),
                writes=(slot.record,),
                nbytes=loaded.nbytes,
            )
        return state.maps["weights"].nbytes

    def release(self, layer: int) -> None:
        """Release the slot of a streamed layer. Nothing is copied. Raises ConfigError if code
        outside the engine keeps a view of the slot."""
        state, slot = self._layers[layer], self.slot_of(layer)
        self.layer_at.pop(slot.weights.untyped_storage().data_ptr(), None)
        self._bindings.rest(layer)
        self.decoded.rest(layer)
        used = state.on_gpu.residency is Residency.READY
        self._window.release(layer, self._device.compute.record(f"release {layer}"))
        if used:
            views = self._bindings.views_at(slot.weights.data_ptr())
            refuse_aliases(state, slot.weights, views)

    def start_again(self) -> None:
        """Empty every slot and put every parameter at rest, after an exception at any place."""
        self.layer_at.clear()
        self._window.start_again()
        self.decoded.start_again()
        for state in self._layers:
            # writers wait until it has been fetched again
            if state.index in self.refreshed:
                self._bindings.hide(state.index)
            # A resident layer's never change device: autograd keeps one leaf for its calls.
            slot = state.on_gpu.slot
            self._bindings.point(state.index, state.weights if slot is None else slot.weights)


def _addresses(state: LayerState, weights: torch.Tensor) -> Iterator[int]:
    """Yield the address of each of the layer's parameters in `weights`."""
    for part in state.layout.slices:
        yield state.maps["weights"].parameter(weights, part).data_ptr()
