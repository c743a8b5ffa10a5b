"""Saving by several ranks: all write at once, each its own elements of the same files.

Owns what the ranks say to each other during a save. The first makes the hidden directory, which all
must see, and publishes it; of the ranks that share a model's state the first writes what is small,
so under model parallelism the first for each slice. A failure on any rank is raised on all, and
leaves no trace. As for `save`, the training thread collects, and the jobs run on it or on the io
lane; both talk over the group of files, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stronghold.checkpoint import directory
from stronghold.checkpoint.held import PIECE_BYTES
from stronghold.checkpoint.parts import Part, PartEntry, record_of, write_parts
from stronghold.checkpoint.save import Contents, Save
from stronghold.checkpoint.shared_folder import check_seen
from stronghold.checkpoint.tensorfile import Entry, raw_bytes
from stronghold.errors import CheckpointError
from stronghold.memory.tiers import array_dtypes
from stronghold.model.layout import ParameterSlice
from stronghold.runtime.distributed import Ranks
from stronghold.runtime.optimizer import EngineOptimizer
from stronghold.runtime.stack import Stack

Result = TypeVar("Result")


class SharedSave(Save):
    """`Save` of one of several ranks."""

    def __init__(
        self,
        stack: Stack,
        optimizer: EngineOptimizer | None,
        save_dir: Path,
        tag: str,
        contents: Contents,
        *,
        latest: bool,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._first = ranks.files.rank == 0  # of all that write into this tag
        self._parts: dict[str, list[Part]] = {}
        super().__init__(stack, optimizer, save_dir, tag, contents, latest=latest)

    def _begin(self) -> Path:
        existed = self._save_dir.exists()
        hidden = together(
            self._ranks, lambda: super(SharedSave, self)._begin().name if self._first else ""
        )
        path = self._save_dir / hidden[0]
        try:
            check_seen(self._ranks, path)
        except CheckpointError:
            if self._first:
                directory.remove(path)
                if not existed:
                    path.parent.rmdir()
            raise
        return path

    def now(self) -> None:
        for layer in self.order:
            self._stack.runtime.ledger.stored(layer).wait()
            self._write_guarded(layer)
        self._publish_or_raise()

    def _entry(self, index: int, array: str, name: str, part: ParameterSlice) -> Entry:
        host = self._stack.host
        dtype = array_dtypes(host.dtype)[array]

        def parts() -> Iterator[tuple[int, memoryview]]:
            begin, end = part.offset, part.offset + part.numel
            for first, _, found in host.pieces(index, (array,), begin, end):
                data = raw_bytes(found[array])
                for at in range(0, len(data), PIECE_BYTES):
                    yield (first - begin) * dtype.itemsize + at, data[at : at + PIECE_BYTES]

        return PartEntry(name=name, dtype=dtype, shape=part.shape, pieces=_none, parts=parts)

    def _write(self, name: str, entries: Sequence[Entry]) -> None:
        own = [entry for entry in entries if isinstance(entry, PartEntry)]
        if len(own) < len(entries):  # buffers, which every rank has: the first writes its own
            super()._write(name, entries)
            return
        path, first = self._hidden / name, self._ranks.rank == 0
        self._parts[name] = write_parts(path, own, first=first)

    def _publish_or_raise(self) -> None:
        """Every rank has written, or failed: the first publishes."""
        try:
            ranks = self._ranks
            written = dict(zip(ranks.company, together(ranks, self._written), strict=True))
            of_members = [written[member] for member in ranks.members]
            together(ranks, lambda: self._join(of_members) if ranks.rank == 0 else None)
            together(ranks, lambda: self._publish() if self._first else None)
        except BaseException:
            if self._first:
                directory.remove(self._hidden)
            raise

    def _written(self) -> dict[str, list[Part]]:
        self._check_written()
        return self._parts

    def _join(self, of_members: list[dict[str, list[Part]]]) -> None:
        for name in self._parts:
            self._files[name] = record_of(name, [p for parts in of_members for p in parts[name]])
        self._describe()


def _none() -> Iterator[memoryview]:
    yield from ()


def together(ranks: Ranks, work: Callable[[], Result]) -> list[Result]:
    """What `work` returns on every rank, in the order of `company`. When it raises on one, all
    raise: that one its own error, the others CheckpointError with its words."""
    result: Result | None = None
    failure: BaseException | None = None
    try:
        result = work()
    except BaseException as error:
        failure = error
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    found: Any = ranks.files.objects((said, result), "checkpoint")
    if failure is not None:
        raise failure
    for rank, (words, _) in zip(ranks.company, found, strict=True):
        if words:
            raise CheckpointError(f"the checkpoint failed on rank {rank}: {words}")
    return [outcome for _, outcome in found]


def alike(ranks: Ranks | None, make: Callable[[], Result]) -> Result:
    """What `make` returns here; when it raises on one rank, all raise, as `together`."""
    if ranks is None:
        return make()
    made: list[Result] = []
    together(ranks, lambda: made.append(make()))
    return made[0]
