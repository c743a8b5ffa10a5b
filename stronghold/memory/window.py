"""Slots: the device buffers that layers' weights and gradients take.

Owns them. Never issues a copy: `runtime.weights` and `runtime.gradients` do, and report what became
of each slot. Entered by the training thread (and, on a GPU, by autograd's thread during backward),
never by both at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stronghold.device.base import Device, Fence, Record
from stronghold.errors import StateError
from stronghold.memory.buffers import GradientSlot, Slot, SlotContents
from stronghold.memory.layer import LayerState, Residency
from stronghold.plan.homes import GPU

NEVER = -1  # of what was never fetched: no version of a layer


class Window:
    """`num_slots` weight slots that the layers outside `resident` take turns in; each resident
    layer has a slot of its own size for good, unless it is updated on the device, where its weights
    never come or go. Blocks gather gradients in `num_gradient_slots` shared slots; what is in
    `own_gradients` has one of its own: what is no block (embedding, head), since its gradients come
    early and late in backward, and whatever holds them on the device until the gate. `sums`: blocks
    add several gradients in fp32."""

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
        streamed = [state for state in layers if state.index not in resident]
        self._device = device
        self._sums = sums
        self._layers = layers
        self.num_gradient_slots = num_gradient_slots
        self._own_gradients = own_gradients
        sharing = [state for state in layers if state.index not in own_gradients]
        self._gradient_bytes = max(map(slot_gradient_bytes, sharing), default=0)
        self._sum_numel = max(map(slot_sum_numel, sharing), default=0)
        nbytes = max((state.maps["weights"].nbytes for state in streamed), default=0)
        self._slots = [
            self._slot(nbytes, f"weight slot {i}") for i in range(num_slots if streamed else 0)
        ]
        self._gradient_slots: list[GradientSlot] = []
        self._own = [s for s in layers if s.index in resident and s.home is not GPU]
        for state in layers:
            state.on_gpu.slot = state.on_gpu.gradient_slot = state.on_gpu.own_gradient_slot = None
            state.on_gpu.residency = Residency.AWAY
        for state in self._own:
            nbytes = state.maps["weights"].nbytes
            state.on_gpu.slot = self._slot(nbytes, f"weights of {state.layout.name}")
            state.on_gpu.slot.contents = SlotContents(state.index, NEVER)
        self._prepared = False

    def _slot(self, nbytes: int, purpose: str) -> Slot:
        return Slot(self._device.allocate(nbytes, torch.uint8, purpose))

    def _gradient_slot(self, nbytes: int, sum_numel: int, purpose: str) -> GradientSlot:
        gradients = self._device.allocate(nbytes, torch.uint8, purpose)
        if not sum_numel:
            return GradientSlot(gradients)
        return GradientSlot(
            gradients, self._device.allocate(sum_numel, torch.float32, f"sums, {purpose}")
        )

    def prepare_training(self) -> None:
        """Make the gradient slots at the first backward; goes on where an interrupt ended it."""
        if self._prepared:
            return
        while self._gradient_bytes and len(self._gradient_slots) < self.num_gradient_slots:
            name = f"gradient slot {len(self._gradient_slots)}"
            sum_numel = self._sum_numel if self._sums else 0
            self._gradient_slots.append(self._gradient_slot(self._gradient_bytes, sum_numel, name))
        for state in self._layers:
            nbytes = slot_gradient_bytes(state)
            if (
                state.index in self._own_gradients
                and nbytes
                and state.on_gpu.own_gradient_slot is None
            ):
                name = f"gradients of resident layer {state.index}"
                sum_numel = slot_sum_numel(state) if self._sums and state.layout.streamed else 0
                state.on_gpu.own_gradient_slot = self._gradient_slot(nbytes, sum_numel, name)
        self._prepared = True

    def start_again(self) -> None:
        """Whatever was under way, and however far it had come: nothing is in a slot, nothing
        gathers and nothing is held. The lanes have done what was queued, and compute too."""
        for slot in self._slots:
            slot.contents, slot.record = None, Record()
            self._device.poison(slot.weights)
        for state in self._layers:
            if state not in self._own:
                state.on_gpu.slot = None
            else:
                assert state.on_gpu.slot is not None
                state.on_gpu.slot.contents = SlotContents(state.index, NEVER)
                state.on_gpu.slot.record = Record()
            state.on_gpu.residency = Residency.AWAY
            state.on_gpu.gradient_slot = None
        own = (
            s.on_gpu.own_gradient_slot
            for s in self._layers
            if s.on_gpu.own_gradient_slot is not None
        )
        for gathering in (*self._gradient_slots, *own):
            gathering.layer, gathering.is_pending, gathering.record = None, False, Record()
            gathering.summing.clear()
            gathering.arrived.clear()
            gathering.writers.clear()
            self._device.poison(gathering.gradients)

    # -- weights --------------------------------------------------------------------------------
    def held_layers(self) -> list[int]:
        """Streamed layers that are in a slot or on their way into one."""
        return [slot.layer for slot in self._slots if slot.layer is not None]

    def places(self) -> list[int | None]:
        """The layer in each slot, in the order in which slots are taken and given up."""
        return [slot.layer for slot in self._slots]

    def arrange(self, places: Sequence[int | None]) -> None:
        """The slots in this order, with the layers that they hold already."""
        of_layer = {slot.layer: slot for slot in self._slots if slot.layer is not None}
        free = iter([slot for slot in self._slots if slot.layer is None])
        self._slots = [next(free) if layer is None else of_layer[layer] for layer in places]

    def free_slot(self) -> Slot | None:
        """A slot that no layer claims; what used it may still be pending."""
        return next((slot for slot in self._slots if slot.layer is None), None)

    def claim(self, slot: Slot, layer: int) -> None:
        """The layer is on its way into `slot`."""
        state = self._layers[layer]
        if slot.layer not in (None, layer):
            raise StateError(f"layer {layer} cannot take the slot of layer {slot.layer}")
        if state in self._own and slot is not state.on_gpu.slot:
            raise StateError(f"layer {layer} is resident and has a slot of its own")
        state.move(Residency.FETCHING)
        slot.contents = SlotContents(layer, state.on_gpu.version)
        state.on_gpu.slot = slot

    def make_ready(self, layer: int) -> None:
        """Compute waits for the layer's fetch."""
        self._layers[layer].move(Residency.READY)

    def outdate(self, layer: int) -> None:
        """The layer's weights at home are, or will be, new: its slot has old ones from now on."""
        self._layers[layer].on_gpu.version += 1

    def release(self, layer: int, after: Fence) -> None:
        """Give a streamed layer's slot back, which compute has used until `after`; nothing is
        copied."""
        state = self._layers[layer]
        slot = state.on_gpu.slot
        if state in self._own:
            raise StateError(f"layer {layer} is resident and keeps its slot")
        if slot is None:
            raise StateError(f"layer {layer} has no slot to give back")
        if state.on_gpu.residency is Residency.READY:
            slot.record.read(after)
            self._device.poison(slot.weights)
        state.move(Residency.AWAY)
        state.on_gpu.slot = None
        slot.contents = None
        # The slot freed last is taken last. A new list: an interrupt must not lose the slot.
        self._slots = [*(other for other in self._slots if other is not slot), slot]

    # -- gradients ------------------------------------------------------------------------------
    def free_gradient_slot(self, layer: int) -> GradientSlot | None:
        """A gradient slot for the layer that nobody gathers in; what used it may still be pending.
        While the layer's own slot is held it is torch's memory, for as long as the layer gathers:
        what comes twice in a step is rare, and not planned."""
        own = self._layers[layer].on_gpu.own_gradient_slot
        if own is None:
            return next((slot for slot in self._gradient_slots if slot.layer is None), None)
        return (
            GradientSlot(torch.empty_like(own.gradients), is_extra=True) if own.is_pending else own
        )

    def claim_gradients(self, slot: GradientSlot, layer: int) -> None:
        """The layer's gradients are gathered in `slot` from now on."""
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
        """Give a gradient slot back; what uses it still is in its record."""
        if slot.layer is None:
            raise StateError("a gradient slot was given back twice")
        self._layers[slot.layer].on_gpu.gradient_slot = None
        slot.layer = None
        if slot in self._gradient_slots:
            # The slot freed last is taken last, so that its drain can go on meanwhile.
            others = (other for other in self._gradient_slots if other is not slot)
            self._gradient_slots = [*others, slot]

    def hold_gradients(self, slot: GradientSlot) -> None:
        """Gathering is over: the layer's own slot keeps its gradients until `drop_held_gradients`."""
        if slot.layer is None or self._layers[slot.layer].on_gpu.own_gradient_slot is not slot:
            raise StateError("gradients can be held in a layer's own slot alone")
        self._layers[slot.layer].on_gpu.gradient_slot = None
        slot.layer = None
        slot.is_pending = True

    def drop_held_gradients(self, layer: int) -> None:
        """The gradients in the layer's own slot were used, or are void; harmless when there are
        none."""
        slot = self._layers[layer].on_gpu.own_gradient_slot
        if slot is not None and slot.is_pending:
            slot.is_pending = False
            self._device.poison(slot.gradients)

    def layers_in_shared_slots(self) -> list[int]:
        """Those whose gradients are in a slot that layers take in turn."""
        return [slot.layer for slot in self._gradient_slots if slot.layer is not None]

    def gathering_layers(self) -> list[int]:
        """Layers whose gradients are in a slot and not yet on their way out, those that take turns
        first."""
        shared = self.layers_in_shared_slots()
        own = (s.index for s in self._layers if s.on_gpu.gradient_slot is not None)
        return [*shared, *(index for index in own if index not in shared)]

    def close(self) -> None:
        """Drop every buffer. Twice is harmless."""
        own = [s.on_gpu.slot for s in self._own if s.on_gpu.slot is not None]
        self._device.release(*(slot.weights for slot in (*self._slots, *own)))
        of_layers = [s.on_gpu.own_gradient_slot for s in self._layers]
        slots = (*self._gradient_slots, *(slot for slot in of_layers if slot is not None))
        self._device.release(*(slot.gradients for slot in slots))
        if self._sums:
            planned = [slot.sums for slot in slots if slot.sums is not None]
            self._device.release(*planned)
        for state in self._layers:
            state.on_gpu.slot = state.on_gpu.gradient_slot = state.on_gpu.own_gradient_slot = None
        self._slots.clear()
        self._own.clear()
        self._gradient_slots.clear()


def slot_gradient_bytes(state: LayerState) -> int:
    """What a slot needs for the layer's gradients, of all ranks."""
    trainable = state.layout.trainable_numel
    return sum(s.nbytes for s in state.maps["weights"].sections if s.end <= trainable)


def slot_sum_numel(state: LayerState) -> int:
    """Items that a slot needs for the layer's fp32 sums of chunks: none where all gradients are
    fp32."""
    trainable = state.layout.trainable_numel
    dtypes = {s.dtype for s in state.maps["weights"].sections if s.end <= trainable}
    return 0 if dtypes <= {torch.float32} else trainable
