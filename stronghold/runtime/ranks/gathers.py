"""Weights on their way in under several ranks: each its own part, then all from all.

Owns the issue of a fetch and of what follows it on the gather lane, the exchange of updated weights
between nodes, and the counts that say since when other ranks' parts of the node's weights are new.
Entered by the executor and the updater (and, for the counts, by the update and exchange lanes).
Races and what prevents them:
  * a gather fills a slot that compute still reads -> it comes after this rank's own fetch, which
                                                      waits for the slot
  * a rank reads a shard that its owner updates    -> within a pass each rank of a node sends its
                                                      own, after its own update; whoever reads
                                                      another's part of the host's weights waits for
                                                      `versions`
  * ranks gather different layers                  -> `issued`, which the gate compares

[Note: exchange] On several nodes a rank's part of the node's weights has its own range, which it
updates, and those of its peers, which the exchange lane writes ([Note: nodes] of `model.shards`).
A layer's exchange is submitted with its update, so in the order of the updates: that of the layers
that the gate agreed on, or of the reductions where updates do not wait for it, and the same on
every rank. Two orders would be a deadlock, for each exchange meets the peers. Until it is done the
layer does not count as updated. Races:
  * it sends a range that is being updated         -> it comes after this rank's update
  * an update writes a range that is being sent    -> it waits for the layer's last exchange
  * it writes what this rank still fetches         -> this rank's update has waited for its last
                                                      fetch, and the exchange for the update
  * it writes what a neighbour reads               -> neighbours read each other's parts alone
                                                      ([Note: alone]), and have ended that before
                                                      they take part in the gate or a reduction
  * a fetch copies what is yet to come             -> it waits for the exchange, as for an update
A checkpoint reads own ranges, which an exchange sends and never writes.

[Note: alone] What only some ranks do (an evaluation, text of different lengths) must not wait for
the others. Such a fetch copies the whole layer from the node's weights over this rank's own link.
The next update of the layer waits for it: it comes after a gate, and `quiet` before the gate.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stronghold.device.base import Device, Fence
from stronghold.memory.host import HostStore
from stronghold.memory.shared import NodeWeights
from stronghold.memory.window import Slot
from stronghold.runtime.distributed import Ranks

logger = logging.getLogger("stronghold")

POLL_S = 1e-4
CHECK_EVERY_S = 1.0


class Gathers:
    """Fetches of one engine under several ranks."""

    def __init__(self, device: Device, host: HostStore, weights: NodeWeights, ranks: Ranks) -> None:
        self._device = device
        self._host = host
        self._versions: Any = weights.versions
        self._ranks = ranks
        self._expected = [0] * len(host.layers)  # updates of each layer that were submitted
        self._alone: list[Fence] = []
        self._exchanges = ranks.exchange if ranks.num_nodes > 1 else None
        # A checksum of what each lane was given to do with the other ranks: each lane has an order
        # of its own, and how the two mix differs where ranks skip layers.
        self.issued = {"gather": 0, "reduce": 0}

    def fetch(
        self, layer: int, slot: Slot, updated: Fence, *, alone: bool
    ) -> tuple[Fence, Fence, int]:
        """Fill `slot`: the fence after which the host's weights may be written, the fence after
        which the slot is full, and the bytes of this rank's link.
        """
        return (self._whole if alone else self._gathered)(layer, slot, updated)

    def _gathered(self, layer: int, slot: Slot, updated: Fence) -> tuple[Fence, Fence, int]:
        device, state, group = self._device, self._host.layers[layer], self._ranks.gather
        parts = self._ranks.shards.fetched(state.layout)
        size = state.weights.element_size()
        own_bytes = sum(end - begin for _, (begin, end) in parts) * size
        name = f"gather {layer}"

        def copy() -> None:
            for _, (begin, end) in parts:
                device.copy(slot.weights[begin:end], state.weights[begin:end])

        def gather() -> None:
            for (first, last), (begin, end) in parts:
                group.gather(slot.weights[first:last], slot.weights[begin:end], name)

        self.note("gather", layer)
        after = (slot.free_after, updated)
        fetched = device.fetch.submit(f"fetch {layer}", copy, after, nbytes=own_bytes)
        if group.num_ranks == 1:  # the only one of its node
            return fetched, fetched, own_bytes
        received = state.layout.numel * size - own_bytes
        ready = device.gather.submit(name, gather, (fetched,), nbytes=received)
        return fetched, ready, own_bytes

    def _whole(self, layer: int, slot: Slot, updated: Fence) -> tuple[Fence, Fence, int]:
        device, state = self._device, self._host.layers[layer]
        expected = self._expected[layer]
        target = slot.weights[: state.weights.numel()]

        def copy() -> None:
            self._wait_for(layer, expected)
            device.copy(target, state.weights)

        nbytes = state.weights.numel() * state.weights.element_size()
        after = (slot.free_after, updated)
        fetched = device.fetch.submit(f"fetch {layer}", copy, after, nbytes=nbytes)
        self._alone.append(fetched)
        return fetched, fetched, nbytes

    def note(self, lane: str, layer: int) -> None:
        """The layer is on its way to a lane that meets the other ranks."""
        self.issued[lane] = zlib.crc32(layer.to_bytes(4, "little"), self.issued[lane])

    def quiet(self) -> None:
        """Wait until this rank reads no other's weights: before a gate, after which they change."""
        alone, self._alone = self._alone, []
        for fence in alone:
            fence.wait()

    # -- between nodes ----------------------------------------------------------------------------
    def exchanged(self, layer: int, updated: Fence) -> Fence:
        """The fence after which this rank's part of the layer is new on its node, its own range
        being so after `updated` ([Note: exchange])."""
        if self._exchanges is None:
            return updated
        state, name = self._host.layers[layer], f"exchange {layer}"
        shards = self._ranks.shards
        (begin, end), _ = shards.exchanged(state.layout)[0]  # the trained part
        received = (end - begin) // shards.num_nodes * (shards.num_nodes - 1)

        def exchange() -> None:
            self._exchange(layer, name, trained_alone=True)
            self._versions[layer, self._ranks.index] += 1

        return self._device.exchange.submit(
            name, exchange, (updated,), nbytes=received * state.weights.element_size()
        )

    def _exchange(self, layer: int, operation: str, *, trained_alone: bool = False) -> None:
        assert self._exchanges is not None
        state = self._host.layers[layer]
        parts = self._ranks.shards.exchanged(state.layout)
        for (first, last), (begin, end) in parts[:1] if trained_alone else parts:
            self._exchanges.gather(
                state.weights[first:last], state.weights[begin:end], f"{operation}: layer {layer}"
            )

    def exchange_all(self, operation: str) -> None:
        """Own ranges have new values: give them to the peers. Every rank calls it."""
        if self._exchanges is None:
            return

        def work() -> None:
            for layer in range(len(self._host.layers)):
                self._exchange(layer, operation)

        self._device.exchange.submit("exchange all", work).wait()

    def copy_first(self, operation: str) -> None:
        """Where the nodes' weights differ, those of the first hold. Every rank calls it, when all
        parts of its node's weights are written."""
        if self._exchanges is not None:
            self._device.exchange.submit(
                "compare nodes", lambda: self._copy_first(operation)
            ).wait()

    def _copy_first(self, operation: str) -> None:
        group = self._exchanges
        assert group is not None
        parts = [
            state.weights[begin:end]
            for state in self._host.layers
            for _, (begin, end) in self._ranks.shards.fetched(state.layout)
        ]
        sums = torch.tensor([_checksum(part) for part in parts])
        rows = group.numbers(sums, operation)
        differ = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
        if differ:
            logger.warning(
                "%s: %d of %d parts of the weights differ between the nodes: those of rank %d hold",
                operation,
                len(differ),
                len(parts),
                self._ranks.members[0],
            )
        for number in differ:
            group.send(parts[number], operation)

    # -- versions ---------------------------------------------------------------------------------
    def publishing(self, layer: int, work: Callable[[], object]) -> Callable[[], None]:
        """`work`, an update of this rank's range of the layer, submitted on every rank. On one node
        its end makes this rank's part new; on several `exchanged` does."""
        self._expected[layer] += 1
        counts = self._exchanges is None

        def run() -> None:
            work()
            if counts:
                self._versions[layer, self._ranks.index] += 1

        return run

    def settle(self, layers: Sequence[int]) -> None:
        """Wait until the layers' weights are as new as every rank's last submitted update."""
        for layer in layers:
            self._wait_for(layer, self._expected[layer])

    def _wait_for(self, layer: int, expected: int) -> None:
        versions = self._versions[layer]
        looked_s = time.monotonic()
        while int(versions.min()) < expected:
            time.sleep(POLL_S)
            if time.monotonic() - looked_s > CHECK_EVERY_S:
                looked_s = time.monotonic()
                self._ranks.watch.check(f"updates of layer {layer}", self._ranks.members)


def _checksum(values: torch.Tensor) -> int:
    data: Any = values.view(torch.uint8).numpy()
    return zlib.crc32(data)
