"""A tag that is open for reading.

Owns the descriptors of a tag's files, from before they are verified until the last of them is read.
It never writes. The training thread alone enters.

[Note: one save] A race between a reader and a saver that replaces the tag, as saves beside training
often do:

1. The reader opens the directory, and through its descriptor the manifest and every file.
2. A saver exchanges the directory with a new one and removes the old one's names.
3. The reader verifies and reads by descriptor. So all its bytes are from the directory of step 1.
4. If step 2 came between two opens of step 1, a file is missing. The reader starts again.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch

from stronghold.checkpoint.files import HeldFile, MissingError, TensorFile
from stronghold.checkpoint.manifest import BUFFERS, WEIGHTS, Manifest, TensorRecord, stored_as
from stronghold.errors import CheckpointError
from stronghold.native import Closeable

# an attempt takes milliseconds, and fails only if the tag is replaced meanwhile
ATTEMPTS = 100


class OpenTag(Closeable):
    """Holds every file of the tag `path` open ([Note: one save]).

    `manifest` lists the files. `mark` is equal on ranks that have opened the same save. Raises the
    errors of `Manifest.read`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, HeldFile] = {}
        self._tensors: dict[str, TensorFile] = {}
        for _ in range(ATTEMPTS):
            if self._open():
                return
            self.close()
            time.sleep(0.01)
        raise CheckpointError(f"{path}: is replaced again and again; nothing of it can be read")

    def close(self) -> None:
        """Close every file."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        self._tensors.clear()

    def _open(self) -> bool:
        """Open all files. False if the tag was replaced before everything was open."""
        try:
            within = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            self.manifest = Manifest.read(self.path, within)
            self.mark = zlib.crc32(self.manifest.model_dump_json().encode())
            for name in self.manifest.files:
                # A file may be missing for another reason. `check` raises if it is needed.
                with contextlib.suppress(MissingError):
                    self._held[name] = HeldFile(self.path / name, within)
            is_complete = len(self._held) == len(self.manifest.files)
            return is_complete or self._is_at_path(within)
        except MissingError:  # the manifest
            if self._is_at_path(within):
                raise
            return False
        except BaseException:
            self.close()
            raise
        finally:
            os.close(within)

    def _is_at_path(self, within: int) -> bool:
        """True if the open directory still has the tag's name."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(within))
        except FileNotFoundError:
            return False

    # -- checks -----------------------------------------------------------------------------------
    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless the files exist, whole and as they were written.

        Reads them for their checksums.
        """
        for name in sorted(names):
            self.file(name).check(self.manifest.files[name])

    def check_headers(self, records: Iterable[TensorRecord], *, state: bool) -> None:
        """Raise CheckpointError unless headers and manifest agree on dtypes and shapes.

        It checks weights and buffers and, with `state`, masters and moments.
        """
        for record in records:
            for array, pieces in record.pieces.items():
                if array != WEIGHTS and not state:
                    continue
                dtype = record.dtype_of(array, self.manifest.states)
                for piece in pieces:
                    stored = stored_as(array, record.name, record.shape, piece.begin, piece.end)
                    self._check_header(piece.file, *stored, dtype)
        for name, shape in self.manifest.buffers.items():
            self._check_header(BUFFERS, name, shape, None)

    def _check_header(
        self, file: str, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> None:
        """Raise CheckpointError unless a tensor has this dtype (None: any) and shape."""
        info = self.tensors(file).info(name)
        expected = dtype or info.dtype
        if info.dtype is not expected or info.shape != shape:
            raise CheckpointError(
                f"{self.path / file}: {name} is {info.dtype} {list(info.shape)}, and the manifest "
                f"has {expected} {list(shape)}"
            )

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file itself was written to since it was opened."""
        for file in self._held.values():
            file.check_unchanged()

    # -- files and arrays -------------------------------------------------------------------------
    def file(self, name: str) -> HeldFile:
        """Return a file. Raises CheckpointError if it is missing or the manifest omits it."""
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.path}: the manifest does not list {name}")
        if name not in self._held:
            raise MissingError(f"{self.path / name}: the file is missing")
        return self._held[name]

    def tensors(self, name: str) -> TensorFile:
        """Return a file of tensors, with its header read."""
        if name not in self._tensors:
            self._tensors[name] = TensorFile(self.file(name))
        return self._tensors[name]

    def read_into(self, record: TensorRecord, array: str, begin: int, target: torch.Tensor) -> None:
        """Fill `target` with the items of a parameter's array from `begin` on.

        `target` is flat and contiguous. The items come from the files of all ranks that wrote them.
        """
        end = begin + target.numel()
        for piece in record.pieces[array]:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                name, _ = stored_as(array, record.name, record.shape, piece.begin, piece.end)
                part = target[first - begin : last - begin]
                self.tensors(piece.file).read_into(name, first - piece.begin, part)

    def read(self, record: TensorRecord, array: str, begin: int, end: int) -> torch.Tensor:
        """Return items [begin, end) of a parameter's array in fresh memory, flat."""
        dtype = record.dtype_of(array, self.manifest.states)
        target = torch.empty(end - begin, dtype=dtype)
        self.read_into(record, array, begin, target)
        return target

    def weights(self, record: TensorRecord) -> torch.Tensor:
        """Return a parameter's weights in its shape.

        They lie over the file's pages if one file has all of them, else in fresh memory.
        """
        if len(record.pieces[WEIGHTS]) == 1:
            file = record.pieces[WEIGHTS][0].file
            return self.tensors(file).mapped(record.name)
        return self.read(record, WEIGHTS, 0, record.numel).view(record.shape)
