"""Resident layers that are updated on the device: what happens to their gradients.

Owns where such a layer's gradients are between their arrival and the update. Nothing of it crosses
the link. Entered by the training thread, and by autograd's in backward; all work is on the compute
lane.

States of a layer's gradients in one step, by the plan's mode (`complete`: every trained parameter's
has arrived, or backward has ended):
  RING         gathering in a slot -> complete: norms and Adam at once, the slot is free
  HELD         gathering in the layer's own slot -> complete: held there until the gate. What
               arrives later (a second backward before the step, a gradient in two parts) gathers in
               memory beside, and is added when it is complete: as on the host, to the bit
  ACCUMULATED  gathering in a slot -> complete: added to fp32 sums, the slot is free; norms and Adam
               when the gate opens
Races and what prevents them:
  * a slot is filled again while kernels read it -> they are on the same lane, in order
  * Adam writes weights that backward still needs (RING) -> a parameter's gradient is complete after
  every node of the graph that has the parameter as an input. What was saved of it detached may be
  needed later: Adam raises the parameter's version, and whoever unpacks an older one refuses
  (autograd, or `activations` where its handles stand in between)
  * the norm of the gate is read before backward has ended on the device -> reading waits for it
"""

from __future__ import annotations

import torch

from stronghold.device.base import Device
from stronghold.memory.layer import view
from stronghold.memory.resident import DeviceStore
from stronghold.memory.window import GradientSlot, Window
from stronghold.plan.planner import Gradients
from stronghold.runtime.device_updates import DeviceUpdates, GradientsOfLayers, Update, addresses
from stronghold.runtime.ledger import Ledger


class Residents:
    """Takes over gathered gradients of the layers in `store`, and updates them."""

    def __init__(
        self,
        *,
        device: Device,
        store: DeviceStore,
        window: Window,
        updates: DeviceUpdates,
        ledger: Ledger,
        mode: Gradients,
    ) -> None:
        self._device = device
        self._window = window
        self._updates = updates
        self._ledger = ledger
        self._mode = mode
        self._states = {state.layout.index: state for state in store.layers}
        self._early_sums: list[torch.Tensor] = []  # of layers updated before the gate
        self._prepared: Update | None = None  # waits for the gate's decision

    def __contains__(self, layer: int) -> bool:
        return layer in self._states

    def gathered(self, layer: int, slot: GradientSlot) -> None:
        """The layer's gradients are complete in `slot`, or as complete as they will be."""
        arrived = frozenset(slot.arrived)
        if self._mode is Gradients.RING:
            self._update_early(layer, arrived, slot)
        elif self._mode is Gradients.ACCUMULATED:
            repeated = self._ledger.arrive(layer, arrived)
            gradients = {layer: addresses(slot.gradients, self._states[layer], arrived)}
            self._updates.accumulate(gradients, slot.gradients.dtype, {layer: repeated})
            self._release(layer, slot)
        else:
            self._hold(layer, arrived, slot)

    def _update_early(self, layer: int, arrived: frozenset[int], slot: GradientSlot) -> None:
        ledger, dtype = self._ledger, slot.gradients.dtype
        ledger.refuse_further(layer, arrived & ledger.arrived[layer])
        ledger.arrive(layer, arrived)
        gradients = {layer: addresses(slot.gradients, self._states[layer], arrived)}
        self._early_sums.append(self._updates.square_sums(gradients, dtype))
        ledger.applied.add(layer)  # also when Adam fails halfway
        self._updates.apply(self._updates.prepare(gradients, dtype), 1.0)
        self._release(layer, slot)

    def _hold(self, layer: int, arrived: frozenset[int], slot: GradientSlot) -> None:
        repeated = self._ledger.arrive(layer, arrived)
        held = self._window.held_gradients(layer)
        if slot.gradients is held:
            self._window.hold_gradients(slot)
            return
        slices = self._states[layer].layout.slices
        for k in sorted(arrived):
            target, part = view(held, slices[k]), view(slot.gradients, slices[k])
            if k in repeated:
                target.add_(part)
            else:
                target.copy_(part)
        self._release(layer, slot)

    def _release(self, layer: int, slot: GradientSlot) -> None:
        self._window.release_gradients(slot, self._device.record_compute(f"gradients {layer}"))
        self._device.poison(slot.gradients)

    # -- the gate ---------------------------------------------------------------------------------
    def square_sums(self) -> list[float]:
        """Sums of squares of the step's gradients, in any order; waits for backward."""
        sums = list(self._early_sums)
        if self._mode is not Gradients.RING and (gradients := self._waiting()):
            sums.append(self._updates.square_sums(gradients, self._dtype()))
            self._prepared = self._updates.prepare(gradients, self._dtype())
        return self._updates.read(sums)

    def update(self, scale: float) -> None:
        """The gate is open: update every layer that has gradients, which are multiplied by `scale`.
        Layers that were updated early are done already.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            self._updates.apply(prepared, scale)

    def forget(self) -> None:
        """The step has ended or is abandoned: its gradients were used, or are void."""
        if self._prepared is not None:  # the gate stays closed: overflow
            self._updates.cancel(self._prepared)
            self._prepared = None
        self._early_sums.clear()
        if self._mode is Gradients.HELD:
            for layer in self._states:
                self._window.drop_held(layer)

    def _waiting(self) -> GradientsOfLayers:
        return {
            layer: addresses(self._flat(layer), state, arrived)
            for layer, state in self._states.items()
            if (arrived := self._ledger.arrived[layer])
        }

    def _flat(self, layer: int) -> torch.Tensor:
        """Where the layer's gradients wait for the gate."""
        if self._mode is Gradients.HELD:
            return self._window.held_gradients(layer)
        accumulated = self._states[layer].accumulated
        assert accumulated is not None
        return accumulated

    def _dtype(self) -> torch.dtype:
        if self._mode is Gradients.ACCUMULATED:
            return torch.float32
        return next(iter(self._states.values())).weights.dtype
