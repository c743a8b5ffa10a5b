"""One tag, open for reading.

Owns its files from before they are verified until the last of them is read. A tag may be replaced
meanwhile, and often is while training goes on: its directory and its files are opened once and read
by descriptor, so that all that is read is of one save. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch

from stronghold.checkpoint.held import HeldFile, MissingError
from stronghold.checkpoint.manifest import LARGEST, MANIFEST, Manifest, Slices, TensorRecord
from stronghold.checkpoint.tensorfile import TensorFile
from stronghold.errors import CheckpointError
from stronghold.memory.tiers import LOW_DTYPE

ATTEMPTS = 100  # each fails only when the tag was replaced within the milliseconds of one


class OpenTag:
    """`manifest`, and every file that it lists, of the directory `path`: as `Manifest.read`.

    `mark` is the same on ranks that have opened the same save.
    """

    def __init__(self, path: Path, slices: Slices | None = None) -> None:
        self.path = path
        self._held: dict[str, HeldFile] = {}
        self._tensors: dict[str, TensorFile] = {}
        for _ in range(ATTEMPTS):
            if self._open(slices or Slices()):
                return
            self.close()
            time.sleep(0.01)
        raise CheckpointError(f"{path}: is replaced again and again; nothing of it can be read")

    def __enter__(self) -> OpenTag:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of every file."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        self._tensors.clear()

    def _open(self, slices: Slices) -> bool:
        """False when the tag was replaced before everything was open."""
        try:
            within = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            self.manifest = Manifest.read(self.path, slices, within)
            first = HeldFile(self.path / Slices(size=slices.size).name(MANIFEST), within)
            self.mark = zlib.crc32(first.read(LARGEST))
            first.close()
            for name in self.manifest.files:
                # One that nobody has removed with its tag may not be needed: `check` will say.
                with contextlib.suppress(MissingError):
                    self._held[name] = HeldFile(self.path / name, within)
            complete = len(self._held) == len(self.manifest.files)
            return complete or self._is_at_path(within)
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
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(within))
        except FileNotFoundError:
            return False

    # -- verification ---------------------------------------------------------------------------
    def check(self, names: Iterable[str]) -> None:
        """CheckpointError unless the files are there, whole and as they were written."""
        for name in sorted(names):
            self.file(name).check(self.manifest.files[name])

    def check_tensor(self, record: TensorRecord, *, state: bool) -> None:
        """CheckpointError unless the headers say of a parameter's weights, and of its masters and
        moments with `state`, what the manifest says."""
        self._check_header(record.weights, record.name, record.dtype, record.shape)
        low_dtype = LOW_DTYPE[record.dtype]
        if state and record.low is not None and low_dtype is not None:
            self._check_header(record.low, record.name, low_dtype, record.shape)
        if state and record.moments is not None:
            for moment in ("exp_avg", "exp_avg_sq"):
                name = f"{moment}.{record.name}"
                self._check_header(record.moments, name, torch.float32, record.shape)

    def check_buffers(self, file: str) -> None:
        """The same of the buffers, whose type the manifest does not say."""
        for name, shape in self.manifest.buffers.items():
            self._check_header(file, name, self.tensors(file).info(name).dtype, shape)

    def _check_header(
        self, file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        info = self.tensors(file).info(name)
        if info.dtype is not dtype or info.shape != shape:
            raise CheckpointError(
                f"{self.path / file}: {name} is {info.dtype} {list(info.shape)}, and the manifest "
                f"says {dtype} {list(shape)}"
            )

    def check_unchanged(self) -> None:
        """CheckpointError when somebody has written into the files themselves since."""
        for file in self._held.values():
            file.check_unchanged()

    # -- reading --------------------------------------------------------------------------------
    def file(self, name: str) -> HeldFile:
        """CheckpointError when the manifest does not list it, or it is not there."""
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.path}: the manifest does not list {name}")
        if name not in self._held:
            raise MissingError(f"{self.path / name}: the file is missing")
        return self._held[name]

    def tensors(self, name: str) -> TensorFile:
        """The file as one of tensors."""
        if name not in self._tensors:
            self._tensors[name] = TensorFile(self.file(name))
        return self._tensors[name]
