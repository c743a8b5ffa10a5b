"""Stores of staged homes: their interface, and the store of a plan without files.

A staged home (`plan.homes`) keeps arrays where kernels cannot address them. Its store moves the
bytes of one array of one layer between the home and host memory (swap in, swap out). `memory.tiers`
calls the stores. `memory.nvme` is the store of files. `streaming.stack` has the table of stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from stronghold.errors import StateError

Verb = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The bytes of one array of one layer in a store.

    `begin`: their first byte in the store's linear space, if the store has one.
    """

    layer: int
    array: str
    nbytes: int
    begin: int = 0

    def __str__(self) -> str:
        return f"{self.array} of layer {self.layer}"


class Transfer(Protocol):
    """A read or a write under way. One thread waits for it."""

    def wait(self) -> None:
        """Block until the transfer has ended. Raises `OSError` at every call if it failed."""


class Store(Protocol):
    """The arrays of one staged home.

    Any thread may submit and wait, several at once. Callers order reads and writes of the same
    bytes. `bytes_read` and `bytes_written` count transfers that have ended. `file_bytes`: what the
    store keeps.
    """

    @property
    def bytes_read(self) -> int: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def file_bytes(self) -> int: ...

    def submit(self, verb: Verb, extent: Extent, begin: int, memory: torch.Tensor) -> Transfer:
        """Start to read the bytes of `extent` from byte `begin` on into all of `memory`, or to
        write them from there.

        `memory` is contiguous host memory, and must not change until the wait. Its address, its
        size and `begin` are multiples of 4096 bytes. Bytes that were never written read as zeros.
        """

    def mapped(self, extent: Extent) -> torch.Tensor:
        """Return the array as flat bytes that a program may read and write.

        Weights alone are mapped: at rest parameters are views of them. Raises StateError if the
        store has no such memory.
        """

    def check(self) -> None:
        """Raise `OSError` if the memory of `mapped` cannot be read any more."""

    def close(self) -> None:
        """Finish what was submitted, and free the bytes. Safe to call twice."""


class NullStore:
    """The store of a plan without files. No array has an extent in it."""

    bytes_read = bytes_written = file_bytes = 0

    def submit(self, verb: Verb, extent: Extent, begin: int, memory: torch.Tensor) -> Transfer:
        raise StateError(f"{verb} of {extent}: no array lies in files")

    def mapped(self, extent: Extent) -> torch.Tensor:
        raise StateError(f"mapping of {extent}: no array lies in files")

    def check(self) -> None:
        """Do nothing: no byte can be lost."""

    def close(self) -> None:
        """Do nothing: no byte is kept."""
