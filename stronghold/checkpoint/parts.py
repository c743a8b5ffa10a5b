"""One file of tensors, written by several ranks at once, each its own elements.

Owns the parts that a rank has written and how their checksums become the file's. The file is the
one that a single rank would write, byte for byte: a checkpoint says nothing about ranks. Entered by
the training thread and by the io lane.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stronghold.checkpoint.held import FileRecord
from stronghold.checkpoint.tensorfile import Entry, header_of
from stronghold.errors import CheckpointError

POLYNOMIAL = (
    0xEDB88320  # of CRC-32, bits reflected: https://www.rfc-editor.org/rfc/rfc1952#section-8
)


class Part(NamedTuple):
    """Bytes [begin, begin + num_bytes) of a file, and their CRC-32."""

    begin: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry(Entry):
    """A tensor of which this rank has some elements: `parts()` yields (first byte in the tensor,
    bytes)."""

    parts: Callable[[], Iterator[tuple[int, memoryview]]]


def write_parts(path: Path, entries: Sequence[PartEntry], *, first: bool) -> list[Part]:
    """Write this rank's parts of the file, and its header if this rank is the `first`; durable when
    it returns. Raises OSError where the file system does."""
    header, begins = header_of(entries)
    written: list[Part] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if first:
            written.append(_write(descriptor, 0, memoryview(header)))
        for entry, begin in zip(entries, begins, strict=True):
            for at, data in entry.parts():
                part = _write(descriptor, len(header) + begin + at, data)
                last = written[-1] if written else None
                if last is not None and last.begin + last.num_bytes == part.begin:
                    joined = joined_crc32(last.crc32, part.crc32, part.num_bytes)
                    written[-1] = Part(last.begin, last.num_bytes + part.num_bytes, joined)
                else:
                    written.append(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _write(descriptor: int, begin: int, data: memoryview) -> Part:
    left, at = data, begin
    while left:  # a write may be short
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
    return Part(begin, len(data), zlib.crc32(data))


def record_of(name: str, parts: Sequence[Part]) -> FileRecord:
    """What the file is that consists of `parts`. CheckpointError when they leave a gap."""
    end = crc32 = 0
    for part in sorted(parts):
        if part.begin != end:
            raise CheckpointError(f"{name}: bytes {end} to {part.begin} were written by no rank")
        crc32 = joined_crc32(crc32, part.crc32, part.num_bytes)
        end += part.num_bytes
    return FileRecord(num_bytes=end, crc32=crc32)


def joined_crc32(one: int, two: int, num_bytes: int) -> int:
    """The CRC-32 of bytes with the CRC-32 `one`, followed by `num_bytes` with `two`.

    A checksum is a polynomial modulo P: what follows it multiplies it by x to the number of bits.
    """
    return _product(_power_of_x(8 * num_bytes), one) ^ two


def _product(a: int, b: int) -> int:
    """a b modulo P; bit 31 is the coefficient of x^0."""
    total = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            total ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return total


def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
