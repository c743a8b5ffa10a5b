"""Weights on their way in under several ranks: each its own shard, then all from all.

Owns the issue of a fetch and of what follows it on the gather lane, and the counts that say since
when other ranks' parts of the node's weights are new. Entered by the executor alone (and, for
`updated`, by the update lane). Races and what prevents them:
  * a gather fills a slot that compute still reads -> it comes after this rank's own fetch, which
                                                      waits for the slot
  * a rank reads a shard that its owner updates    -> within a pass each rank sends its own, after
                                                      its own update; whoever reads another's part
                                                      of the host's weights waits for `versions`
  * ranks gather different layers                  -> `issued`, which the gate compares

[Note: alone] What only some ranks do (an evaluation, text of different lengths) must not wait for
the others. Such a fetch copies the whole layer from the node's weights over this rank's own link.
The next update of the layer waits for it: it comes after a gate, and `quiet` before the gate.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

from stronghold.device.base import Device, Fence
from stronghold.memory.host import HostStore
from stronghold.memory.shared import NodeWeights
from stronghold.memory.window import Slot
from stronghold.runtime.distributed import Ranks

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
        parts = self._ranks.shards.parts(state.layout)
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

    # -- versions ---------------------------------------------------------------------------------
    def will_update(self, layer: int) -> None:
        """An update of the layer is submitted, on every rank."""
        self._expected[layer] += 1

    def updated(self, layer: int) -> None:
        """This rank's part of the layer is new (called by the update lane)."""
        self._versions[layer, self._ranks.index] += 1

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
                self._ranks.watch.check(f"updates of layer {layer}")
