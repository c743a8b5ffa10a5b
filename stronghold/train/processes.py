"""The processes that train one model: who they are, on which node, and with which cores.

A node is what can share memory. Two containers on one host are two nodes, and two launches in one
process namespace are one. The environment variable STRONGHOLD_NODE overrides that: ranks with the
same value are a node.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from stronghold.errors import ConfigError, RankError

Result = TypeVar("Result")

NODE_VARIABLE = "STRONGHOLD_NODE"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RankGroup:
    """The ranks that train one model, seen from one of them. Here: one alone, whose collectives
    return their input. `train.ranks` has several.

    rank, num_ranks  this process, and how many train the model
    node, node_name  its node's number, and a name for people
    index, count     its place on its node, and how many the node has
    cores            of this process alone. Empty if it shares all of them
    device_bytes     that connections take of the device
    sent_bytes       bytes that this process has given to collectives, by their kind

    Every process of every node makes the same calls, on its training thread.
    """

    rank, num_ranks = 0, 1
    node, index, count = 0, 0, 1
    node_name = ""
    cores: tuple[int, ...] = ()
    device_bytes = 0
    sent_bytes: Mapping[str, int] = {}

    def __str__(self) -> str:
        where = f"node {self.node} of {self.num_nodes}, {len(self.cores) or 'shared'} cores"
        return f"rank {self.rank} of {self.num_ranks}, {where}"

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.count

    def of_node(self, value: Result) -> list[Result]:
        """Return the values of this node's processes, in their order (all-gather)."""
        return [value]

    def of_all(
        self, value: Result, operation: str = "set-up", *, beside: bool = False
    ) -> list[Result]:
        """Return the values of all processes of all nodes, in their order (all-gather).

        beside  beside training: the io lane may enter, and the training thread while it is idle
        """
        return [value]

    def barrier(self) -> None:
        """Return when every process of every node has called it."""

    def fail(self, reason: str) -> None:
        """This process cannot go on: no other one waits for it any more."""

    def close(self) -> None:
        """Leave the other processes."""


ALONE = RankGroup()


# -- places ----------------------------------------------------------------------------------------
def this_node() -> tuple[object, ...]:
    """Return what identifies this node: machine, boot and process namespace, or the value of
    STRONGHOLD_NODE. The first element is for people."""
    if named := os.environ.get(NODE_VARIABLE):
        return (named,)
    return socket.gethostname(), _boot_id(), _pid_namespace()


def _boot_id() -> str:
    """Name of this boot of this machine; "" if the system does not give one."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def _pid_namespace() -> int:
    """Number of this process's PID name space; 0 if the system does not give one.

    Two name spaces that live on one boot have different numbers.
    """
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def mesh_of(node_of: Sequence[object]) -> torch.Tensor:
    """Return the ranks by node, as a mesh: (nodes, ranks of a node).

    Nodes are in the order of their first ranks. `node_of[rank]`: the rank's `this_node`. Raises
    ConfigError if some nodes have more ranks than others.
    """
    nodes: dict[object, list[int]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(rank)
    sizes = [len(ranks) for ranks in nodes.values()]
    if len(set(sizes)) > 1:
        names = [node[0] if isinstance(node, tuple) else node for node in nodes]
        counts = ", ".join(f"{size} on {name}" for size, name in zip(sizes, names, strict=True))
        raise ConfigError(
            f"the {len(node_of)} data-parallel ranks are divided unequally over {len(sizes)} nodes "
            f"({counts}): start as many on each"
        )
    return torch.tensor(list(nodes.values()))


def share_of_cores(allowed: Sequence[object], index: int) -> tuple[int, ...]:
    """Return the cores of the node's rank `index`. `allowed[k]`: cores that rank k may use.

    They are the rank's cores if the launcher has bound ranks apart, else an equal part of the
    common ones. Cores that are next in number are near in memory: Linux numbers a NUMA node's cores
    one after the other, hyper-threads later.
    """
    sets = [set(cores) for cores in allowed if isinstance(cores, list)]
    usable = sets[index]
    sharing = [i for i, other in enumerate(sets) if other & usable]
    if len(sharing) == 1:
        return tuple(sorted(usable))
    cores = sorted(usable)
    position, count = sharing.index(index), len(sharing)
    begin, end = position * len(cores) // count, (position + 1) * len(cores) // count
    return tuple(cores[begin:end]) or (cores[position % len(cores)],)


# -- who they are ----------------------------------------------------------------------------------
def local_rank_of(args: Any) -> int:
    """This process's number on its node: a launcher's argument, or its environment."""
    named = getattr(args, "local_rank", None)  # -1 where no launcher gave the argument
    given = os.environ.get("LOCAL_RANK", 0) if named is None or int(named) < 0 else named
    return int(given)


def world_size() -> int:
    """How many processes the launcher started, or the process group has."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def check_initialized() -> None:
    """Raise ConfigError without a process group of torch's."""
    if not distributed.is_initialized():
        raise ConfigError(
            f"WORLD_SIZE: got {world_size()}, but torch.distributed is not initialised: leave "
            "dist_init_required out, or call deepspeed.init_distributed() first"
        )


@contextlib.contextmanager
def joining(operation: str) -> Iterator[None]:
    """Context manager for the first collectives of torch. Their errors become RankError."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"{operation}: not all ranks have come, or one has gone: {error}. Its own output has "
            "the cause. Start all ranks again; stronghold.rank_timeout_s is how long they are "
            "waited for"
        ) from error
