"""File ranges: which bytes of a layer's weights lie in a file that nothing writes.

A prepared base has the frozen stored tensors of each block (`checkpoint.base`). `checkpoint` makes
the ranges, and `memory.frozen_files` reads them. Pure data: this file opens and reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenFile:
    """A file that every run reads and no run writes.

    path        its name, for people
    opened      a path of this very file, as long as its owner holds it open
    num_bytes   its size
    """

    path: str
    opened: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Bytes [begin, end) of a layer's array of weights: one range of frozen stored tensors.

    file        the file that has them
    offset      of byte `begin` in the file
    num_stored  bytes that are read from the file, from `begin` on. The others are padding, and zero

    All numbers are multiples of 4096.
    """

    file: FrozenFile
    offset: int
    begin: int
    end: int
    num_stored: int
