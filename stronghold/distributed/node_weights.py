"""The weights that the ranks of a node share.

Owns one memory file per node. Every rank maps it whole and writes its own part. Entered by the
training thread and the lanes.

[Note: versions]
1. A rank reads whole layers for itself (an evaluation, a state dict) without a collective.
2. Another rank's update of its part may still run then. The records of this process do not show it.
3. So each rank counts the updates of its part, in the shared memory, after the part is written.
4. A reader waits until every count is the number of updates that were submitted so far, which all
   ranks submit alike.
"""

from __future__ import annotations

import mmap
import time
from typing import Any

import torch

from stronghold.distributed.process_groups import Ranks
from stronghold.errors import RankError
from stronghold.memory.slab import NodeMemory
from stronghold.model.arrays import weight_map
from stronghold.model.layout import ModelLayout
from stronghold.optim.states import Formats

POLL_S = 1e-4
LOOK_EVERY_S = 1.0  # for ranks that have gone


class NodeWeights:
    """Every layer's weights. All ranks of the node see them whole. Each writes its own part, and on
    several nodes what its peers have written of theirs. The ranks make the memory together; the
    rank with `fills` writes the model's values. `versions[layer, index]` counts updates of the part
    that process `index` of the node fetches ([Note: versions])."""

    def __init__(self, layout: ModelLayout, formats: Formats, ranks: Ranks) -> None:
        self.ranks = ranks
        self._layers = layout.layers
        self._maps = [weight_map(layer, formats) for layer in layout.layers]
        # updates of each layer that were submitted
        self._expected = [0] * len(layout.layers)
        self.fills = ranks.on_node.index == 0
        counts = len(layout.layers) * ranks.on_node.count
        end = -(-counts * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begins = []
        for of_layer in self._maps:
            self._begins.append(end)
            end += of_layer.nbytes
        neighbours = ranks.on_node
        self._memory = NodeMemory("weights", max(end, 1), neighbours)
        versions = self._memory.part(0, counts, torch.int64).view(-1, neighbours.count)
        self._versions: Any = versions.numpy()
        for layer in self._layers:  # a page lies near the process that touches it first
            for _, block in self.ranks.shards.fetched(layer):
                self.room(layer.index)[self._maps[layer.index].bytes_of(*block)].zero_()
        neighbours.barrier()  # before the values of all ranks are written by one

    def room(self, index: int) -> torch.Tensor:
        """The layer's whole weight array, as bytes."""
        return self._memory.part(self._begins[index], self._maps[index].nbytes, torch.uint8)

    def close(self) -> None:
        """The model is given back: from now on each process writes pages of its own."""
        self._memory.make_private()
        self._memory.close()

    # -- versions ---------------------------------------------------------------------------------
    def expect(self, layer: int) -> None:
        """An update of the layer is submitted, on every rank."""
        self._expected[layer] += 1

    def publish(self, layer: int) -> None:
        """This rank's part of the layer is new."""
        self._versions[layer, self.ranks.on_node.index] += 1

    def submitted(self, layer: int) -> int:
        """How many updates of the layer were submitted so far."""
        return self._expected[layer]

    def wait(self, layer: int, count: int) -> None:
        """Return when every rank has written `count` updates of its part ([Note: versions]).
        RankError when a rank has gone, or takes longer than the time-out of collectives."""
        ranks, versions, operation = (
            self.ranks,
            self._versions[layer],
            f"updates of layer {layer}",
        )
        begun_s = looked_s = time.monotonic()
        while int(versions.min()) < count:
            time.sleep(POLL_S)
            now_s = time.monotonic()
            if now_s - looked_s < LOOK_EVERY_S:
                continue
            looked_s = now_s
            ranks.check(operation)
            if now_s - begun_s > ranks.timeout.total_seconds():
                late = [r for r, n in zip(ranks.gather.members, versions, strict=True) if n < count]
                raise RankError(f"{operation}: ranks {late} have not written them in time")


def shared_weights(layout: ModelLayout, formats: Formats, ranks: Ranks) -> NodeWeights | None:
    """The node's weights; None where a process trains alone."""
    return NodeWeights(layout, formats, ranks) if ranks.several else None
