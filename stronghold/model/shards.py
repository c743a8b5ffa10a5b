"""Shards: which elements of every layer's arrays are one rank's own.

Pure arithmetic on a layout whose parts the number of ranks divides; any thread.

[Note: two ranges] A layer's trainable and frozen parts are each cut into equal contiguous ranges,
one per rank in order. So moments and gradients, which cover the trainable part alone, are cut like
the weights above them, every range is made of whole pages, and an all-gather of each part lands
where the layer's slot has it.

[Note: nodes] Of M nodes each holds every layer's weights. The ranges are given out so that those of
one local index are neighbours: number j M + k belongs to the j-th rank of node k. What such a rank
updates and what its peers on the other nodes send it is then one contiguous part of the node's
weights, and exactly what it fetches for its GPU: nobody fetches what another process writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stronghold.model.layout import LayerLayout

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Range `rank` of `num_ranks`, of which each of `num_nodes` has as many ([Note: nodes])."""

    num_ranks: int = 1
    rank: int = 0
    num_nodes: int = 1

    def trained(self, layer: LayerLayout) -> Range:
        """Elements whose moments and gradients are this rank's."""
        return self._of(0, layer.trainable_numel)

    def weights(self, layer: LayerLayout) -> tuple[Range, ...]:
        """Elements whose weights are this rank's: at most two ranges, none of them empty."""
        parts = (0, layer.trainable_numel), (layer.trainable_numel, layer.numel)
        return tuple(self._of(begin, end) for begin, end in parts if end > begin)

    def within(self, layer: LayerLayout, begin: int, end: int) -> Iterator[Range]:
        """The elements of [begin, end) whose weights are this rank's."""
        for low, high in self.weights(layer):
            if max(begin, low) < min(end, high):
                yield max(begin, low), min(end, high)

    def fetched(self, layer: LayerLayout) -> tuple[tuple[Range, Range], ...]:
        """(a part of the layer, what this rank fetches of it), for each part that is not empty: its
        own range and those of its peers on other nodes."""
        node = Shards(num_ranks=self.num_ranks // self.num_nodes, rank=self.rank // self.num_nodes)
        parts = (0, layer.trainable_numel), (layer.trainable_numel, layer.numel)
        return tuple((part, node._of(*part)) for part in parts if part[1] > part[0])

    def exchanged(self, layer: LayerLayout) -> tuple[tuple[Range, Range], ...]:
        """(what this rank and its peers have of a part, this rank's own range of that)."""
        blocks = [block for _, block in self.fetched(layer)]
        return tuple(zip(blocks, self.weights(layer), strict=True))

    def _of(self, begin: int, end: int) -> Range:
        share = (end - begin) // self.num_ranks
        return begin + self.rank * share, begin + (self.rank + 1) * share
