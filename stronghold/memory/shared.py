"""Memory that the processes of one node have in common: a file of memory without a name.

Owns the file's descriptor and its mapping. Never knows what lies in it. The kernel frees it with
the last process that has it open or mapped, however that ends: nothing is left behind, and the
size of /dev/shm does not matter. The training thread makes and closes it; whoever writes where is
the caller's order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

import torch

from stronghold.errors import ConfigError
from stronghold.memory.slab import map_shared
from stronghold.model.layout import ModelLayout
from stronghold.model.shards import Shards

_MAP_FIXED = 0x10


class Exchange(Protocol):
    """What this room needs of the ranks; those of all nodes call its methods together."""

    def of_node(self, mine: object) -> list[object]:
        """The objects of this node's ranks, in the order of their indices on it."""
        ...

    def of_all(self, mine: object) -> list[object]:
        """The objects of all nodes' ranks."""
        ...

    def barrier(self) -> None: ...


class NodeMemory:
    """`nbytes` of zeros, which the first process of the node makes and the others open.

    ConfigError where a process cannot open another's memory: in containers of their own.
    """

    def __init__(self, name: str, nbytes: int, index: int, exchange: Exchange) -> None:
        self._descriptor = -1
        path = ""
        if index == 0:
            self._descriptor = os.memfd_create(f"stronghold {name}")
            os.ftruncate(self._descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        path = str(exchange.of_node(path)[0])
        problem = ""
        if index:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        problems = [problem for problem in exchange.of_all(problem) if problem]
        if problems:
            raise ConfigError(
                f"the ranks of a node cannot share memory ({problems[0]}): start them as one user, "
                "in one container, or give ranks that cannot share it different values of the "
                "environment variable STRONGHOLD_NODE: they are nodes of their own then"
            )
        self.bytes = map_shared(self._descriptor, nbytes)

    def part(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements from byte `begin` on."""
        return self.bytes[begin : begin + numel * dtype.itemsize].view(dtype)

    def make_private(self) -> None:
        """From now on writes stay in this process: pages are copied when they are written."""
        remap = ctypes.CDLL(None, use_errno=True).mmap
        remap.restype = ctypes.c_void_p
        remap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address, nbytes = self.bytes.data_ptr(), self.bytes.numel()
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if remap(address, nbytes, protection, flags, self._descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), "the node's weights cannot be made this process's")

    def close(self) -> None:
        """Close the file; tensors over it keep the mapping. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class NodeWeights:
    """Every layer's weights, once per node: all its ranks see them whole, each writes its own part,
    and on several nodes what its peers there have written of theirs.

    `versions[layer, index]` counts the updates of the part of the layer that process `index` of the
    node fetches: whoever reads the part of another waits for them. `fills`: whether this process
    writes the model's values into the node's memory.
    """

    def __init__(
        self,
        layout: ModelLayout,
        dtype: torch.dtype,
        shards: Shards,
        *,
        index: int,
        num_local: int,
        exchange: Exchange,
    ) -> None:
        self._layers = layout.layers
        self._dtype = dtype
        self._exchange = exchange
        self.fills = index == 0
        counts = len(layout.layers) * num_local
        header = -(-counts * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begins = []
        end = header
        for layer in layout.layers:
            self._begins.append(end)
            end += layer.numel * dtype.itemsize
        self._memory = NodeMemory("weights", max(end, 1), index, exchange)
        self.versions = self._memory.part(0, counts, torch.int64).view(-1, num_local).numpy()
        for layer in layout.layers:  # a page lies near the process that touches it first
            for _, (begin, end) in shards.fetched(layer):
                self.room(layer.index)[begin:end].zero_()
        exchange.barrier()  # before the values of all ranks are written by one

    def room(self, index: int) -> torch.Tensor:
        """The layer's whole weight array."""
        return self._memory.part(self._begins[index], self._layers[index].numel, self._dtype)

    def give_back(self) -> None:
        """The model is given back: what each process does to it from now on is its own affair."""
        self._memory.make_private()
        self._memory.close()
