"""One file of a checkpoint, written and read piece by piece.

Owns the byte layout of a file of tensors (https://github.com/huggingface/safetensors: eight bytes
of header length, a JSON header, raw little-endian data), and the descriptor of a file from its
verification to its last read: whatever takes its name meanwhile, what is read is what was verified.
Written by hand because the library serialises a whole dict in memory; here no tensor is copied, and
none is read that was not asked for. Entered by the training thread and by the io lane, each with
its own file.

[Note: parts] A file is the same bytes whether one rank writes it or several, each its own elements
at the same time: a checkpoint says nothing about ranks. The parts' checksums make the file's.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import stat
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from stronghold.errors import CheckpointError, StateError

# Pieces that are written, hashed and converted at once: small against any layer, and the bytes are
# still in the cache when the checksum reads them.
PIECE_BYTES = 4 << 20
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
LARGEST_HEADER = 100 << 20  # what the safetensors library accepts
CRC32 = 0xEDB88320  # bits reflected: https://www.rfc-editor.org/rfc/rfc1952#section-8


class MissingError(CheckpointError):
    """There is no file of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a finished file must be: its size, and CRC-32 of every byte."""

    num_bytes: int
    crc32: int


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """The system's error, "No space left on device", with the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


# -- writing --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written: `pieces()` yields (first byte in the tensor, bytes). All of them,
    or those that this rank has ([Note: parts])."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[tuple[int, memoryview]]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writable, and the tensor's own."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def cut(data: memoryview, begin: int = 0) -> Iterator[tuple[int, memoryview]]:
    """`data`, which begins at byte `begin` of its tensor, in pieces."""
    for at in range(0, len(data), PIECE_BYTES):
        yield begin + at, data[at : at + PIECE_BYTES]


