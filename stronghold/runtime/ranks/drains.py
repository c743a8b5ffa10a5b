"""Gradients on their way out under several ranks: the mean over all, then each its own shard.

Owns the order of the reductions and which gradients have come on this rank. Entered as
`runtime.drains`. Races beside those:
  * ranks reduce different layers         -> every backward reduces every trained layer once, in one
                                             order, with zeros where nothing came
  * a slot is reduced while it is filled  -> a layer that gets more after its reduction gathers in a
                                             buffer of its own, and is reduced again

[Note: one order] A layer is closed when all of its gradients have come, when a slot is needed for
another, or when backward ends. Closed layers are reduced in the order of `_order`: one waits until
those before it are closed. Which layers need a second reduction is agreed at the end of backward.

[Note: no wait in a circle] One rank waits for a gradient slot, so for other ranks' reductions of
the layer that was there; another waits for a gather, so for the first rank to come further. That
would be a circle, but a rank that has come as far as a layer has closed all layers whose slots this
one could need, whether it used them or not; and the first rank has issued every gather up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stronghold.device.base import Device, Fence, completed
from stronghold.memory.host import HostStore
from stronghold.memory.window import GradientSlot, Window
from stronghold.runtime.adam import AdamSteps
from stronghold.runtime.distributed import Ranks
from stronghold.runtime.drains import GradientDrains
from stronghold.runtime.ranks.gathers import Gathers
from stronghold.runtime.updater import Updater
from stronghold.telemetry.metrics import Metrics


class SharedDrains(GradientDrains):
    """`GradientDrains` of one of several ranks."""

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
        ranks: Ranks,
        gathers: Gathers,
    ) -> None:
        super().__init__(
            device=device,
            host=host,
            window=window,
            updater=updater,
            adam=adam,
            metrics=metrics,
            last_fetch=last_fetch,
        )
        self._ranks = ranks
        self._gathers = gathers
        layouts = host.layout.layers
        self._trained = [adam.trained(layer.index) for layer in layouts]
        self._order = _order([layer.streamed for layer in layouts], self._trained)
        self._trained_layers = frozenset(self._order)
        self._num_slots = max(1, window.num_gradient_slots)
        self._next = 0  # in _order
        self._closed: set[int] = set()
        self._reduced: set[int] = set()
        self._complete: list[int] = []  # as they came in this backward
        self._seen_order = list(self._order)
        self._again: dict[int, GradientSlot] = {}  # more gradients of layers that were reduced
        self._room: torch.Tensor | None = None
        self.touched: list[set[int]] = [set() for _ in layouts]  # of this step, on this rank

    def prepare(self) -> None:
        """Make room for other ranks' gradients, once, at the first backward."""
        largest = max((layer.trainable_numel for layer in self._host.layout.layers), default=0)
        if self._room is None and self._device.torch_device.type == "cpu" and largest:
            self._room = self._device.allocate(largest, self._host.dtype, "reduced gradients")

    def forget(self) -> None:
        """The step has ended or is abandoned."""
        for touched in self.touched:
            touched.clear()

    def reached(self, layer: int) -> None:
        """Close the layers so far before this one that they would need its slot ([Note: no wait in
        a circle])."""
        if layer in self._trained_layers:
            end = self._order.index(layer) + 1 - self._num_slots
            for earlier in self._order[self._next : max(self._next, end)]:
                self._close(earlier)

    # -- gradients come ---------------------------------------------------------------------------
    def _slot_for(self, layer: int, calls: Sequence[int]) -> GradientSlot:
        if layer not in self._reduced:
            slot = self._window.gradient_slot_of(layer)
            if slot is not None:
                return slot
            self._make_room(layer)
        if layer not in self._reduced:
            return self._claim(layer, calls)
        if layer not in self._again:
            self._again[layer] = self._extra(layer)
        return self._again[layer]

    def _make_room(self, layer: int) -> None:
        """Others gather in every slot: close layers in order until one of those is free."""
        if self._window.free_gradient_slot(layer) is None:
            shares = self._window.shares_gradient_slots
            places = [self._order.index(g) for g in self._window.gathering() if shares(g)]
            for earlier in self._order[self._next : min(places) + 1]:
                self._close(earlier)

    def _extra(self, layer: int) -> GradientSlot:
        numel = self._host.layout.layers[layer].trainable_numel
        room = torch.empty(numel, dtype=self._host.dtype, device=self._device.torch_device)
        return GradientSlot(room, completed("compute", "never used"), layer)

    def _drain(self, layer: int, calls: int) -> None:
        """Every gradient of the layer has come."""
        if layer not in self._reduced:  # else it waits in a buffer of its own
            self._complete.append(layer)
            self._close(layer)

    def _close(self, layer: int) -> None:
        self._closed.add(layer)
        while self._next < len(self._order) and self._order[self._next] in self._closed:
            self._next += 1
            self._reduce(self._order[self._next - 1])

    def flush(self, calls: Sequence[int]) -> None:
        """Backward has ended: reduce what is left, in rounds that all ranks agree on."""
        for layer in self._order[self._next :]:
            self._close(layer)
        while layers := self._agreed_again():
            for layer in layers:
                slot = self._again.pop(layer) if layer in self._again else self._extra(layer)
                self._reduce_slot(layer, slot)
        self._begin_again()

    def _begin_again(self) -> None:
        complete = dict.fromkeys(self._complete)
        self._seen_order = [*complete, *(i for i in self._order if i not in complete)]
        self._next = 0
        self._closed.clear()
        self._reduced.clear()
        self._complete.clear()
        self._again.clear()

    def abandon(self) -> None:
        """Backward has failed on this rank: the others cannot go on without it."""
        super().abandon()
        self._begin_again()
        self.forget()

    # -- the order --------------------------------------------------------------------------------
    def seen_order(self) -> str:
        """In what order this rank's layers were complete in the last backward."""
        return str(self._seen_order)

    def adopt_order(self) -> None:
        """Every rank saw the same order: expect it from now on."""
        self._order = list(self._seen_order)

    # -- reductions -------------------------------------------------------------------------------
    def _agreed_again(self) -> list[int]:
        """The layers of which any rank has more gradients, in order."""
        if not self._order:
            return []
        mine = torch.tensor([int(layer in self._again) for layer in self._order])
        wanted = self._ranks.control.numbers(mine, "further gradients").sum(dim=0).tolist()
        return [layer for layer, count in zip(self._order, wanted, strict=True) if count]

    def _reduce(self, layer: int) -> None:
        self._reduced.add(layer)
        slot = self._window.gradient_slot_of(layer)
        if slot is None:  # nothing came: take part with zeros
            free = self._window.free_gradient_slot(layer)
            if free is None:
                self._reduce_slot(layer, self._extra(layer))
                return
            self._metrics.waited("drain", self._device.compute_wait(free.free_after))
            self._window.claim_gradients(free, layer)
            slot = free
        done = self._reduce_slot(layer, slot)
        self._window.release_gradients(slot, done)

    def _reduce_slot(self, layer: int, slot: GradientSlot) -> Fence:
        device, state = self._device, self._host.layers[layer]
        trained = self._trained[layer]
        self.touched[layer] |= slot.arrived
        for position in trained - slot.arrived:
            slot.gradients[state.layout.slices[position].within(0, state.layout.numel)].zero_()
        gradients = slot.gradients[: state.layout.trainable_numel]
        size, own = gradients.element_size(), gradients[state.begin : state.end]
        entry = self._updater.entry_for(layer, trained, 1)
        group, room, name = self._ranks.reduce, self._room, f"reduce {layer}"

        def copy() -> None:
            device.keep_for_lane(gradients)  # some are torch's memory
            device.copy(entry.gradients[: own.numel()], own)
            device.poison(gradients)

        self._gathers.note("reduce", layer)
        reduced = device.reduce.submit(
            name,
            lambda: group.mean(gradients, room, name),
            (device.record_compute(f"gradients {layer}"),),
            nbytes=(gradients.numel() - own.numel()) * size,
        )
        nbytes = own.numel() * size
        drained = device.drain.submit(
            f"drain {layer}", copy, (reduced, entry.free_after), nbytes=nbytes
        )
        self.drained_bytes += nbytes
        self._updater.drained(layer, trained, entry, drained, self._last_fetch(layer), 1)
        return drained


def _order(streamed: Sequence[bool], trained: Sequence[frozenset[int]]) -> list[int]:
    """The order in which backward is expected to complete layers: the last first."""
    return [index for index in reversed(range(len(streamed))) if trained[index]]
