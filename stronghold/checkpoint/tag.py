"""A tag of version 2 that is open for reading."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from stronghold.checkpoint.held_tag import HeldTag
from stronghold.checkpoint.manifest import BUFFERS, WEIGHTS, Manifest, TensorRecord, stored_as


class OpenTag(HeldTag[Manifest]):
    """Holds every file of the tag `path` open. Raises the errors of `Manifest.read`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Manifest.read)

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
                    self.check_header(piece.file, *stored, dtype)
        for name, shape in self.manifest.buffers.items():
            self.check_header(BUFFERS, name, shape, None)

    # -- arrays -----------------------------------------------------------------------------------
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
