"""A fourth home: arrays that lie compressed in host memory. One value, and one class."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stronghold.errors import StateError
from stronghold.memory.stores import Extent, Verb
from stronghold.plan.homes import Home
from tests.support.pages import PAGE

COMPRESSED = Home("compressed", is_staged=True)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Nothing is read or written before the wait: so late is allowed."""

    work: Callable[[], None]

    def wait(self) -> None:
        self.work()


class CompressedStore:
    """Pages by layer, array and first byte, each compressed by itself. It is slow."""

    def __init__(self, _engine: object, extents: Sequence[Extent], _ring: object) -> None:
        self._nbytes = {(extent.layer, extent.array): extent.nbytes for extent in extents}
        self.pages: dict[tuple[int, str, int], bytes] = {}
        self._lock = threading.Lock()
        self.bytes_read = self.bytes_written = 0
        self.file_bytes = sum(self._nbytes.values())

    def submit(self, verb: Verb, extent: Extent, begin: int, memory: torch.Tensor) -> Transfer:
        stop, whole = begin + memory.nbytes, self._nbytes[extent.layer, extent.array]
        if begin % PAGE or memory.nbytes % PAGE or not 0 <= begin <= stop <= whole:
            raise StateError(f"{verb} of {extent}: got bytes {begin} to {stop} of {whole}")
        data = memory.view(torch.uint8).numpy().data
        return Transfer(partial(self.read if verb == "read" else self.write, extent, begin, data))

    def read(self, extent: Extent, begin: int, data: memoryview) -> None:
        for at in range(0, len(data), PAGE):
            packed = self.pages.get((extent.layer, extent.array, begin + at))
            data[at : at + PAGE] = bytes(PAGE) if packed is None else zlib.decompress(packed)
        with self._lock:
            self.bytes_read += len(data)

    def write(self, extent: Extent, begin: int, data: memoryview) -> None:
        for at in range(0, len(data), PAGE):
            packed = zlib.compress(data[at : at + PAGE])
            self.pages[extent.layer, extent.array, begin + at] = packed
        with self._lock:
            self.bytes_written += len(data)

    def mapped(self, extent: Extent) -> torch.Tensor:
        raise StateError(f"{extent}: no program can address compressed bytes")

    def check(self) -> None:
        """Memory is not lost."""

    def close(self) -> None:
        self.pages.clear()
