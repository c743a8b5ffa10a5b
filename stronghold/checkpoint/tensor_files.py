"""Files of tensors (safetensors): written by threads past the page cache, and verified by threads.

[Note: blocks]
1. The caller's thread copies the bytes of a file to aligned blocks, which threads write (O_DIRECT).
   So a save needs a few blocks of RAM, and no pages of the cache.
2. A file system without O_DIRECT gets the same writes through the page cache.
3. The last block is written to the end of its page, and the file is cut to its size.
4. Each block has a checksum, so that threads verify a file, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stronghold.checkpoint.files import METADATA, NAMES, HeldFile
from stronghold.errors import CheckpointError
from stronghold.optim.states import PAGE_BYTES
from stronghold.train.slabs import map_slab

# The size of a block is a part of the format. These reach the rate of `dd oflag=direct conv=fsync`.
# Blocks of 8 MiB reach 0.83 of it, and one thread through the page cache 0.27.
NUM_THREADS, BLOCK_BYTES = 4, 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size of a finished file, and the CRC-32 of each of its blocks."""

    num_bytes: int
    crc32: tuple[int, ...]


class TensorHeader(NamedTuple):
    """Name, dtype and shape of a tensor, as its file has them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Sequence[TensorHeader], data: Iterable[Tensor], threads: Executor
) -> FileRecord:
    """Write a new safetensors file, and fsync it. Waits for the disk.

    `data`: the bytes of all tensors in order, as flat uint8 on the host, cut anywhere. A piece has
    been copied when the next is asked for.

    Raises OSError with the file's name, and CheckpointError for a dtype or a name that no file can
    have.
    """
    header = _header(tensors)
    num_bytes = len(header) + sum(tensor.num_bytes for tensor in tensors)

    def contents() -> Iterable[Tensor]:
        yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
        yield from data

    return _write(path, contents(), num_bytes, threads)


def _header(tensors: Sequence[TensorHeader]) -> bytes:
    """Length and header of a file: https://github.com/huggingface/safetensors#format"""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{tensor.name}: safetensors has no type for {tensor.dtype}")
        if tensor.name == METADATA:
            raise CheckpointError(
                f"{tensor.name}: safetensors keeps this name for itself; rename the tensor"
            )
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, contents: Iterable[Tensor], num_bytes: int, threads: Executor) -> FileRecord:
    """Write a new file ([Note: blocks]). An existing file is an OSError."""
    ring = [map_slab(BLOCK_BYTES, torch.uint8) for _ in range(NUM_THREADS + 1)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    checksums: list[Future[int]] = []
    filled = 0

    def write_block() -> None:
        block, begin = ring[len(checksums) % len(ring)], len(checksums) * BLOCK_BYTES
        work = partial(_write_block, descriptor, block.numpy().data, begin, filled)
        checksums.append(threads.submit(work))

    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        for piece in contents:
            copied = 0
            while copied < piece.numel():
                number = len(checksums)
                if not filled and number >= len(ring):
                    checksums[number - len(ring)].result()  # the block is free
                count = min(piece.numel() - copied, BLOCK_BYTES - filled)
                target = ring[number % len(ring)][filled : filled + count]
                target.copy_(piece[copied : copied + count])
                filled, copied = filled + count, copied + count
                if filled == BLOCK_BYTES:
                    write_block()
                    filled = 0
        if filled:
            write_block()
        crc32 = tuple(checksum.result() for checksum in checksums)
        os.ftruncate(descriptor, num_bytes)
        os.fsync(descriptor)
    except OSError as error:  # "No space left on device", with the file's name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        for checksum in checksums:  # none uses the descriptor any more
            checksum.exception()
        os.close(descriptor)
    return FileRecord(num_bytes=num_bytes, crc32=crc32)


def _write_block(descriptor: int, block: memoryview, begin: int, num_bytes: int) -> int:
    """Work of a thread: write a block to the end of its page. Returns its checksum."""
    end = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    written = 0
    while written < end:  # a write may be short
        written += os.pwrite(descriptor, block[written:end], begin + written)
    return zlib.crc32(block[:num_bytes])


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat uint8, in the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def small_record(content: bytes) -> FileRecord:
    """The record of a file with this content."""
    begins = range(0, len(content), BLOCK_BYTES)
    crc32 = tuple(zlib.crc32(content[begin : begin + BLOCK_BYTES]) for begin in begins)
    return FileRecord(num_bytes=len(content), crc32=crc32)


def check_file(
    file: HeldFile, expected: FileRecord, threads: Executor, end: int | None = None
) -> None:
    """Raise CheckpointError unless size and checksums are the expected ones. Reads the blocks
    before the byte `end`; None: all of them."""
    if file.num_bytes != expected.num_bytes:
        raise CheckpointError(f"{file.path}: {file.num_bytes} bytes, expected {expected.num_bytes}")
    begins = range(0, file.num_bytes, BLOCK_BYTES)
    if len(begins) != len(expected.crc32):
        raise CheckpointError(
            f"{file.path}: {len(expected.crc32)} checksums, expected {len(begins)}"
        )
    begins = begins[: -(-end // BLOCK_BYTES)] if end is not None else begins
    found_by_block = threads.map(partial(_checksum, file), begins)
    for begin, found, written in zip(begins, found_by_block, expected.crc32, strict=False):
        if found != written:
            raise CheckpointError(
                f"{file.path}: checksum {found:08x} from byte {begin} on, expected {written:08x}: "
                "its contents changed after it was written"
            )


def _checksum(file: HeldFile, begin: int) -> int:
    """Work of a thread: the checksum of a block."""
    block = memoryview(bytearray(min(BLOCK_BYTES, file.num_bytes - begin)))
    file.read_into(block, begin, "the file")
    return zlib.crc32(block)
