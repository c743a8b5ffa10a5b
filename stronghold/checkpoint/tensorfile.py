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

from stronghold.checkpoint.held import PIECE_BYTES, FileRecord, HeldFile
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
METADATA = "__metadata__"  # the format's one key that is no tensor
LARGEST_HEADER = 100 << 20  # what the safetensors library accepts


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
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    begins, end = [], 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{entry.name}: safetensors has no type for {entry.dtype}")
        if entry.name == METADATA:
            raise CheckpointError(
                f"{entry.name}: safetensors keeps this name for itself; rename the tensor"
            )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies: `begin` and `num_bytes` count from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class TensorFile:
    """Reads one file, which it holds open; of its contents it holds the header alone.

    CheckpointError when the file is no safetensors file or is cut off.
    """

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
        """Fill contiguous CPU memory of the tensor's own type and size."""
        if target.nbytes != self.info(name).num_bytes:
            raise StateError(f"{name}: {self.info(name).shape} does not fit the target")
        self.read_part(name, 0, target)

    def read_part(self, name: str, begin: int, target: torch.Tensor) -> None:
        """Fill contiguous CPU memory of the tensor's own type with its elements from `begin` on."""
        info, at = self.info(name), begin * target.itemsize
        if target.dtype is not info.dtype or at + target.nbytes > info.num_bytes:
            raise StateError(f"{name}: {info.dtype} {info.shape} does not fill the target")
        self._file.read_into(raw_bytes(target), info.begin + at, name)

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

    def entry(self, name: str, as_name: str | None = None) -> Entry:
        """An entry that copies the tensor to another file."""
        info = self.info(name)
        return Entry(
            name=as_name or name,
            dtype=info.dtype,
            shape=info.shape,
            pieces=lambda: (raw_bytes(piece) for piece in self.pieces(name)),
        )


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
    return TensorInfo(dtype=dtype, shape=shape, begin=data_begin + begin, num_bytes=end - begin)
