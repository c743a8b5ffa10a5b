"""A tag whose files are held open, from before they are verified until the last of them is read.

[Note: one save] A race between a reader and a saver that replaces the tag, as saves beside training
often do:

1. The reader opens the directory, and through its descriptor the manifest and every file.
2. A saver exchanges the directory with a new one and removes the old one's names.
3. The reader verifies and reads by descriptor. So all its bytes are from the directory of step 1.
4. If step 2 came between two opens of step 1, a file is missing, and the load is refused.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from stronghold.checkpoint.files import NUM_THREADS, HeldFile, TensorFile, check_file
from stronghold.checkpoint.format import (
    BUFFERS,
    LOW,
    WEIGHTS,
    Manifest,
    StoredParameter,
    tensor_name,
)
from stronghold.devices.threads import Workers
from stronghold.native import Closeable
from stronghold.optim.states import items, join_master

PIECE_NUMEL = 1 << 20  # elements that are converted at once: a multiple of a group


class Tag(Closeable):
    """Holds every file of the tag `path` open ([Note: one save]).

    manifest  lists the files
    mark      equal on ranks that have opened the same save

    Raises MissingError without a file, and the errors of `Manifest.read`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, HeldFile] = {}
        self._tensors: dict[str, TensorFile] = {}
        within = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.manifest = Manifest.read(path, within)
            self.mark = zlib.crc32(self.manifest.model_dump_json().encode())
            for name in self.manifest.files:
                self._held[name] = HeldFile(path / name, within)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(within)

    def close(self) -> None:
        """Close every file."""
        while self._held:
            self._held.popitem()[1].close()

    def file(self, name: str) -> HeldFile:
        """Return a file that the manifest lists."""
        return self._held[name]

    def tensors(self, name: str) -> TensorFile:
        """Return a file of tensors, with its header read."""
        if name not in self._tensors:
            self._tensors[name] = TensorFile(self.file(name))
        return self._tensors[name]

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
        for saved in parameters:
            for array in saved.arrays:
                if arrays is None or array in arrays:
                    info = self.tensors(saved.file).info(tensor_name(array, saved.name))
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
