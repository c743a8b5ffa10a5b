"""The node's weights under several ranks: once for all of them, in memory that they share.

Owns that memory, and the versions that say since when another rank's part of it is new: the one
thing that no record of this process can tell, since another process writes there. Counts are
written by the update lane and by the exchange lane.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stronghold.device.simulated import meta_slab
from stronghold.memory.slab import NodeMemory
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.team.group import Ranks

POLL_S = 1e-4
CHECK_EVERY_S = 1.0


class NodeWeights:
    """Every layer's weights: all ranks of the node see them whole, each writes its own part, and on
    several nodes what its peers there have written of theirs. The ranks make it together.

    `fills`: whether this process writes the model's values there. `versions[layer, index]` counts
    the updates of the part of the layer that process `index` of the node fetches: whoever reads the
    part of another waits for them.
    """

    def __init__(self, layout: ModelLayout, dtype: torch.dtype, ranks: Ranks) -> None:
        self.ranks = ranks
        self._layers, self._dtype = layout.layers, dtype
        self._expected = [0] * len(layout.layers)  # updates of each layer that were submitted
        self.fills = ranks.index == 0
        counts = len(layout.layers) * ranks.on_node.count
        end = -(-counts * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begins = []
        for layer in layout.layers:
            self._begins.append(end)
            end += layer.numel * dtype.itemsize
        self._make(max(end, 1), counts)

    def _make(self, nbytes: int, counts: int) -> None:
        neighbours = self.ranks.on_node
        self._memory = NodeMemory("weights", nbytes, neighbours)
        versions = self._memory.part(0, counts, torch.int64).view(-1, neighbours.count)
        self._versions: Any = versions.numpy()
        for layer in self._layers:  # a page lies near the process that touches it first
            for _, (begin, end) in self.ranks.shards.fetched(layer):
                self.room(layer.index)[begin:end].zero_()
        neighbours.barrier()  # before the values of all ranks are written by one

    def room(self, index: int) -> torch.Tensor:
        """The layer's whole weight array."""
        return self._memory.part(self._begins[index], self._layers[index].numel, self._dtype)

    def close(self) -> None:
        """The model is given back: what each process does to it from now on is its own affair."""
        self._memory.make_private()
        self._memory.close()

    # -- versions ---------------------------------------------------------------------------------
    def expect(self, layer: int) -> None:
        """An update of the layer is submitted, on every rank."""
        self._expected[layer] += 1

    def publish(self, layer: int) -> None:
        """This rank's part of the layer is new."""
        self._versions[layer, self.ranks.index] += 1

    def waiting(self, layer: int) -> Callable[[], None]:
        """What waits until the layer is as new as every rank's last submitted update."""
        expected, versions, ranks = self._expected[layer], self._versions[layer], self.ranks

        def wait() -> None:
            looked_s = time.monotonic()
            while int(versions.min()) < expected:
                time.sleep(POLL_S)
                if ranks.watch is not None and time.monotonic() - looked_s > CHECK_EVERY_S:
                    looked_s = time.monotonic()
                    ranks.watch.check(f"updates of layer {layer}", ranks.members)

        return wait


class SimulatedWeights(NodeWeights):
    """The node's weights without bytes; of the others' parts nothing is awaited."""

    def _make(self, nbytes: int, counts: int) -> None:
        self._versions = np.zeros((len(self._layers), 1), dtype=np.int64)

    def room(self, index: int) -> torch.Tensor:
        layer: LayerLayout = self._layers[index]
        return meta_slab(layer.numel, self._dtype)

    def close(self) -> None:
        """There are no bytes."""
