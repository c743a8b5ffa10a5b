"""One folder for all ranks: what one of them finds in it, all do.

Owns the questions by which ranks on several nodes recognise that they look into different folders
under one name, before anything is written or read. Whoever saves or loads calls them together.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from pathlib import Path

from stronghold.errors import CheckpointError
from stronghold.runtime.distributed import Ranks

WAIT_S = 10.0  # network file systems show what another machine has made after some seconds
ADVICE = "save and load in a folder that every node sees under one path (NFS, Lustre, ...)"


def check_seen(ranks: Ranks, path: Path) -> None:
    """CheckpointError, on every rank, unless all see the directory that the first has made."""
    deadline = time.monotonic() + WAIT_S
    while not path.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system look again
        time.sleep(0.05)
    seen = ranks.files.objects((path.is_dir(), ranks.node_name), "folder")
    for rank, found in zip(ranks.company, seen, strict=True):
        sees, node = found if isinstance(found, tuple) else (False, "")
        if not sees:
            raise CheckpointError(
                f"rank {rank} on {node} does not see {path}, which rank {ranks.company[0]} made: "
                f"{path.parent} is not the same folder on every node. {ADVICE}"
            )


def first_tag(ranks: Ranks, tag: str | None) -> str | None:
    """The tag that the first rank found."""
    found = ranks.files.objects(tag, "latest")[0]
    return None if found is None else str(found)


def check_same(ranks: Ranks, tag: Path, manifest: str) -> None:
    """CheckpointError, on every rank, when some find another manifest in the tag than the first; a
    tag that the first does not find is the caller's to refuse."""
    marks = ranks.files.objects((_checksum(tag / manifest), ranks.node_name), "manifest")
    first = marks[0][0] if isinstance(marks[0], tuple) else None
    for rank, found in zip(ranks.company, marks, strict=True):
        mark, node = found if isinstance(found, tuple) else (None, "")
        if first is not None and mark != first:
            what = "finds no" if mark is None else "finds another"
            raise CheckpointError(
                f"rank {rank} on {node} {what} {tag / manifest} than rank {ranks.company[0]}: "
                f"{tag.parent} is not the same folder on every node. {ADVICE}"
            )


def check_opened(ranks: Ranks, tag: Path, mark: int) -> None:
    """CheckpointError, on every rank, unless all have opened the same save: the tag may have been
    replaced between one rank's opening and another's."""
    marks = ranks.files.objects(mark, "open tags")
    for rank, found in zip(ranks.company, marks, strict=True):
        if found != marks[0]:
            raise CheckpointError(
                f"{tag}: was replaced while it was loaded: rank {rank} has opened another save of "
                f"it than rank {ranks.company[0]}. Load it again"
            )


def _checksum(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return zlib.crc32(path.read_bytes())
    return None
