"""Which ranks are on which node, and what those of one node divide among them.

Owns the arithmetic of places. Never talks to other ranks: who asks has exchanged what is needed.
Pure but for `this_node`, which reads the machine.

A node is what can share memory. Processes do when they see each other's files in /proc, so two
containers on one host are two nodes, and two launches in one process namespace are one. The
environment variable STRONGHOLD_NODE overrides that: ranks with the same value are a node.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from stronghold.errors import ConfigError
from stronghold.process import boot_id, pid_namespace

NODE_VARIABLE = "STRONGHOLD_NODE"


def this_node() -> tuple[object, ...]:
    """What processes that can share memory have in common, its first word for people: machine,
    boot and process namespace, or what the environment says."""
    if named := os.environ.get(NODE_VARIABLE):
        return (named,)
    return socket.gethostname(), boot_id(), pid_namespace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The places of the ranks of one group, which are numbered from 0 in its order.

    `nodes[k]` are the ranks of node k, in order; nodes are numbered as their first ranks are. All
    have as many: the j-th ranks of all nodes are peers.
    """

    nodes: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def place(self, rank: int) -> tuple[int, int]:
        """The rank's node and its index there."""
        return next((k, of.index(rank)) for k, of in enumerate(self.nodes) if rank in of)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks of the same index, by node."""
        index = self.place(rank)[1]
        return tuple(of[index] for of in self.nodes)

    def range_of(self, rank: int) -> int:
        """Which range of every layer is the rank's ([Note: nodes] of `model.shards`)."""
        node, index = self.place(rank)
        return index * self.num_nodes + node

    @property
    def by_range(self) -> tuple[int, ...]:
        """The ranks in the order of their ranges."""
        return tuple(rank for of_index in zip(*self.nodes, strict=True) for rank in of_index)


def nodes_of(found: Sequence[object]) -> Nodes:
    """The places of ranks, `found[i]` being what `this_node` says at rank i. ConfigError when some
    nodes have more ranks than others."""
    groups: dict[object, list[int]] = {}
    for rank, node in enumerate(found):
        groups.setdefault(node, []).append(rank)
    sizes = [len(of) for of in groups.values()]
    if len(set(sizes)) > 1:
        names = [node[0] if isinstance(node, tuple) else node for node in groups]
        counts = ", ".join(f"{size} on {name}" for size, name in zip(sizes, names, strict=True))
        raise ConfigError(
            f"the {len(found)} data-parallel ranks are divided unequally over {len(sizes)} nodes "
            f"({counts}): start as many on each"
        )
    return Nodes(nodes=tuple(map(tuple, groups.values())))


def share_of_cores(allowed: Sequence[object], index: int) -> tuple[int, ...]:
    """The cores of the node's rank `index` of those that each of its ranks may use: all of its own
    where the launcher has bound them apart, else an equal part of the common ones. Neighbours in
    number are neighbours in memory: Linux numbers the cores of a NUMA node one after the other,
    hyper-threads later.
    """
    sets = [set(cores) for cores in allowed if isinstance(cores, list)]
    mine = sets[index]
    sharing = [i for i, other in enumerate(sets) if other & mine]
    if len(sharing) == 1:
        return tuple(sorted(mine))
    cores = sorted(mine)
    place, count = sharing.index(index), len(sharing)
    begin, end = place * len(cores) // count, (place + 1) * len(cores) // count
    return tuple(cores[begin:end]) or (cores[place % len(cores)],)
