"""Ranks of a simulation: one stands for all, and the others send nothing.

Owns what takes the place of process groups and of the node's memory while `simulate` drives the
real parts of `runtime.ranks` on clocks: bytes and order are those of a run, values are not. The
calling thread alone enters.
"""

from __future__ import annotations

import numpy as np
import torch

from stronghold.device.simulated import meta_slab
from stronghold.memory.shared import NodeWeights
from stronghold.model.layout import ModelLayout
from stronghold.model.shards import Shards
from stronghold.runtime.distributed import Ranks
from stronghold.runtime.ranks.group import Group


class SilentGroup(Group):
    """Everybody says what this rank says, at once."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.rank = 0
        self.received_bytes = self.far_bytes = self._num_far = 0

    def gather(self, whole: torch.Tensor, own: torch.Tensor, operation: str) -> None:
        """The lane's clock moved."""
        self._count(whole)

    def mean(self, whole: torch.Tensor, room: torch.Tensor | None, operation: str) -> None:
        """The lane's clock moved."""
        self._count(whole)

    def numbers(self, mine: torch.Tensor, operation: str) -> torch.Tensor:
        return mine.expand(self.num_ranks, mine.numel())


class SimulatedRanks(Ranks):
    """The first of `num_ranks`, on `num_nodes`."""

    def __init__(self, num_ranks: int, num_nodes: int = 1) -> None:
        self.shards = Shards(num_ranks=num_ranks, num_nodes=num_nodes)
        self.control = self.reduce = self.flags = self.files = SilentGroup(num_ranks)
        self.gather = SilentGroup(num_ranks // num_nodes)
        self.exchange = SilentGroup(num_nodes)
        self.num_nodes = num_nodes
        self.norms = None
        self.counts_duplicates = True
        self.members = list(range(num_ranks))
        self.index = 0


class SimulatedWeights(NodeWeights):
    """The node's weights without bytes; of the others' parts nothing is awaited."""

    def __init__(self, layout: ModelLayout, dtype: torch.dtype) -> None:
        self._layers = layout.layers
        self._dtype = dtype
        self.fills = False
        self.versions = np.zeros((len(layout.layers), 1), dtype=np.int64)

    def room(self, index: int) -> torch.Tensor:
        return meta_slab(self._layers[index].numel, self._dtype)

    def give_back(self) -> None:
        """There are no bytes."""
