"""Directories of checkpoints: tags, `latest`, and how a new tag appears all at once.

Owns the names in a save directory and the order in which they become durable; and what the ranks
that save and load together say to each other meanwhile: what fails on one fails on all, and all
look into one folder. Never opens a file of tensors.

[Note: publication] A tag is written into a hidden directory, every file and the directory itself
are fsynced, and one rename makes it visible; then `latest` is replaced in the same way. A tag that
exists is exchanged with the new one in one system call where the file system can (Linux, most
local file systems). Elsewhere the old one first steps aside under a name from which `resolve`
brings it back. So at every instant the newest tag that `latest` names is complete.

[Note: leftovers] The hidden name says which process wrote it, and each is used once: no two saves
share one, and nobody can have planted a link there. The next save into the directory removes those
of processes that have ended, if they are this user's; those of other machines and containers, which
may be alive, it names in a warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from stronghold.checkpoint.manifest import MANIFEST, Slices
from stronghold.checkpoint.tensorfile import HeldFile, MissingError
from stronghold.distributed.process_groups import Ranks
from stronghold.errors import CheckpointError, ConfigError, did_you_mean
from stronghold.process import TOKEN, Life, Process

logger = logging.getLogger("stronghold")

LATEST = "latest"
LONGEST_TAG = 4096  # bytes of `latest`
RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100  # fcntl.h
THERE_IS_ONE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
HIDDEN = re.compile(
    rf"\.(?P<tag>.+)\.(?P<kind>tmp|old)-(?P<process>{TOKEN})-[0-9a-f]{{8}}", re.ASCII
)
WAIT_S = 10.0  # network file systems show what another machine has made after some seconds
ADVICE = "save and load in a folder that every node sees under one path (NFS, Lustre, ...)"
Result = TypeVar("Result")


def check_tag(tag: object) -> str:
    """The tag as a string that is one directory's name."""
    name = str(tag)
    unusual = not name.isprintable() or name != name.strip()  # `latest` is read without its ends
    if not name or unusual or name.startswith(".") or "/" in name or name == LATEST:
        raise ConfigError(
            f"checkpoint tag {name!r}: expected the name of one directory, in printable characters "
            "and without space around it"
        )
    return name


def hidden_name(tag: str) -> str:
    """Where this process writes `tag` before it is complete: another name at every call."""
    return f".{tag}.tmp-{Process.this()}-{uuid.uuid4().hex[:8]}"


def aside_of(save_dir: Path, tag: str) -> Path:
    """Where an old tag waits while the new one takes its name, without an exchange. Nobody else
    gives a directory such a name: what a user has put aside as .TAG.old is the user's."""
    return save_dir / f".{tag}.old-{hidden_name(tag).removeprefix(f'.{tag}.tmp-')}"


def begin(save_dir: Path, tag: str) -> Path:
    """An empty hidden directory for `tag`; leftovers of processes that have ended are removed."""
    save_dir.mkdir(parents=True, exist_ok=True)
    remove_leftovers(save_dir)
    restore_aside(save_dir, tag)
    hidden = save_dir / hidden_name(tag)
    hidden.mkdir()
    return hidden


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """A hidden directory to write into, which becomes `final` when the block ends, or vanishes."""
    hidden = begin(final.parent, final.name)
    try:
        yield hidden
        publish(hidden, final)
    except BaseException:
        remove(hidden)
        raise


def check_new(out: Path) -> None:
    """ConfigError when `out` holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not empty; name a new directory")


def remove_leftovers(save_dir: Path) -> None:
    """Remove what saves of this user that have ended left half-written ([Note: leftovers])."""
    for path in sorted(save_dir.iterdir()):
        match = HIDDEN.fullmatch(path.name)
        process = Process.parse(match["process"]) if match and match["kind"] == "tmp" else None
        if process is None:
            continue
        try:
            mine = path.lstat().st_uid == os.geteuid()
        except FileNotFoundError:  # its save has ended since
            continue
        life = process.life
        if mine and life is Life.ENDED:
            logger.info("removing %s, which a save that was killed left", path)
            remove(path)
        elif mine and life is Life.UNSEEN:
            logger.warning(
                "%s is of a save by process %d of another machine or container, and is left "
                "alone; remove it if that process has ended",
                path,
                process.pid,
            )


def remove(path: Path) -> None:
    """Remove a file or a tree that nobody needs; what is not there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(hidden: Path, final: Path) -> None:
    """Make a complete hidden directory visible as `final` ([Note: publication])."""
    sync_directory(hidden)
    try:
        hidden.rename(final)
    except OSError as error:
        if error.errno not in THERE_IS_ONE:
            raise
    else:
        sync_directory(final.parent)
        return
    if not _exchange(hidden, final):
        aside = aside_of(final.parent, final.name)
        final.rename(aside)
        hidden.rename(final)
        hidden = aside
    sync_directory(final.parent)
    remove(hidden)  # now the old one


def _exchange(one: Path, two: Path) -> bool:
    """Swap two names at once; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    paths = os.fsencode(one), os.fsencode(two)
    if libc.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(two))


def restore_aside(save_dir: Path, tag: str) -> None:
    """Bring back a tag whose replacement never took its name."""
    for aside in save_dir.glob(".*.old-*"):
        match = HIDDEN.fullmatch(aside.name)
        if match is None or (match["tag"], match["kind"]) != (tag, "old"):
            continue
        if (save_dir / tag).exists():
            remove(aside)
        else:
            aside.rename(save_dir / tag)


def write_latest(save_dir: Path, tag: str) -> None:
    """Make `latest` name `tag`, at once."""
    hidden = save_dir / hidden_name(LATEST)
    # "x": never into a link that was planted, nor over a file.
    with open(hidden, "x", encoding="utf-8") as file, contextlib.ExitStack() as undo:
        undo.callback(remove, hidden)
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
        hidden.replace(save_dir / LATEST)
        undo.pop_all()
    sync_directory(save_dir)


def read_latest(save_dir: Path) -> str | None:
    """The tag that `latest` names, or None without the file. CheckpointError when it names none."""
    path = save_dir / LATEST
    try:
        file = HeldFile(path)
    except MissingError:
        return None
    try:
        return check_tag(file.read(LONGEST_TAG).decode().strip())
    except ValueError as error:
        raise CheckpointError(f"{path}: does not name a tag: {error}") from error
    finally:
        file.close()


def resolve(load_dir: Path, tag: str) -> Path:
    """The directory of `tag`. CheckpointError, with the tags that are there, when it is not."""
    restore_aside(load_dir, tag)
    path = load_dir / tag
    if path.is_dir():
        return path
    tags = [f.name for f in sorted(load_dir.glob("*")) if f.is_dir() and f.name[0] != "."]
    there = f"the tags there are {', '.join(tags)}" if tags else "there is no tag in it"
    raise CheckpointError(f"{path}: no such checkpoint; {there}.{did_you_mean(tag, tags)}")


# -- one directory for all ranks ------------------------------------------------------------------
class Team:
    """`rank` of `num_ranks` that share the `slices` of a model; of those of all slices one is the
    `leader`, which names tags and publishes them."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.num_ranks = ranks.control.rank, ranks.num_ranks
        self.several = ranks.several
        self.slices = Slices(rank=ranks.model_parallel_rank, size=ranks.model_parallel_size)
        self._group, self._node_name = ranks.files, ranks.node_name
        # Of the ranks of all slices, and of those of ours.
        self._numbers, self._sharing = ranks.files.members, ranks.control.members
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
