"""The window: device buffers (slots) for the weights and gradients of layers.

Owns the slots, and decides which layer may take which slot. It issues no copy: `streaming.weights`
fetches (prefetch, unshard), `streaming.gradients` offloads, and both report to the window. Release
(evict, reshard) copies nothing. The training thread enters, and autograd's thread during a backward
on a GPU. The two never run at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from stronghold.devices.base import Device, Fence, Record
from stronghold.errors import StateError
from stronghold.memory.buffers import GradientSlot, Slot, SlotContents
from stronghold.memory.layer import LayerState, Residency
from stronghold.model.arrays import Section
from stronghold.plan.homes import GPU

NEVER_FETCHED = -1  # the version in a slot that was never filled: no layer has it


class Window:
    """Weight slots and gradient slots of one engine.

    Weights: the layers outside of `resident` (streamed layers) take turns in `num_slots` slots. A
    resident layer keeps a slot of its size. A layer that is updated on the GPU needs none: its
    weights never leave.

    Gradients: blocks take turns in `num_gradient_slots` shared slots. A layer in `own_gradients`
    keeps a gradient slot of its size. These are the layers that are no block (embedding, head),
    whose gradients come early and late in backward, and all layers that hold gradients on the GPU
    until the gate. `sums`: blocks add several gradients in fp32.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[LayerState],
        *,
        resident: frozenset[int],
        num_slots: int,
        num_gradient_slots: int,
        own_gradients: frozenset[int],
        sums: bool = False,
    ) -> None:
        self._device = device
        self._layers = layers
        self._has_sums = sums
        self.num_gradient_slots = num_gradient_slots
        self._own_gradients = own_gradients
        sharing = [state for state in layers if state.index not in own_gradients]
        self._gradient_bytes = max(map(slot_gradient_bytes, sharing), default=0)
        self._sum_numel = max(map(slot_sum_numel, sharing), default=0)
        self._gradient_slots: list[GradientSlot] = []
        self._is_prepared = False
        streamed = [state for state in layers if state.index not in resident]
        nbytes = max((state.maps["weights"].nbytes for state in streamed), default=0)
        self._slots = [
            self._allocate_slot(nbytes, f"weight slot {number}")
            for number in range(num_slots if streamed else 0)
        ]
        self._residents = [
            state for state in layers if state.index in resident and state.home is not GPU
        ]
        for state in layers:
            state.on_gpu.slot = None
            state.on_gpu.gradient_slot = None
            state.on_gpu.own_gradient_slot = None
            state.on_gpu.residency = Residency.AWAY
        for state in self._residents:
            nbytes = state.maps["weights"].nbytes
            slot = self._allocate_slot(nbytes, f"weights of {state.layout.name}")
            slot.contents = SlotContents(state.index, NEVER_FETCHED)
            state.on_gpu.slot = slot

    def _allocate_slot(self, nbytes: int, purpose: str) -> Slot:
        return Slot(self._device.memory.allocate(nbytes, torch.uint8, purpose))

    def _allocate_gradient_slot(self, nbytes: int, sum_numel: int, purpose: str) -> GradientSlot:
        gradients = self._device.memory.allocate(nbytes, torch.uint8, purpose)
        if not sum_numel:
            return GradientSlot(gradients)
        sums = self._device.memory.allocate(sum_numel, torch.float32, f"sums, {purpose}")
        return GradientSlot(gradients, sums)

    def prepare_training(self) -> None:
        """Allocate the gradient slots at the first backward.

        A call that an interrupt ended is continued by the next one.
        """
        if self._is_prepared:
            return
        sum_numel = self._sum_numel if self._has_sums else 0
        while self._gradient_bytes and len(self._gradient_slots) < self.num_gradient_slots:
            purpose = f"gradient slot {len(self._gradient_slots)}"
            slot = self._allocate_gradient_slot(self._gradient_bytes, sum_numel, purpose)
            self._gradient_slots.append(slot)
        for state in self._layers:
            if state.index in self._own_gradients and state.on_gpu.own_gradient_slot is None:
                self._allocate_own_gradient_slot(state)
        self._is_prepared = True

    def _allocate_own_gradient_slot(self, state: LayerState) -> None:
        nbytes = slot_gradient_bytes(state)
        if not nbytes:
            return
        has_sums = self._has_sums and state.layout.streamed
        sum_numel = slot_sum_numel(state) if has_sums else 0
        purpose = f"gradients of resident layer {state.index}"
        state.on_gpu.own_gradient_slot = self._allocate_gradient_slot(nbytes, sum_numel, purpose)

    def start_again(self) -> None:
        """Empty every slot, whatever was under way.

        The caller has waited for all lanes and for compute.
        """
        for slot in self._slots:
            slot.contents = None
            slot.record = Record()
            self._device.memory.poison(slot.weights)
        for state in self._layers:
            self._reset_layer(state)
        for gathering in (*self._gradient_slots, *self._all_own_gradient_slots()):
            gathering.layer = None
            gathering.is_pending = False
            gathering.record = Record()
            gathering.summing.clear()
            gathering.arrived.clear()
            gathering.writers.clear()
            self._device.memory.poison(gathering.gradients)

    def _reset_layer(self, state: LayerState) -> None:
        if state not in self._residents:
            state.on_gpu.slot = None
        else:
            slot = state.on_gpu.slot
            assert slot is not None
            slot.contents = SlotContents(state.index, NEVER_FETCHED)
            slot.record = Record()
        state.on_gpu.residency = Residency.AWAY
        state.on_gpu.gradient_slot = None

    def _all_own_gradient_slots(self) -> list[GradientSlot]:
        slots = [state.on_gpu.own_gradient_slot for state in self._layers]
        return [slot for slot in slots if slot is not None]

    # -- weights --------------------------------------------------------------------------------
    def held_layers(self) -> list[int]:
        """Streamed layers that are in a slot, or on their way to one."""
        return [slot.layer for slot in self._slots if slot.layer is not None]

    def places(self) -> list[int | None]:
        """The layer in each slot, in the order in which slots are taken and given up."""
        return [slot.layer for slot in self._slots]

    def arrange(self, places: Sequence[int | None]) -> None:
        """Reorder the slots: `places` names the layer of each slot, and None for a free one.

        Every layer keeps its slot.
        """
        slot_of_layer = {slot.layer: slot for slot in self._slots if slot.layer is not None}
        free = iter([slot for slot in self._slots if slot.layer is None])
        self._slots = [next(free) if layer is None else slot_of_layer[layer] for layer in places]

    def free_slot(self) -> Slot | None:
        """A slot that no layer claims, or None. Its last operations may be under way."""
        return next((slot for slot in self._slots if slot.contents is None), None)

    def claim(self, slot: Slot, layer: int) -> None:
        """Give `slot` to the layer, whose fetch (unshard) will fill it.

        Raises StateError if another layer has the slot, or the layer is resident elsewhere.
        """
        state = self._layers[layer]
        if slot.layer not in (None, layer):
            raise StateError(f"layer {layer} cannot take the slot of layer {slot.layer}")
        if state in self._residents and slot is not state.on_gpu.slot:
            raise StateError(f"layer {layer} is resident and has a slot of its own")
        state.move(Residency.FETCHING)
        slot.contents = SlotContents(layer, state.on_gpu.version)
        state.on_gpu.slot = slot

    def make_ready(self, layer: int) -> None:
        """Record that compute waits for the layer's fetch."""
        self._layers[layer].move(Residency.READY)

    def outdate(self, layer: int) -> None:
        """Record that the weights at the layer's home change: its slot has old ones from now on."""
        self._layers[layer].on_gpu.version += 1

    def release(self, layer: int, after: Fence) -> None:
        """Give a streamed layer's slot back (evict, reshard). Nothing is copied.

        `after`: fence of the last compute that reads the slot. Raises StateError if the layer is
        resident or has no slot.
        """
        state = self._layers[layer]
        slot = state.on_gpu.slot
        if state in self._residents:
            raise StateError(f"layer {layer} is resident and keeps its slot")
        if slot is None:
            raise StateError(f"layer {layer} has no slot to give back")
        if state.on_gpu.residency is Residency.READY:
            slot.record.read(after)
            self._device.memory.poison(slot.weights)
        state.move(Residency.AWAY)
        state.on_gpu.slot = None
        slot.contents = None
        # The slot freed last is taken last. A new list: an interrupt must not lose the slot.
        others = [other for other in self._slots if other is not slot]
        self._slots = [*others, slot]

    # -- gradients ------------------------------------------------------------------------------
    def free_gradient_slot(self, layer: int) -> GradientSlot | None:
        """A gradient slot for the layer in which no layer gathers, or None.

        The slot's last operations may be under way. If the layer keeps a gradient slot, and that
        holds pending gradients, the result is extra memory of torch's. It lives while the layer
        gathers: gradients that come twice in a step are rare, and not planned.
        """
        kept_slot = self._layers[layer].on_gpu.own_gradient_slot
        if kept_slot is None:
            return next((slot for slot in self._gradient_slots if slot.layer is None), None)
        if kept_slot.is_pending:
            return GradientSlot(torch.empty_like(kept_slot.gradients), is_extra=True)
        return kept_slot

    def claim_gradients(self, slot: GradientSlot, layer: int) -> None:
        """Give `slot` to the layer, whose gradients gather in it.

        Raises StateError if another layer has the slot.
        """
        if slot.layer is not None:
            raise StateError(
                f"layer {layer} cannot gather in the gradient slot of layer {slot.layer}"
            )
        slot.layer = layer
        slot.summing.clear()
        slot.arrived.clear()
        slot.writers.clear()
        self._layers[layer].on_gpu.gradient_slot = slot

    def release_gradients(self, slot: GradientSlot) -> None:
        """Give a gradient slot back. Operations that still use it are in its record.

        Raises StateError if the slot is free.
        """
        if slot.layer is None:
            raise StateError("a gradient slot was given back twice")
        self._layers[slot.layer].on_gpu.gradient_slot = None
        slot.layer = None
        if slot in self._gradient_slots:
            # The slot freed last is taken last, so that its offload can go on meanwhile.
            others = [other for other in self._gradient_slots if other is not slot]
            self._gradient_slots = [*others, slot]

    def hold_gradients(self, slot: GradientSlot) -> None:
        """End the gathering: the layer's slot keeps the gradients until `drop_held_gradients`.

        Raises StateError if `slot` is a shared one.
        """
        if slot.layer is None or self._layers[slot.layer].on_gpu.own_gradient_slot is not slot:
            raise StateError("gradients can be held in a layer's own slot alone")
        self._layers[slot.layer].on_gpu.gradient_slot = None
        slot.layer = None
        slot.is_pending = True

    def drop_held_gradients(self, layer: int) -> None:
        """Drop the pending gradients in the layer's slot, if there are any."""
        slot = self._layers[layer].on_gpu.own_gradient_slot
        if slot is not None and slot.is_pending:
            slot.is_pending = False
            self._device.memory.poison(slot.gradients)

    def layers_in_shared_slots(self) -> list[int]:
        """Layers that gather gradients in a slot that layers take in turn."""
        return [slot.layer for slot in self._gradient_slots if slot.layer is not None]

    def gathering_layers(self) -> list[int]:
        """Layers whose gradients are in a slot and not yet on their way out.

        Layers in shared slots come first.
        """
        shared = self.layers_in_shared_slots()
        gathering = [
            state.index for state in self._layers if state.on_gpu.gradient_slot is not None
        ]
        not_shared = [index for index in gathering if index not in shared]
        return [*shared, *not_shared]

    def close(self) -> None:
        """Free every slot. Safe to call twice."""
        resident_slots = [state.on_gpu.slot for state in self._residents]
        weights = [slot.weights for slot in (*self._slots, *resident_slots) if slot is not None]
        self._device.memory.release(*weights)
        gradient_slots = [*self._gradient_slots, *self._all_own_gradient_slots()]
        self._device.memory.release(*(slot.gradients for slot in gradient_slots))
        if self._has_sums:
            sums = [slot.sums for slot in gradient_slots if slot.sums is not None]
            self._device.memory.release(*sums)
        for state in self._layers:
            state.on_gpu.slot = None
            state.on_gpu.gradient_slot = None
            state.on_gpu.own_gradient_slot = None
        self._slots.clear()
        self._residents.clear()
        self._gradient_slots.clear()


def _trainable_sections(state: LayerState) -> Iterable[Section]:
    """The sections of the weights that train: they come first in a layer."""
    trainable = state.layout.trainable_numel
    return (section for section in state.maps["weights"].sections if section.end <= trainable)


def slot_gradient_bytes(state: LayerState) -> int:
    """Bytes that a slot needs for the layer's gradients, before ranks share them."""
    return sum(section.nbytes for section in _trainable_sections(state))


def slot_sum_numel(state: LayerState) -> int:
    """Elements that a slot needs for the layer's fp32 sums of chunks.

    0 if all gradients are fp32: they are summed in place.
    """
    dtypes = {section.dtype for section in _trainable_sections(state)}
    return 0 if dtypes <= {torch.float32} else state.layout.trainable_numel
