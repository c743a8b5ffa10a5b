"""A file that is held open from its verification to its last read.

Owns the descriptor: whatever takes the file's name meanwhile, what is read is what was verified.
Only regular files are opened, since a pipe would keep its reader for ever. Knows no formats. The
training thread alone enters.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stronghold.errors import CheckpointError

# Pieces of a file that are written, hashed and converted at once: small against any layer, and the
# bytes are still in the cache when the checksum reads them.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a finished file must be: its size, and CRC-32 of every byte."""

    num_bytes: int
    crc32: int


class HeldFile:
    """Reads the file that `path` named when it was opened, or `path.name` in the directory whose
    descriptor is `within`. CheckpointError when there is none, or it is no regular file.
    """

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
            try:
                count = os.preadv(self._descriptor, [view], at)
            except OSError as error:  # with the file's name, which the system does not know
                raise OSError(error.errno, error.strerror, str(self.path)) from error
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


class MissingError(CheckpointError):
    """There is no file of that name."""


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