def in_order(pieces: Iterator[torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
    """Flat tensors that follow each other in one tensor."""
    at = 0
    for piece in pieces:
        data = raw_bytes(piece)
        yield at, data
        at += len(data)


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """An entry that writes `tensor` (contiguous, on the CPU) from where it lies."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise StateError(f"{name}: expected contiguous CPU memory to write from")
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: cut(raw_bytes(tensor)))


class Part(NamedTuple):
    """Bytes [begin, begin + num_bytes) of a file, and their CRC-32."""

    begin: int
    num_bytes: int
    crc32: int


def write_durably(path: Path, data: bytes) -> FileRecord:
    """Write a new file and make it durable. Raises OSError, with the file's name."""
    with _new_file(path, os.O_EXCL) as write:
        write(0, memoryview(data))
    return FileRecord(num_bytes=len(data), crc32=zlib.crc32(data))


def write_tensors(path: Path, entries: Sequence[Entry]) -> FileRecord:
    """The same with whole tensors."""
    return record_of(path.name, write_parts(path, entries, first=True))


def write_parts(path: Path, entries: Sequence[Entry], *, first: bool) -> list[Part]:
    """Write this rank's parts of the file, and its header if this rank is the `first`; durable when
    it returns. Raises OSError, with the file's name."""
    header, begins = _header(entries)
    parts: list[Part] = []
    with _new_file(path) as write:

        def put(begin: int, data: memoryview) -> None:
            write(begin, data)
            if parts and sum(parts[-1][:2]) == begin:
                last = parts.pop()
                crc32 = zlib.crc32(data, last.crc32)
                parts.append(Part(last.begin, last.num_bytes + len(data), crc32))
            else:
                parts.append(Part(begin, len(data), zlib.crc32(data)))

        if first:
            put(0, memoryview(header))
        for entry, begin in zip(entries, begins, strict=True):
            for at, data in entry.pieces():
                put(len(header) + begin + at, data)
    end = len(header) + sum(entry.num_bytes for entry in entries)
    return [*parts, Part(end, 0, 0)]  # the last: that nothing is missing before the end


@contextmanager
def _new_file(path: Path, flags: int = 0) -> Iterator[Callable[[int, memoryview], None]]:
    """Writes at a position; what was written is durable when the block has ended."""

    def write(at: int, data: memoryview) -> None:
        with _named(path):
            while data:  # a write may be short
                count = os.pwrite(descriptor, data, at)
                data, at = data[count:], at + count

    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        yield write
        with _named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(entries: Sequence[Entry]) -> tuple[bytes, list[int]]:
    """What stands before the data of a file, and where in the data each entry begins."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    begins, end = [], 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{entry.name}: safetensors has no type for {entry.dtype}")
        if entry.name == METADATA:
            raise CheckpointError(
                f"{entry.name}: safetensors keeps this name for itself; rename the tensor"
            )
        begins.append(end)
        end += entry.num_bytes
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text, begins


def record_of(name: str, parts: Sequence[Part]) -> FileRecord:
    """What the file is that consists of `parts`. CheckpointError when they leave a gap."""
    end = crc32 = 0
    for part in sorted(parts):
        if part.begin != end:
            raise CheckpointError(f"{name}: bytes {end} to {part.begin} were written by no rank")
        # A checksum is a polynomial modulo CRC32: what follows multiplies it by x to its bits.
        crc32 = _product(_power_of_x(8 * part.num_bytes), crc32) ^ part.crc32
        end += part.num_bytes
    return FileRecord(num_bytes=end, crc32=crc32)


def _product(a: int, b: int) -> int:
    """a b modulo CRC32; bit 31 is the coefficient of x^0."""
    total = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            total ^= b
        b = b >> 1 ^ (CRC32 if b & 1 else 0)
    return total


def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result


# -- reading --------------------------------------------------------------------------------------
class HeldFile:
    """Reads the file that `path` named when it was opened, or `path.name` in the directory whose
    descriptor is `within`. CheckpointError when it is no regular file: a pipe would never end."""

    def __init__(self, path: Path, within: int | None = None) -> None:
        self.path = path
        try:
            self._descriptor = _open(path if within is None else Path(path.name), within)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingError(f"{path}: the file is missing") from error
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path}: cannot be read: it is no regular file")
        self.num_bytes = status.st_size
        self._opened = status.st_size, status.st_mtime_ns

    def close(self) -> None:
        """Let go of the file; nothing can be read any more."""
        self._descriptor = -1
        self._close()

    def check(self, expected: FileRecord) -> None:
        """CheckpointError unless size and checksum are what they must be."""
        if self.num_bytes != expected.num_bytes:
            raise CheckpointError(
                f"{self.path}: {self.num_bytes} bytes, expected {expected.num_bytes}"
            )
        crc32, room = 0, memoryview(bytearray(PIECE_BYTES))
        for at in range(0, self.num_bytes, PIECE_BYTES):
            piece = room[: self.num_bytes - at]
            self.read_into(piece, at, "the file")
            crc32 = zlib.crc32(piece, crc32)
        if crc32 != expected.crc32:
            raise CheckpointError(
                f"{self.path}: checksum {crc32:08x}, expected {expected.crc32:08x}: its contents "
                "changed after it was written"
            )

    def check_unchanged(self) -> None:
        """CheckpointError when somebody has written into this very file since it was opened."""
        status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != self._opened:
            raise CheckpointError(
                f"{self.path}: was written to while it was read; what was read of it may be of two "
                "states. Load it again when nobody writes there"
            )

    def read_into(self, view: memoryview, at: int, what: str) -> None:
        """Fill `view` with the bytes from `at` on. `what` is named when they are not all there."""
        while view:
            with _named(self.path):
                count = os.preadv(self._descriptor, [view], at)
            if not count:
                raise CheckpointError(f"{self.path}: cut off inside {what}")
            view, at = view[count:], at + count

    def read(self, largest: int) -> bytes:
        """All of it. CheckpointError for a file of more than `largest` bytes."""
        if self.num_bytes > largest:
            raise CheckpointError(
                f"{self.path}: {self.num_bytes} bytes, expected at most {largest}"
            )
        data = bytearray(self.num_bytes)
        self.read_into(memoryview(data), 0, "the file")
        return bytes(data)

    def reader(self) -> BinaryIO:
        """A stream over it, from its beginning."""
        stream = os.fdopen(os.dup(self._descriptor), "rb")
        stream.seek(0)
        return stream


def _open(path: Path, within: int | None) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # or a pipe without a writer would hang
    try:
        return os.open(path, flags, dir_fd=within)
    except OSError as error:
        # A load holds three files of every layer, and 1024 descriptors are the usual soft limit.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return os.open(path, flags, dir_fd=within)


class TensorInfo(NamedTuple):
    """Where one tensor lies: `begin` and `num_bytes` count from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class TensorFile:
    """Reads one file of tensors, which it holds open; of its contents it holds the header alone.
    CheckpointError when the file is no safetensors file or is cut off."""

    def __init__(self, file: HeldFile | Path) -> None:
        self._file = file if isinstance(file, HeldFile) else HeldFile(file)
        self.path, size = self._file.path, self._file.num_bytes
        begin = bytearray(min(size, 8))
        self._file.read_into(memoryview(begin), 0, "the header")
        length = int.from_bytes(begin, "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise CheckpointError(f"{self.path}: cut off, or not a safetensors file")
        text = bytearray(length)
        self._file.read_into(memoryview(text), 8, "the header")
        try:
            header = json.loads(text)
            tensors = {k: _info(v, 8 + length) for k, v in header.items() if k != METADATA}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path}: no readable safetensors header: {error!r}"
            ) from error
        self.tensors: dict[str, TensorInfo] = tensors
        self._pages: Any = None  # of the whole file, once something is mapped
        for name, info in tensors.items():
            if info.begin + info.num_bytes > size:
                raise CheckpointError(f"{self.path}: cut off inside {name}")

    def info(self, name: str) -> TensorInfo:
        """CheckpointError for a tensor that the file does not have."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        return self.tensors[name]

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a contiguous tensor of as many elements, of any type and on any device."""
        info, flat, begin = self.info(name), target.view(-1), 0
        if flat.numel() * info.dtype.itemsize != info.num_bytes:
            raise StateError(f"{name}: {info.shape} does not fit the target")
        if target.dtype is info.dtype and target.device.type == "cpu":
            self.read_part(name, 0, target)
            return
        for piece in self.pieces(name):
            flat[begin : begin + piece.numel()].copy_(piece)  # waits: it is filled again
            begin += piece.numel()

    def read_part(self, name: str, begin: int, target: torch.Tensor) -> None:
        """Fill contiguous CPU memory of the tensor's own type with its elements from `begin` on."""
        info, at = self.info(name), begin * target.itemsize
        if target.dtype is not info.dtype or at + target.nbytes > info.num_bytes:
            raise StateError(f"{name}: {info.dtype} {info.shape} does not fill the target")
        self._file.read_into(raw_bytes(target), info.begin + at, name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in fresh memory."""
        tensor = torch.empty(self.info(name).shape, dtype=self.info(name).dtype)
        self.read_into(name, tensor)
        return tensor

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor over the file's own pages, which a write would copy: for savers that take
        whole state dicts. Its storage is no larger than itself."""
        info = self.info(name)
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        if self._pages is None:
            with self._file.reader() as stream:
                self._pages = np.memmap(stream, np.uint8, mode="c")
        pages = self._pages[info.begin : info.begin + info.num_bytes]
        return torch.frombuffer(pages.data, dtype=info.dtype).view(info.shape)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, flat, a piece at a time; a piece is overwritten by the
        next."""
        info = self.info(name)
        size = info.dtype.itemsize
        room = torch.empty(PIECE_BYTES // 4, dtype=info.dtype)  # as many elements of every type
        for begin in range(0, info.num_bytes // size, room.numel()):
            piece = room[: min(room.numel(), info.num_bytes // size - begin)]
            self._file.read_into(raw_bytes(piece), info.begin + begin * size, name)
            yield piece

    def entry(self, name: str) -> Entry:
        """An entry that copies the tensor to another file."""
        info = self.info(name)
        return Entry(name, info.dtype, info.shape, lambda: in_order(self.pieces(name)))


def _info(described: Any, data_begin: int) -> TensorInfo:
    """ValueError, KeyError or TypeError for what no writer would write."""
    if described["dtype"] not in DTYPES:
        raise ValueError(f"unknown type {described['dtype']!r}")
    dtype, shape = DTYPES[described["dtype"]], tuple(described["shape"])
    begin, end = described["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape} in bytes {begin} to {end}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for a shape of {shape}")
    return TensorInfo(dtype, shape, data_begin + begin, end - begin)
