"""NUMA: the memory and the cores that lie next to a device.

A machine with several processors has several memory nodes. A GPU reads the memory of its own node
faster than that of another. This file reads the topology from sysfs, and moves threads. It never
moves memory: Linux puts a page on the node of the core that touches it first, or on another node if
that one is full. So threads that run next to the device touch the pages. Any thread may enter.

On a machine with one node nothing is read or moved beyond that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger("stronghold")

ROOT = Path("/")
_NODES = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNode:
    """One NUMA node: its number, its cores, and the bytes of its memory."""

    number: int
    cores: frozenset[int]
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """The node next to a device, if the machine has others.

    node       its number
    num_nodes  number of nodes with cores that this process may use
    cores      the node's cores that this process may use, in order
    """

    node: int
    num_nodes: int
    cores: tuple[int, ...]

    def __str__(self) -> str:
        return f"NUMA node {self.node} of {self.num_nodes} ({len(self.cores)} cores)"


# -- the topology ----------------------------------------------------------------------------------
def memory_nodes() -> tuple[MemoryNode, ...]:
    """The nodes that have memory, by number. Empty if the system does not describe them."""
    nodes = []
    for folder in (ROOT / _NODES).glob("node[0-9]*"):
        match = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
        if match is not None and int(match[1]):
            nodes.append(
                MemoryNode(
                    number=int(folder.name.removeprefix("node")),
                    cores=frozenset(parse_list(_text(folder / "cpulist"))),
                    memory_bytes=int(match[1]) << 10,
                )
            )
    return tuple(sorted(nodes, key=lambda node: node.number))


def node_of_pci(address: str) -> int | None:
    """The node of a PCI device ("0000:c1:00.0"). None if the system does not know it.

    "" is the address of no device.
    """
    if not address:
        return None
    text = _text(ROOT / _PCI / address.lower() / "numa_node")
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def parse_list(text: str) -> list[int]:
    """The numbers of a list as the kernel writes it: "0-2,8" is 0, 1, 2, 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def neighbourhood_of(node: int | None) -> Neighbourhood | None:
    """The cores next to a device on `node`, among those that this process may use.

    None if nothing has to be moved: the node is unknown, or the process has cores of one node
    alone. Warns if it has none of the device's node.
    """
    allowed = os.sched_getaffinity(0)
    usable = {each.number: each.cores & allowed for each in memory_nodes() if each.cores & allowed}
    if node is None or len(usable) < 2:
        if node is not None and usable and node not in usable:
            logger.warning(
                "numa: the device is at NUMA node %d, and this process may run on the cores of "
                "node %s alone: copies cross from one processor to the other. Start it on the "
                "cores of node %d (numactl --cpunodebind=%d)",
                node,
                ", ".join(map(str, usable)),
                node,
                node,
            )
        return None
    if node not in usable:
        return None
    return Neighbourhood(node=node, num_nodes=len(usable), cores=tuple(sorted(usable[node])))


# -- threads ---------------------------------------------------------------------------------------
def run_on(cores: Collection[int]) -> None:
    """Let the calling thread, and threads that it starts, run on these cores alone. Does nothing
    for no cores."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def running_on(cores: Collection[int]) -> Iterator[None]:
    """Context manager: the calling thread, and threads that it starts, run on these cores. Does
    nothing for no cores."""
    before = os.sched_getaffinity(0)
    run_on(cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)


@contextlib.contextmanager
def placing_on(cores: Collection[int]) -> Iterator[None]:
    """Context manager: pages that torch touches first in it lie next to these cores.

    Torch's own threads were started before, and run anywhere. So the calling thread works alone.
    Does nothing for no cores.
    """
    num_threads = torch.get_num_threads()
    with running_on(cores):
        if cores:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if cores:
                torch.set_num_threads(num_threads)
