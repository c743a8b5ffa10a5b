"""Slots and residency: which layer's weights and gradients are on the device.

Owns the device buffers. Never issues a copy: `runtime.executor` does, and tells the window what
became of each slot. Entered by the training thread (and, on a GPU, by autograd's thread during
backward), never by both at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch

from stronghold.device.base import Device, Fence, completed
from stronghold.errors import StateError
from stronghold.memory.layer import view
from stronghold.model.layout import LayerLayout, ParameterSlice


class Residency(Enum):
    """Where a layer's weights are. RESIDENT: compute waited for the fetch, not merely that it was
    queued."""

    HOST = "host"
    FETCHING = "fetching"
    RESIDENT = "resident"


TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    Residency.HOST: frozenset({Residency.FETCHING}),
    Residency.FETCHING: frozenset({Residency.RESIDENT, Residency.HOST}),
    # RESIDENT to FETCHING: a resident layer was updated, and is fetched again into its own slot.
    Residency.RESIDENT: frozenset({Residency.HOST, Residency.FETCHING}),
}


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one layer's weights. `free_after`: the fence of the last use, before it may be
    overwritten."""

    weights: torch.Tensor
    free_after: Fence
    layer: int | None = None
    ready: Fence | None = None


@dataclass(slots=True, eq=False)
class GradientSlot:
    """Room for one layer's gradients in the compute dtype; `arrived` names the parameters that are
    it, `writers` the compute lane's streams that may write it. `held`: gathering is over, and the
    gradients stay until the step ends."""

    gradients: torch.Tensor
    free_after: Fence
    layer: int | None = None
    held: bool = False
    arrived: set[int] = field(default_factory=set)
    writers: list[object] = field(default_factory=list)
    _views: dict[tuple[int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)

    def view(self, part: ParameterSlice) -> torch.Tensor:
        """The place of a parameter's gradient; layers are alike, so that each is made once."""
        place = part.offset, part.shape
        found = self._views.get(place)
        if found is None:
            found = self._views[place] = view(self.gradients, part)
        return found


class Window:
    """`num_slots` weight slots that the layers outside `resident` take turns in; each resident
    layer has a slot of its own size for good, unless it is `elsewhere`: updated on the device, its
    weights never come or go. Blocks gather gradients in `num_gradient_slots` shared slots; what is
    in `own_gradients` has one of its own: what is no block (embedding, head), since its gradients
    come early and late in backward, and whatever holds them on the device until the gate."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        layers: Iterable[LayerLayout],
        *,
        resident: frozenset[int],
        num_slots: int,
        num_gradient_slots: int,
        elsewhere: frozenset[int] = frozenset(),
        own_gradients: frozenset[int] | None = None,
    ) -> None:
        layers = tuple(layers)
        if own_gradients is None:
            own_gradients = frozenset(layer.index for layer in layers if not layer.streamed)
        streamed = [layer for layer in layers if layer.index not in resident]
        self._device = device
        self._dtype = dtype
        self._num_gradient_slots = num_gradient_slots
        self.residency = {layer.index: Residency.HOST for layer in layers}
        self.resident = resident
        slot_numel = max((layer.numel for layer in streamed), default=0)
        self._gradient_numel = max(
            (layer.trainable_numel for layer in layers if layer.index not in own_gradients),
            default=0,
        )
        self._slots = [
            self._slot(slot_numel, f"weight slot {i}") for i in range(num_slots if streamed else 0)
        ]
        self._own = {
            layer.index: self._slot(layer.numel, f"weights of {layer.name}")
            for layer in layers
            if layer.index in resident - elsewhere
        }
        self._own_trainable = {
            layer.index: layer.trainable_numel
            for layer in layers
            if layer.index in own_gradients and layer.trainable_numel
        }
        self._gradient_slots: list[GradientSlot] = []
        self._own_gradients: dict[int, GradientSlot] = {}
        self._beside: dict[int, GradientSlot] = {}  # gathering for layers whose own slot is held
        self._holding: dict[int, Slot] = dict(self._own)
        self._prepared = False
        for index, slot in self._own.items():
            slot.layer = index

    def _slot(self, numel: int, purpose: str) -> Slot:
        return Slot(
            self._device.allocate(numel, self._dtype, purpose), completed("compute", "never used")
        )

    def _gradient_slot(self, numel: int, purpose: str) -> GradientSlot:
        return GradientSlot(
            self._device.allocate(numel, self._dtype, purpose), completed("drain", "never used")
        )

    def prepare_training(self) -> None:
        """Make the gradient slots at the first backward; goes on where an interrupt ended it."""
        if self._prepared:
            return
        while self._gradient_numel and len(self._gradient_slots) < self._num_gradient_slots:
            name = f"gradient slot {len(self._gradient_slots)}"
            self._gradient_slots.append(self._gradient_slot(self._gradient_numel, name))
        for index, numel in self._own_trainable.items():
            if index not in self._own_gradients:
                self._own_gradients[index] = self._gradient_slot(
                    numel, f"gradients of resident layer {index}"
                )
        self._prepared = True

    def start_again(self, free: Fence) -> None:
        """Whatever was under way, and however far it had come: nothing is in a slot, nothing
        gathers and nothing is held. The lanes have done what was queued, compute is done at `free`.
        """
        self._holding = dict(self._own)
        self.residency = dict.fromkeys(self.residency, Residency.HOST)
        for slot in (*self._slots, *self._own.values()):
            slot.layer, slot.ready, slot.free_after = None, None, free
        for slot in self._slots:
            self._device.poison(slot.weights)
        for index, slot in self._own.items():
            slot.layer = index
        self._beside.clear()
        for gathering in (*self._gradient_slots, *self._own_gradients.values()):
            gathering.layer, gathering.held, gathering.free_after = None, False, free
            gathering.arrived.clear()
            gathering.writers.clear()
            self._device.poison(gathering.gradients)

    # -- weights --------------------------------------------------------------------------------
    def move(self, layer: int, to: Residency) -> None:
        """Change the layer's state; StateError on a transition that the table does not have."""
        state = self.residency[layer]
        if to not in TRANSITIONS[state]:
            raise StateError(f"layer {layer} cannot go from {state.value} to {to.value}")
        self.residency[layer] = to

    def slot_of(self, layer: int) -> Slot | None:
        """The slot that holds the layer or is being filled with it."""
        return self._holding.get(layer)

    def held_layers(self) -> list[int]:
        """Streamed layers that are in a slot or on their way into one."""
        return [slot.layer for slot in self._slots if slot.layer is not None]

    def free_slot(self) -> Slot | None:
        """A slot that no layer claims; its `free_after` may still be pending."""
        return next((slot for slot in self._slots if slot.layer is None), None)

    def claim(self, slot: Slot, layer: int) -> None:
        """The layer is on its way into `slot`."""
        if slot.layer not in (None, layer):
            raise StateError(f"layer {layer} cannot take the slot of layer {slot.layer}")
        if slot is not self._own.get(layer, slot):
            raise StateError(f"layer {layer} is resident and has a slot of its own")
        self.move(layer, Residency.FETCHING)
        slot.layer = layer
        self._holding[layer] = slot

    def release(self, layer: int, after: Fence) -> None:
        """Give a streamed layer's slot back, free after `after`; nothing is copied."""
        if layer in self._own:
            raise StateError(f"layer {layer} is resident and keeps its slot")
        slot = self._holding.pop(layer, None)
        if slot is None:
            raise StateError(f"layer {layer} has no slot to give back")
        if self.residency[layer] is Residency.FETCHING:
            # A prefetch that nobody used: the next one into this slot queues behind it on the same
            # lane.
            slot.free_after = slot.ready or after
        else:
            slot.free_after = after
            self._device.poison(slot.weights)
        self.move(layer, Residency.HOST)
        slot.layer = None
        slot.ready = None
        # The slot freed last is taken last. A new list: an interrupt must not lose the slot.
        self._slots = [*(other for other in self._slots if other is not slot), slot]

    @property
    def num_gradient_slots(self) -> int:
        """How many layers can gather in shared slots at once."""
        return self._num_gradient_slots

    # -- gradients ------------------------------------------------------------------------------
    def gradient_slot_of(self, layer: int) -> GradientSlot | None:
        """The gradient slot in which the layer's gradients are being gathered."""
        own = self._own_gradients.get(layer)
        if own is not None:
            return own if own.layer == layer else self._beside.get(layer)
        return next((slot for slot in self._gradient_slots if slot.layer == layer), None)

    def free_gradient_slot(self, layer: int) -> GradientSlot | None:
        """A gradient slot for the layer that nobody gathers in; its `free_after` may still be
        pending. While the layer's own slot is held it is torch's memory, for as long as the layer
        gathers: what comes twice in a step is rare, and not planned."""
        own = self._own_gradients.get(layer)
        if own is None:
            return next((slot for slot in self._gradient_slots if slot.layer is None), None)
        if own.held:
            self._beside[layer] = GradientSlot(
                torch.empty_like(own.gradients), completed("compute", "never used")
            )
            return self._beside[layer]
        return own

    def claim_gradients(self, slot: GradientSlot, layer: int) -> None:
        """The layer's gradients are gathered in `slot` from now on."""
        if slot.layer is not None:
            raise StateError(
                f"layer {layer} cannot gather in the gradient slot of layer {slot.layer}"
            )
        slot.layer = layer
        slot.arrived.clear()
        slot.writers.clear()

    def release_gradients(self, slot: GradientSlot, after: Fence) -> None:
        """Give a gradient slot back, free after `after` (its drain)."""
        if slot.layer is None:
            raise StateError("a gradient slot was given back twice")
        if self._beside.get(slot.layer) is slot:
            del self._beside[slot.layer]
        slot.layer = None
        slot.free_after = after
        if slot in self._gradient_slots:
            # The slot freed last is taken last, so that its drain can go on meanwhile.
            others = (other for other in self._gradient_slots if other is not slot)
            self._gradient_slots = [*others, slot]

    def hold_gradients(self, slot: GradientSlot) -> None:
        """Gathering is over: the layer's own slot keeps its gradients until `drop_held`."""
        if slot.layer is None or self._own_gradients.get(slot.layer) is not slot:
            raise StateError("gradients can be held in a layer's own slot alone")
        slot.layer = None
        slot.held = True

    def held_gradients(self, layer: int) -> torch.Tensor:
        """What the layer's own slot holds, or will."""
        return self._own_gradients[layer].gradients

    def drop_held(self, layer: int) -> None:
        """The layer's held gradients were used, or are void; harmless when it holds none."""
        slot = self._own_gradients.get(layer)
        if slot is not None and slot.held:
            slot.held = False
            self._device.poison(slot.gradients)

    def shares_gradient_slots(self, layer: int) -> bool:
        """Whether the layer takes turns with others, rather than having a gradient slot of its
        own."""
        return layer not in self._own_gradients

    def gathering(self) -> list[int]:
        """Layers whose gradients are in a slot and not yet on their way out."""
        own = [*self._own_gradients.values(), *self._beside.values()]
        slots = [*self._gradient_slots, *own]
        return [slot.layer for slot in slots if slot.layer is not None]

    def close(self) -> None:
        """Drop every buffer. Twice is harmless."""
        gathering = [*self._gradient_slots, *self._own_gradients.values()]
        self._device.release(*(slot.weights for slot in (*self._slots, *self._own.values())))
        self._device.release(*(slot.gradients for slot in gathering))
        self._slots.clear()
        self._own.clear()
        self._holding.clear()
        self._gradient_slots.clear()
        self._own_gradients.clear()
        self._beside.clear()
