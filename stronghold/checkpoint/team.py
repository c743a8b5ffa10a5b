"""The ranks that save and load together: one that is alone is a team of one.

Owns what they say to each other meanwhile, over the group of files: what fails on one fails on all,
and all look into one folder. Each question is asked by all of them, in one order, by the training
thread or by the io lane.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stronghold.checkpoint.manifest import MANIFEST, Slices
from stronghold.errors import CheckpointError
from stronghold.team.group import Ranks

WAIT_S = 10.0  # network file systems show what another machine has made after some seconds
ADVICE = "save and load in a folder that every node sees under one path (NFS, Lustre, ...)"
Result = TypeVar("Result")


class Team:
    """`rank` of `num_ranks` that share the `slices` of a model; of those of all slices one is the
    `leader`, which names tags and publishes them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.num_ranks, self.several = ranks.rank, ranks.num_ranks, ranks.several
        self.slices = Slices(rank=ranks.model_parallel_rank, size=ranks.model_parallel_size)
        self._group, self._node_name = ranks.files, ranks.node_name
        # Of the ranks of all slices, and of those of ours.
        self._numbers, self._sharing = ranks.all_ranks, ranks.members
        self.leader = ranks.files.rank == 0

    def exchange(self, mine: Any, what: str) -> list[Any]:
        """Every rank's object, of all slices."""
        return self._group.objects(mine, what)

    def of_slices(self, found: list[Any]) -> list[Any]:
        """Of what `exchange` gave: that of the ranks that share our slices, by rank."""
        return [found[self._numbers.index(number)] for number in self._sharing]

    def all_or_raise(self, work: Callable[[], Result]) -> Result:
        """What `work` returns here. When it raises on one rank, all raise: that one its own error,
        the others CheckpointError with its words."""
        said = "the checkpoint failed on rank {}: {}: {}"
        return self._group.all_or_raise(
            work, lambda *failure: CheckpointError(said.format(*failure)), "checkpoint"
        )

    # -- one folder for all -----------------------------------------------------------------------
    def check_seen(self, path: Path) -> None:
        """CheckpointError, on every rank, unless all see the directory that the leader made."""
        deadline = time.monotonic() + WAIT_S
        while not path.is_dir() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # makes a network file system look again
            time.sleep(0.05)
        found = self.exchange((path.is_dir(), self._node_name), "folder")
        for number, (sees, node) in zip(self._numbers, found, strict=True):
            if not sees:
                raise CheckpointError(
                    f"rank {number} on {node} does not see {path}, which rank {self._numbers[0]} "
                    f"made: {path.parent} is not the same folder on every node. {ADVICE}"
                )

    def check_same(self, tag: Path) -> None:
        """CheckpointError, on every rank, when some find another manifest in the tag than the
        leader; a tag that the leader does not find is the caller's to refuse."""
        path = tag / Slices(size=self.slices.size).name(MANIFEST)
        mark = None
        with contextlib.suppress(OSError):
            mark = zlib.crc32(path.read_bytes()) if self.several else None
        found = self.exchange((mark, self._node_name), "manifest")
        for number, (mark, node) in zip(self._numbers, found, strict=True):
            if found[0][0] not in (None, mark):
                what = "finds no" if mark is None else "finds another"
                raise CheckpointError(
                    f"rank {number} on {node} {what} {path} than rank {self._numbers[0]}: "
                    f"{tag.parent} is not the same folder on every node. {ADVICE}"
                )

    def check_opened(self, tag: Path, mark: int) -> None:
        """CheckpointError, on every rank, unless all have opened the same save: the tag may have
        been replaced between one rank's opening and another's."""
        marks = self.exchange(mark, "open tags")
        for number, found in zip(self._numbers, marks, strict=True):
            if found != marks[0]:
                raise CheckpointError(
                    f"{tag}: was replaced while it was loaded: rank {number} has opened another "
                    f"save of it than rank {self._numbers[0]}. Load it again"
                )
