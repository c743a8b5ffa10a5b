"""A tag whose files are held open, from before they are verified until the last of them is read.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from stronghold.checkpoint.files import HeldFile, MissingError, TensorFile
from stronghold.checkpoint.format import (
    BUFFERS,
    LOW,
    WEIGHTS,
    Manifest,
    StoredParameter,
    tensor_name,
)
from stronghold.checkpoint.tensor_files import NUM_THREADS, check_file
from stronghold.devices.threads import Workers
from stronghold.errors import CheckpointError
from stronghold.native import Closeable
from stronghold.optim.states import items, join_master

PIECE_NUMEL = 1 << 20  # elements that are converted at once: a multiple of a group
# an attempt takes milliseconds, and fails only if the tag is replaced meanwhile
ATTEMPTS = 100


class Tag(Closeable):
    """Holds every file of the tag `path` open ([Note: one save]).

    manifest  lists the files
    mark      equal on ranks that have opened the same save

    Raises the errors of `Manifest.read`.
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

    def check_header(
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

    def check(
        self,
        parameters: Sequence[StoredParameter],
        arrays: Collection[str] | None,
        others: Iterable[str] = (),
    ) -> None:
        """Raise CheckpointError unless these arrays (None: all) of the parameters, the buffers and
        the files `others` are as they were written. Reads them for their checksums."""
        ends: dict[str, int | None] = dict.fromkeys(others)  # None: the whole file is read
        if self.manifest.buffers:
            ends[BUFFERS] = None
        for name, shape in self.manifest.buffers.items():
            self.check_header(BUFFERS, name, shape, None)
        for saved in parameters:
            for array in saved.arrays:
                if arrays is None or array in arrays:
                    header = saved.header(array, self.manifest.states)
                    self.check_header(saved.file, header.name, header.shape, header.dtype)
                    info = self.tensors(saved.file).info(header.name)
                    end = ends.get(saved.file) or 0
                    ends[saved.file] = max(end, info.begin + info.num_bytes)
        with Workers("load", NUM_THREADS) as threads:
            for name in sorted(ends):
                check_file(self.file(name), self.manifest.files[name], threads, ends[name])

    def read_into(
        self, saved: StoredParameter, array: str, begin: int, target: torch.Tensor
    ) -> None:
        """Fill `target` with a parameter's items of an array from `begin` on."""
        name = tensor_name(array, saved.name)
        self.tensors(saved.file).read_into(name, begin, target)

    def read(self, saved: StoredParameter, array: str, elements: range) -> torch.Tensor:
        """A parameter's items of an array for these elements, flat, in fresh memory."""
        of_array = items(array, elements.start, elements.stop)
        dtype = saved.header(array, self.manifest.states).dtype
        target = torch.empty(of_array.stop - of_array.start, dtype=dtype)
        self.read_into(saved, array, of_array.start, target)
        return target

    def master(self, saved: StoredParameter, elements: range) -> torch.Tensor:
        """A parameter's exact masters, flat, in fp32. Of a frozen one: its values."""
        low = self.read(saved, LOW, elements) if LOW in saved.arrays else None
        return join_master(self.read(saved, WEIGHTS, elements), low)


def pieces(numel: int) -> Iterator[range]:
    """All elements of a parameter, piece by piece."""
    for begin in range(0, numel, PIECE_NUMEL):
        yield range(begin, min(begin + PIECE_NUMEL, numel))
