"""Rates of a directory's file system, past the page cache.

Owns one temporary file, which has no name from the moment it is made: it is gone whatever becomes
of the process. The calling thread keeps the queue full; `native_io` does the rest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from stronghold.memory.slab import map_slab
from stronghold.native_io import IoFile, IoQueue

DEPTHS = (1, 4, 16, 32)
BLOCK_BYTES = 1 << 20
LONGEST_S = 1.5  # of one transfer: a slow disk is known to be slow by then


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """In 1e9 bytes/s; by depth for reads and writes alone, at the best depth for both at once.

    `error` says why nothing was measured: then there are no rates. `direct`: transfers went past
    the page cache; without that the rates are the cache's.
    """

    path: str
    engine: str = ""
    note: str = ""
    direct: bool = False
    read_gbps: dict[int, float]
    write_gbps: dict[int, float]
    mixed_gbps: float = 0.0
    error: str = ""

    @property
    def best_depth(self) -> int:
        """The least depth that gives 95 % of the fastest read and write together."""
        total = {depth: self.read_gbps[depth] + self.write_gbps[depth] for depth in self.read_gbps}
        return min(depth for depth, rate in total.items() if rate >= 0.95 * max(total.values()))


def disk_rates(folder: Path, nbytes: int, step: Callable[[str], None]) -> DiskRates:
    """Writes, reads and both, of one file of `nbytes` in `folder`; never raises `OSError`."""
    reads: dict[int, float] = {}
    writes: dict[int, float] = {}
    path = str(folder.resolve())
    try:
        with _nameless_file(folder) as name:
            memory = map_slab(max(DEPTHS) * BLOCK_BYTES, torch.uint8)
            # Random bytes: a disk may hold zeros without writing them.
            memory.view(torch.int64).random_()
            for depth in DEPTHS:
                step(f"file writes and reads, depth {depth}")
                with _queue(depth, memory) as queue, _open(queue, name, nbytes) as file:
                    _transfer(queue, file, memory, depth, "w")  # the first writes allocate blocks
                    writes[depth] = _transfer(queue, file, memory, depth, "w")
                    reads[depth] = _transfer(queue, file, memory, depth, "r")
            rates = DiskRates(path=path, read_gbps=reads, write_gbps=writes)
            depth = rates.best_depth
            step("file writes and reads together")
            depth = max(2, depth)  # one of each
            with _queue(depth, memory) as queue, _open(queue, name, nbytes) as file:
                mixed = _transfer(queue, file, memory, depth, "rw")
                return DiskRates(
                    path=path,
                    engine=queue.engine,
                    note=queue.note,
                    direct=file.direct,
                    read_gbps=reads,
                    write_gbps=writes,
                    mixed_gbps=mixed,
                )
    except OSError as error:
        return DiskRates(path=path, read_gbps={}, write_gbps={}, error=str(error))


@contextmanager
def _nameless_file(folder: Path) -> Iterator[str]:
    """A path that opens a new file which the directory does not list."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".stronghold-doctor-")
    try:
        os.unlink(name)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _queue(depth: int, memory: torch.Tensor) -> IoQueue:
    return IoQueue(depth, BLOCK_BYTES, registered=[(memory.data_ptr(), memory.numel())])


def _open(queue: IoQueue, name: str, nbytes: int) -> IoFile:
    return queue.open(name, nbytes, create=False)


def _transfer(queue: IoQueue, file: IoFile, memory: torch.Tensor, depth: int, kinds: str) -> float:
    """1e9 bytes/s of going through the file once, `depth` blocks in flight.

    With "rw" every other block is read and the others are written. Ends early after LONGEST_S.
    """
    flying: deque[int] = deque()
    moved = 0
    begun = time.perf_counter()
    for index in range(file.size // BLOCK_BYTES):
        if len(flying) == depth:
            queue.wait(flying.popleft())
            if time.perf_counter() - begun > LONGEST_S:
                break
        # A block's memory is free again once the operation `depth` before it has ended.
        address = memory.data_ptr() + index % depth * BLOCK_BYTES
        submit = queue.write if kinds[index % len(kinds)] == "w" else queue.read
        flying.append(submit(file, index * BLOCK_BYTES, address, BLOCK_BYTES))
        moved += BLOCK_BYTES
    while flying:
        queue.wait(flying.popleft())
    return moved / (time.perf_counter() - begun) / 1e9
