"""Files of a checkpoint: small files, and tensors that are read (`tensor_files` writes them).

Owns how one file is held open and read. It never reads a manifest, and knows no tag. The training
thread and the io lane enter, each with its own files.

The safetensors library reads and checks the headers. Elements are read here, into memory that
exists. The library's slices follow the dimensions of a tensor, and come from a mapping: there a
disk's error ends the process by SIGBUS.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from stronghold.errors import CheckpointError, StateError

# Pieces that are written, hashed and converted at once. They are small against any layer, and their
# bytes are still in the cache when the checksum reads them.
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
        """Fill `target` with the elements of a tensor from `begin` on.

        `target` is contiguous, of any dtype and on any device. Another dtype or device than the
        file's and the CPU is filled piece by piece. Waits for the disk and for the copies. Raises
        StateError if the tensor has too few elements.
        """
        info = self.info(name)
        flat = target.view(-1)
        if begin + flat.numel() > info.numel:
            raise StateError(f"{name}: {info.shape} does not fill the target from {begin} on")
        is_direct = target.dtype is info.dtype and target.device.type == "cpu"
        size = flat.numel() if is_direct else PIECE_BYTES // 4
        buffer = flat if is_direct else torch.empty(min(size, flat.numel()), dtype=info.dtype)
        for first in range(0, flat.numel(), max(size, 1)):
            piece = buffer[: flat.numel() - first]
            position = info.begin + (begin + first) * info.dtype.itemsize
            self._file.read_into(raw_bytes(piece), position, name)
            if not is_direct:
                # waits: `buffer` is used again
                flat[first : first + piece.numel()].copy_(piece)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in fresh memory."""
        info = self.info(name)
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, 0, tensor)
        return tensor
