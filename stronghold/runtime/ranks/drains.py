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
What that means for updates that do not wait for the gate is in `early`.

[Note: no wait in a circle] One rank waits for a gradient slot, so for other ranks' reductions of
the layer that was there; another waits for a gather, so for the first rank to come further. That
would be a circle, but a rank that has come as far as a layer has closed all layers whose slots this
one could need, whether it used them or not; and the first rank has issued every gather up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stronghold.device.base import Device, Fence, completed
from stronghold.errors import ConfigError, RankError
from stronghold.memory.host import HostStore
from stronghold.memory.window import GradientSlot, Window
from stronghold.runtime.adam import AdamSteps
from stronghold.runtime.distributed import Ranks
from stronghold.runtime.drains import GradientDrains
from stronghold.runtime.ledger import further_gradient
from stronghold.runtime.ranks.early import Agreed, SharedUpdater
from stronghold.runtime.ranks.gathers import Gathers
from stronghold.telemetry.metrics import Metrics


class SharedDrains(GradientDrains):
    """`GradientDrains` of one of several ranks."""

    def __init__(
        self,
        *,
        device: Device,
        host: HostStore,
        window: Window,
        updater: SharedUpdater,
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
        self._shared_updater = updater
        self.early = updater.ledger.early
        # Of this step: what was agreed of each reduction, and the layers that are updated when
        # backward has ended.
        self._agreed: dict[int, list[Agreed]] = {}
        self._late: frozenset[int] = frozenset()
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

    def prepare(self, calls: Sequence[int]) -> None:
        """Make room for other ranks' gradients, once, at the first backward. `calls`: forward calls
        of each layer. Updates that come early must know which ranks called a layer twice, and wait
        for this rank's reads of other ranks' weights."""
        if self.early:
            self._gathers.quiet()
            called_twice = self._agreed_layers([calls[i] > 1 for i in self._order], "calls")
            self._late = self._shared_updater.deferred.union(called_twice)
        largest = max((layer.trainable_numel for layer in self._host.layout.layers), default=0)
        if self._room is None and self._device.torch_device.type == "cpu" and largest:
            self._room = self._device.allocate(largest, self._host.dtype, "reduced gradients")

    def forget(self) -> None:
        """The step has ended or is abandoned."""
        self._agreed.clear()
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
        try:
            self._reduce_rest()
        except (ConfigError, RankError):  # the step has failed, here too
            self.abandon()
            self._shared_updater.abandon_backward()
            raise
        self._begin_again()

    def _reduce_rest(self) -> None:
        for layer in self._order[self._next :]:
            self._close(layer)
        while layers := self._agreed_again():
            if self.early:
                self._refuse_repeated(layers)
            for layer in layers:
                slot = self._again.pop(layer) if layer in self._again else self._extra(layer)
                self._reduce_slot(layer, slot)
        for layer in self._late & self._agreed.keys():  # to be updated now
            self._shared_updater.ledger.arrived[layer] = self._touched_anywhere(layer)

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
        return self._agreed_layers([i in self._again for i in self._order], "further gradients")

    def _agreed_layers(self, mine: Sequence[bool], operation: str) -> list[int]:
        """The layers of `_order` of which any rank says yes."""
        if not self._order:
            return []
        rows = self._ranks.control.numbers(torch.tensor(mine, dtype=torch.uint8), operation)
        wanted = rows.any(dim=0).tolist()
        return [layer for layer, found in zip(self._order, wanted, strict=True) if found]

    def _refuse_repeated(self, layers: Sequence[int]) -> None:
        """ConfigError on every rank when any has more gradients of what was used already
        ([Note: parts] of `early`)."""
        pairs = [(i, k) for i in layers if i not in self._late for k in sorted(self._trained[i])]
        arrived = {i: slot.arrived for i, slot in self._again.items()}
        mine = torch.tensor([k in arrived.get(i, ()) for i, k in pairs], dtype=torch.uint8)
        if not pairs:
            return
        further = self._ranks.control.numbers(mine, "further gradients").any(dim=0).tolist()
        repeated = [
            pair
            for pair, found in zip(pairs, further, strict=True)
            if found and pair[1] in self._touched_anywhere(pair[0])
        ]
        if repeated:
            layouts = self._host.layout.layers
            raise ConfigError(further_gradient([layouts[i].slices[k].name for i, k in repeated]))

    def _touched_anywhere(self, layer: int) -> set[int]:
        """What any rank had of the layer in the reductions so far; waits for them."""
        found: set[int] = set()
        for agreed in self._agreed.get(layer, ()):
            assert agreed.fence is not None
            agreed.fence.wait_issued()  # flags are the CPUs' affair
            found |= agreed.touched
        return found

    def taken(self, arrived: Sequence[set[int]]) -> None:
        """The step has ended: count the steps of parameters that were updated early."""
        for layer in self._agreed.keys() - self._late:
            self._adam.count(layer, arrived[layer])

    def _reduce(self, layer: int) -> None:
        self._reduced.add(layer)
        slot = self._window.gradient_slot_of(layer)
        if slot is None:  # nothing came: take part with zeros
            free = self._window.free_gradient_slot(layer)
            if free is None:
                self._reduce_slot(layer, self._extra(layer))
                return
            self._window.claim_gradients(free, layer)
            slot = free
        done = self._reduce_slot(layer, slot)
        self._window.release_gradients(slot, done)

    def _reduce_slot(self, layer: int, slot: GradientSlot) -> Fence:
        device, state = self._device, self._host.layers[layer]
        trained = self._trained[layer]
        self.touched[layer] |= slot.arrived
        if trained - slot.arrived:
            self._enter(slot)
        for position in trained - slot.arrived:
            slot.gradients[state.layout.slices[position].within(0, state.layout.numel)].zero_()
        gradients = slot.gradients[: state.layout.trainable_numel]
        size, own = gradients.element_size(), gradients[state.begin : state.end]
        early = self.early and layer not in self._late
        calls = 2 if layer in self._late else 1
        entry = self._host.ring_entry() if early else self._updater.entry_for(layer, trained, calls)
        group, room, name = self._ranks.reduce, self._room, f"reduce {layer}"

        def copy() -> None:
            device.keep_for_lane(gradients)  # some are torch's memory
            device.copy(entry.gradients[: own.numel()], own)
            device.poison(gradients)

        self._gathers.note("reduce", layer)
        agreed = self._agreed_flags(layer, slot.arrived) if self.early else None

        def reduce() -> None:
            if agreed is not None:
                agreed.exchange()
            group.mean(gradients, room, name)

        reduced = device.reduce.submit(
            name,
            reduce,
            self._produced(layer, slot),
            nbytes=(gradients.numel() - own.numel()) * size,
        )
        nbytes = own.numel() * size
        drained = device.drain.submit(
            f"drain {layer}", copy, (reduced, entry.free_after), nbytes=nbytes
        )
        self.drained_bytes += nbytes
        last_fetch = self._last_fetch(layer)
        if agreed is not None:
            agreed.fence = reduced
        if early and agreed is not None:
            self._shared_updater.update_agreed(layer, entry, drained, last_fetch, agreed)
        else:
            self._updater.drained(layer, trained, entry, drained, last_fetch, calls)
        return drained

    def _agreed_flags(self, layer: int, arrived: set[int]) -> Agreed:
        count = len(self._host.layers[layer].layout.slices)
        agreed = Agreed(self._ranks, layer, count, arrived, self._gathers.issued["reduce"])
        self._agreed.setdefault(layer, []).append(agreed)
        return agreed


def _order(streamed: Sequence[bool], trained: Sequence[frozenset[int]]) -> list[int]:
    """The order in which backward is expected to complete layers: the last first."""
    return [index for index in reversed(range(len(streamed))) if trained[index]]
