"""Stores of staged homes: what each can do, and the one without bytes.

A staged home (`plan.homes`) keeps arrays where kernels cannot address them. Its store moves bytes
of one array of one layer between the home and host memory. `memory.tiers` calls the stores,
`memory.nvme` is that of files, and `runtime.stack` has the table of what opens them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Verb = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """`nbytes` of one array of one layer. In a store that lays its extents out they are from
    `begin` on in a linear space."""

    layer: int
    array: str
    nbytes: int
    begin: int = 0

    def __str__(self) -> str:
        return f"{self.array} of layer {self.layer}"


class Transfer(Protocol):
    """A read or a write under way. One thread waits for it."""

    def wait(self) -> None:
        """Block until it has ended. `OSError` names what failed, at every call."""


class Store(Protocol):
    """The arrays of one staged home. Any thread may submit and wait, several at once; callers order
    reads and writes of the same bytes. Counts are of transfers that have ended; `file_bytes` is
    what the store keeps."""

    @property
    def bytes_read(self) -> int: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def file_bytes(self) -> int: ...

    def submit(self, verb: Verb, extent: Extent, begin: int, memory: torch.Tensor) -> Transfer:
        """Begin to read the bytes of `extent` from byte `begin` on into all of `memory`, or to
        write them from there. `memory` is contiguous host memory, which must not change until the
        wait. Its address, its bytes and `begin` are multiples of 4096. What was never written reads
        as zeros."""

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The array as flat bytes of memory that a program may read and write, for weights alone:
        parameters show them at rest. StateError where the store has no such memory."""

    def check(self) -> None:
        """`OSError` where what `mapped` gave cannot be read any more."""

    def close(self) -> None:
        """Finish what was submitted and give the bytes back. Twice is harmless."""


class NullStore:
    """A store of no bytes, for simulations: sizes, on the meta device."""

    bytes_read = bytes_written = 0

    def __init__(self, extents: Sequence[Extent] = ()) -> None:
        self.file_bytes = sum(extent.nbytes for extent in extents)

    def submit(self, verb: Verb, extent: Extent, begin: int, memory: torch.Tensor) -> NullStore:
        return self

    def wait(self) -> None:
        """Every transfer is done at once."""

    def mapped(self, extent: Extent) -> torch.Tensor:
        return torch.empty(extent.nbytes, dtype=torch.uint8, device="meta")

    def check(self) -> None:
        """There is nothing that could be lost."""

    def close(self) -> None:
        """There is nothing to give back."""
