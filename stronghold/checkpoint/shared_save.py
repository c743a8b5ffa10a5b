"""Saving by several ranks: all write at once, each its own elements of the same files.

Owns what the ranks say to each other during a save. The first makes the hidden directory, writes
what is small, and publishes; a failure on any rank is raised on all, and leaves no trace. As for
`save`, the training thread collects, and the jobs run on it or on the io lane; both talk over the
group of files, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stronghold.checkpoint import directory
from stronghold.checkpoint.parts import Part, PartEntry, record_of, write_parts
from stronghold.checkpoint.save import Contents, Save
from stronghold.checkpoint.tensorfile import PIECE_BYTES, Entry, raw_bytes
from stronghold.errors import CheckpointError, ConfigError
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
        if ranks.norms is not None:
            raise ConfigError(
                "save_checkpoint: this release saves no model that is split over model-parallel "
                "ranks: save each part's state_dict"
            )
        self._ranks = ranks
        self._parts: dict[str, list[Part]] = {}
        super().__init__(stack, optimizer, save_dir, tag, contents, latest=latest)

    def _begin(self) -> Path:
        first = self._ranks.rank == 0
        hidden = together(
            self._ranks, lambda: str(super(SharedSave, self)._begin()) if first else ""
        )
        return Path(hidden[0])

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
            of_all = together(self._ranks, self._written)
            together(self._ranks, lambda: self._publish(of_all) if self._ranks.rank == 0 else None)
        except BaseException:
            if self._ranks.rank == 0:
                directory.remove(self._hidden)
            raise

    def _written(self) -> dict[str, list[Part]]:
        if self._failure is not None:
            raise self._failure
        return self._parts

    def _publish(self, of_all: list[dict[str, list[Part]]]) -> None:
        for name in self._parts:
            self._files[name] = record_of(name, [p for parts in of_all for p in parts[name]])
        self._finish()


def _none() -> Iterator[memoryview]:
    yield from ()


def together(ranks: Ranks, work: Callable[[], Result]) -> list[Result]:
    """What `work` returns on every rank, by rank. When it raises on one, all raise: that one its
    own error, the others CheckpointError with its words."""
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
    for rank, (words, _) in zip(ranks.members, found, strict=True):
        if words:
            raise CheckpointError(f"the checkpoint failed on rank {rank}: {words}")
    return [outcome for _, outcome in found]
