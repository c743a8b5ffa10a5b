"""Files of a checkpoint: small files, and files of tensors (safetensors), which threads write past
the page cache and verify.

Owns how one file is held open and read. It never reads a manifest, and knows no tag. The training
thread and the io lane enter, each with its own files.

The safetensors library reads and checks the headers. Elements are read here, into memory that
exists. The library's slices follow the dimensions of a tensor, and come from a mapping: there a
disk's error ends the process by SIGBUS.

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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stronghold.errors import CheckpointError
from stronghold.optim.states import PAGE_BYTES
from stronghold.train.slabs import map_slab

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"  # the format's one key that is no tensor


class MissingError(CheckpointError):
    """Raised when a file of a checkpoint does not exist."""


# -- writing --------------------------------------------------------------------------------------
def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor. It is writable, and shared with the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file, and fsync it. Waits for the disk.

    Raises OSError, with the file's name, also if the file exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        unwritten = memoryview(data)
        with _named(path):
            while unwritten:  # a write may be short
                unwritten = unwritten[os.write(descriptor, unwritten) :]
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context manager that adds the file's name to an OSError ("No space left on device")."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


# -- reading --------------------------------------------------------------------------------------
class HeldFile:
    """Holds one file open, from its verification to its last read.

    Another file may take its name meanwhile. All reads are of the file that was opened. `within` is
    the descriptor of its directory, or None to open `path`. Raises MissingError without the file,
    and CheckpointError if it cannot be opened.
    """

    def __init__(self, path: Path, within: int | None = None) -> None:
        self.path = path
        name = path if within is None else path.name
        try:
            self._descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=within)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingError(f"{path}: the file is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self.num_bytes = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file. Nothing can be read any more. Call it once."""
        os.close(self._descriptor)

    @property
    def system_path(self) -> str:
        """A path of this very file, even if another file has its name now."""
        return f"/proc/self/fd/{self._descriptor}"

    def read_into(self, view: memoryview, begin: int, content: str) -> None:
        """Fill `view` with the bytes from `begin` on.

        Raises CheckpointError, with the name `content`, if the file ends before.
        """
        while view:
            with _named(self.path):
                count = os.preadv(self._descriptor, [view], begin)
            if not count:
                raise CheckpointError(f"{self.path}: cut off inside {content}")
            view, begin = view[count:], begin + count

    def read(self) -> bytes:
        """Return all bytes."""
        data = bytearray(self.num_bytes)
        self.read_into(memoryview(data), 0, "the file")
        return bytes(data)


class TensorInfo(NamedTuple):
    """Dtype and shape of one tensor, and the byte of the file at which it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorFile:
    """Reads tensors of one safetensors file, which it holds open.

    It keeps the header in memory, and nothing else of the contents. Raises CheckpointError if the
    file is damaged or is no safetensors file.
    """

    def __init__(self, file: HeldFile) -> None:
        self._file, self.path = file, file.path
        self.tensors: dict[str, TensorInfo] = {}
        length = bytearray(8)
        with self._opened() as opened:
            self._file.read_into(memoryview(length), 0, "the header")
            begin = 8 + int.from_bytes(length, "little")
            # the library has checked that they leave no gap
            for name in opened.offset_keys():
                stored = opened.get_slice(name)
                dtype, shape = DTYPES[stored.get_dtype()], tuple(stored.get_shape())
                self.tensors[name] = TensorInfo(dtype, shape, begin)
                begin += self.tensors[name].num_bytes

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """Context manager for the file as the library opens it."""
        try:
            with safe_open(self._file.system_path, "pt") as opened:
                yield opened
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: cut off, or not a safetensors file: {error}"
            ) from error

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and place of a tensor. Raises CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        return self.tensors[name]

    def read_into(self, name: str, begin: int, target: torch.Tensor) -> None:
        """Fill `target` with the tensor's elements from `begin` on. It is contiguous CPU memory in
        the tensor's dtype. Waits for the disk."""
        info = self.info(name)
        position = info.begin + begin * info.dtype.itemsize
        self._file.read_into(raw_bytes(target), position, name)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in fresh memory."""
        info = self.info(name)
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, 0, tensor)
        return tensor


# -- files of tensors: written and verified -------------------------------------------------------
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
