"""Pretended NUMA topologies: directories that look like sysfs, and the cores of threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

GPU = "0000:c1:00.0"
CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="a node needs a core of its own")


def topology(
    folder: Path, nodes: Mapping[int, str], gpu_node: int = -1, address: str = GPU
) -> Path:
    """Files as the kernel shows them: a node's cores by its number, and the GPU's node."""
    for number, cores in nodes.items():
        node = folder / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
        (node / "meminfo").write_text(f"Node {number} MemTotal:       65536 kB\n")
    gpu = folder / "sys/bus/pci/devices" / address
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{gpu_node}\n")
    return folder


def affinities(prefix: str) -> dict[str, list[int]]:
    """The cores of this process's Python threads whose names begin like this."""
    return {
        thread.name: sorted(os.sched_getaffinity(thread.native_id))
        for thread in threading.enumerate()
        if thread.name.startswith(prefix) and thread.native_id is not None
    }
