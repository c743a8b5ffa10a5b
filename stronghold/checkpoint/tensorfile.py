"""Safetensors files, written and read piece by piece.

Owns the byte layout of one file of tensors (https://github.com/huggingface/safetensors: eight bytes
of header length, a JSON header, raw little-endian data). Written by hand because the library
serialises a whole dict in memory; here no tensor is ever copied, and none is read that was not
asked for. Entered by the training thread and by the io lane, each with its own file.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stronghold.errors import CheckpointError, StateError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Pieces of a file that are written, hashed and converted at once: small against any layer, and the
# bytes are still in the cache when the checksum reads them.
PIECE_BYTES = 4 << 20
LARGEST_HEADER = 100 << 20  # what the safetensors library accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a finished file must be: its size, and CRC-32 of every byte."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor to be written: `pieces()` yields its bytes in order, `num_bytes` of them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """An entry that writes `tensor` (contiguous, on the CPU) from where it lies."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise StateError(f"{name}: expected contiguous CPU memory to write from")

    def pieces() -> Iterator[memoryview]:
        data = raw_bytes(tensor)
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]

    return Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), pieces=pieces)


def staged_entry(
    name: str, tensor: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], None]
) -> Entry:
    """An entry that writes a contiguous `tensor` of any device, a piece at a time: `copy` brings
    each into host memory and returns when it is there.
    """

    def pieces() -> Iterator[memoryview]:
        flat = tensor.detach().reshape(-1)
        room = torch.empty(min(flat.numel(), PIECE_BYTES // flat.itemsize), dtype=flat.dtype)
        for begin in range(0, flat.numel(), max(1, room.numel())):
            source = flat[begin : begin + room.numel()]
            piece = room[: source.numel()]
            copy(piece, source)
            yield raw_bytes(piece)

    return Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), pieces=pieces)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writable, and the tensor's own."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_tensors(path: Path, entries: Sequence[Entry]) -> FileRecord:
    """Write a new file and make it durable. Raises OSError where the file system does."""
    return write_durably(path, _file_pieces(header_of(entries)[0], entries))


def header_of(entries: Sequence[Entry]) -> tuple[bytes, list[int]]:
    """What stands before the data of a file, and where in the data each entry begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{entry.name}: safetensors has no type for {entry.dtype}")
        begin, end = end, end + entry.num_bytes
        begins.append(begin)
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text, begins


def _file_pieces(header: bytes, entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
    yield header
    for entry in entries:
        written = 0
        for piece in entry.pieces():
            written += len(piece)
            yield piece
        if written != entry.num_bytes:
            raise StateError(f"{entry.name}: {written} bytes came, expected {entry.num_bytes}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """The system's error, "No space left on device", with the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `pieces` to a new file, fsync it, and say what it now is."""
    num_bytes = crc32 = 0
    with open(path, "xb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:  # a raw write may be short
                with _named(path):
                    view = view[file.write(view) :]
            crc32 = zlib.crc32(piece, crc32)
            num_bytes += len(piece)
        with _named(path):
            os.fsync(file.fileno())
    return FileRecord(num_bytes=num_bytes, crc32=crc32)


def check_file(path: Path, expected: FileRecord) -> None:
    """CheckpointError unless the file is there with its size and its checksum."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if found != expected.num_bytes:
                raise CheckpointError(f"{path}: {found} bytes, expected {expected.num_bytes}")
            crc32, piece = 0, bytearray(PIECE_BYTES)
            while count := file.readinto(piece):
                crc32 = zlib.crc32(memoryview(piece)[:count], crc32)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing") from error
    if crc32 != expected.crc32:
        raise CheckpointError(
            f"{path}: checksum {crc32:08x}, expected {expected.crc32:08x}: its contents changed "
            "after it was written"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies: `begin` and `num_bytes` count from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class TensorFile:
    """Reads one file. Opens it for each read; holds its header alone.

    CheckpointError when the file is no safetensors file or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, LARGEST_HEADER):
                    raise CheckpointError(f"{path}: cut off, or not a safetensors file")
                header = json.loads(file.read(length))
                tensors = {k: _info(v, 8 + length) for k, v in header.items() if k[:2] != "__"}
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: the file is missing") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: no readable safetensors header: {error}") from error
        self.tensors: dict[str, TensorInfo] = tensors
        for name, info in tensors.items():
            if info.begin + info.num_bytes > size:
                raise CheckpointError(f"{path}: cut off inside {name}")

    def info(self, name: str) -> TensorInfo:
        """CheckpointError for a tensor that the file does not have."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        return self.tensors[name]

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill contiguous CPU memory of the tensor's own type and size."""
        if target.nbytes != self.info(name).num_bytes:
            raise StateError(f"{name}: {self.info(name).shape} does not fit the target")
        self.read_part(name, 0, target)

    def read_part(self, name: str, begin: int, target: torch.Tensor) -> None:
        """Fill contiguous CPU memory of the tensor's own type with its elements from `begin` on."""
        info, at = self.info(name), begin * target.itemsize
        if target.dtype is not info.dtype or at + target.nbytes > info.num_bytes:
            raise StateError(f"{name}: {info.dtype} {info.shape} does not fill the target")
        with open(self.path, "rb", buffering=0) as file:
            file.seek(info.begin + at)
            self._fill(file, raw_bytes(target), name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in fresh memory."""
        info = self.info(name)
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, tensor)
        return tensor

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor over the file's own pages, which a write would copy: for savers that take
        whole state dicts. Its storage is no larger than itself."""
        info = self.info(name)
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        pages = np.memmap(self.path, np.uint8, mode="c", offset=info.begin, shape=(info.num_bytes,))
        return torch.frombuffer(pages.data, dtype=info.dtype).view(info.shape)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, flat, a piece at a time; a piece is overwritten by the
        next."""
        info = self.info(name)
        size = info.dtype.itemsize
        room = torch.empty(PIECE_BYTES // 4, dtype=info.dtype)  # as many elements of every type
        with open(self.path, "rb", buffering=0) as file:
            file.seek(info.begin)
            for begin in range(0, info.num_bytes // size, room.numel()):
                piece = room[: min(room.numel(), info.num_bytes // size - begin)]
                self._fill(file, raw_bytes(piece), name)
                yield piece

    def entry(self, name: str, as_name: str | None = None) -> Entry:
        """An entry that copies the tensor to another file."""
        info = self.info(name)
        return Entry(
            name=as_name or name,
            dtype=info.dtype,
            shape=info.shape,
            pieces=lambda: (raw_bytes(piece) for piece in self.pieces(name)),
        )

    def _fill(self, file: Any, view: memoryview, name: str) -> None:
        while view:
            count = file.readinto(view)
            if not count:
                raise CheckpointError(f"{self.path}: cut off inside {name}")
            view = view[count:]


def _info(described: Any, data_begin: int) -> TensorInfo:
    if described["dtype"] not in DTYPES:
        raise ValueError(f"unknown type {described['dtype']}")
    dtype, shape = DTYPES[described["dtype"]], tuple(int(n) for n in described["shape"])
    begin, end = described["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise ValueError(f"{end - begin} bytes for a shape of {shape}")
    return TensorInfo(dtype=dtype, shape=shape, begin=data_begin + begin, num_bytes=end - begin)
