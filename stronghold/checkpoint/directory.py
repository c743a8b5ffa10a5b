"""Directories of checkpoints: tags, `latest`, and the atomic publication of a new tag.

Owns the names in a save directory, and the order in which they become durable. Owns also the
agreement of ranks that save and load together: an error of one is an error of all, and all see one
folder. It never opens a file of tensors. The training thread and the io lane enter.

[Note: publication]

1. A save makes a hidden directory, whose name no other save has, and locks it.
2. The ranks write their files into it. Each file is fsynced, then the directory.
3. One rename makes it visible as the tag. One system call exchanges it with a tag that exists, if
   the file system can (Linux, most local file systems). Elsewhere a rename hides the old tag first.
   If the process ends between both renames, `resolve` brings the old tag back.
4. The save replaces `latest` in the same way. Then it removes the old tag.

So at every instant `latest` names a complete tag: the old one or the new one.

[Note: leftovers]

1. A process ends within a save. The system drops the process's lock on the hidden directory.
2. The next save into the save directory removes each hidden directory that it can lock, if this
   user owns it.
3. On a file system without locks the directories stay. A warning names them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from stronghold.checkpoint.files import HeldFile, MissingError, write_durably
from stronghold.checkpoint.format import MANIFEST
from stronghold.errors import CheckpointError, ConfigError, did_you_mean
from stronghold.train.processes import Neighbours

logger = logging.getLogger("stronghold")

LATEST = "latest"
# People who followed DeepSpeed's documentation look for it beside the tags.
FP32_SCRIPT = Path(__file__).parents[1] / "tools" / "zero_to_fp32.py"
LONGEST_TAG = 4096  # bytes of `latest`
RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100  # fcntl.h
NAME_IS_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}", re.ASCII)
WAIT_S = 10.0  # a network file system shows another machine's files after some seconds
ADVICE = "save and load in a folder that every node sees under one path (NFS, Lustre, ...)"
Result = TypeVar("Result")
P = ParamSpec("P")


def check_tag(tag: object) -> str:
    """Return the tag as a string. Raises ConfigError unless it is the name of one directory."""
    name = str(tag)
    # `latest` is read without its ends
    unusual = not name.isprintable() or name != name.strip()
    if not name or unusual or name.startswith(".") or "/" in name or name == LATEST:
        raise ConfigError(
            f"checkpoint tag {name!r}: expected the name of one directory, in printable characters "
            "and without space around it"
        )
    return name


def check_new(out: Path) -> None:
    """Raise ConfigError if `out` exists and is not an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not empty; name a new directory")


def remove(path: Path) -> None:
    """Remove a file or a tree. It may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Waits for the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- hidden directories ---------------------------------------------------------------------------
def hidden_name(name: str, kind: str = "tmp") -> str:
    """Return a new hidden name for a directory that becomes `name` ("tmp") or was it ("old").

    It differs at every call. So no one can plant a link with that name, and a directory that a user
    named .TAG.old stays.
    """
    return f".{name}.{kind}-{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def hidden_directory(parent: Path, name: str) -> Iterator[Path]:
    """Context manager for a new hidden directory beside `name`, locked by this process.

    It removes leftovers in `parent` first. Its exit removes the file or directory that then has the
    hidden name.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    path, lock = _make_locked(parent, name)
    try:
        yield path
    finally:
        remove(path)
        os.close(lock)


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """Context manager for a hidden directory to write into.

    The directory becomes `final` at the end of the block. After an exception it is removed.
    """
    with hidden_directory(final.parent, final.name) as hidden:
        yield hidden
        publish(hidden, final)


def _make_locked(parent: Path, name: str) -> tuple[Path, int]:
    """Make a hidden directory and lock it. Returns its path and the descriptor that has the lock.

    A race: another save may lock and remove the directory before this one locks it. Then the next
    name is tried.
    """
    while True:
        path = parent / hidden_name(name)
        path.mkdir()
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            is_free = lock_directory(lock) is not False
            if is_free and path.is_dir():
                return path, lock
            os.close(lock)


def lock_directory(descriptor: int) -> bool | None:
    """Lock an open directory, without waiting. Returns True if this process has the lock now.

    False: another process has it. None: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_leftovers(parent: Path) -> None:
    """Remove hidden directories of this user's ended saves from `parent` ([Note: leftovers])."""
    for path in sorted(parent.iterdir()):
        match = HIDDEN.fullmatch(path.name)
        if match is None:
            continue
        if match["kind"] == "tmp":
            _remove_unlocked(path)
        elif _exists_or_returns(parent / match["name"], path):
            remove(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a hidden directory of this user, if no process has it locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another process has removed it, or it is no directory of a save
        return
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return
        is_free = lock_directory(descriptor)
        if is_free:
            logger.info("removing %s, which a save that did not end has left", path)
            remove(path)
        elif is_free is None:
            logger.warning(
                "%s may be of a save that did not end, and is left: this file system has no "
                "locks. Remove it if no program saves into it",
                path,
            )
    finally:
        os.close(descriptor)


# -- publication ----------------------------------------------------------------------------------
def publish(hidden: Path, final: Path) -> None:
    """Make a complete hidden directory visible as `final` ([Note: publication]).

    Afterwards an old `final` has the hidden name, or is removed. Waits for the disk.
    """
    sync_directory(hidden)
    olds = []
    while not _rename(hidden, final) and not exchange_names(hidden, final):
        olds.append(final.parent / hidden_name(final.name, "old"))
        with contextlib.suppress(FileNotFoundError):  # another save was faster
            final.rename(olds[-1])
    sync_directory(final.parent)
    for old in olds:
        remove(old)


def _rename(hidden: Path, final: Path) -> bool:
    """Rename a directory. False if `final` exists."""
    try:
        hidden.rename(final)
    except OSError as error:
        if error.errno not in NAME_IS_TAKEN:
            raise
        return False
    return True


def exchange_names(one: Path, two: Path) -> bool:
    """Exchange two names in one system call. False if the system cannot. Raises OSError."""
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


def _exists_or_returns(final: Path, old: Path) -> bool:
    """Return True if the tag `final` exists. If it is missing, `old` takes its name first.

    It is missing if a save ended before the replacement took the name.
    """
    if not final.exists():
        with contextlib.suppress(OSError):  # another process was faster
            old.rename(final)
    return final.exists()


def write_latest(save_dir: Path, tag: str) -> None:
    """Make `latest` name `tag`, in one rename, and put the script beside it. Waits for the disk."""
    with hidden_directory(save_dir, LATEST) as hidden:
        write_durably(hidden / LATEST, tag.encode())
        (hidden / LATEST).replace(save_dir / LATEST)
        with contextlib.suppress(OSError):  # the tag is complete without it
            shutil.copy(FP32_SCRIPT, hidden)
            (hidden / FP32_SCRIPT.name).replace(save_dir / FP32_SCRIPT.name)
    sync_directory(save_dir)


def read_latest(save_dir: Path) -> str | None:
    """Return the tag that `latest` names, or None without the file.

    Raises CheckpointError if the file does not name a tag.
    """
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
    """Return the directory of `tag`.

    Raises CheckpointError, with the names of the tags that exist, if it is missing.
    """
    path = load_dir / tag
    for old in sorted(load_dir.glob(".*.old-*")):
        match = HIDDEN.fullmatch(old.name)
        if match is not None and match["name"] == tag:
            _exists_or_returns(path, old)
    if path.is_dir():
        return path
    tags: list[str] = []
    for folder in sorted(load_dir.glob("*")):
        if folder.is_dir() and not folder.name.startswith("."):
            tags.append(folder.name)
    listed = f"the tags there are {', '.join(tags)}" if tags else "there is no tag in it"
    raise CheckpointError(f"{path}: no such checkpoint; {listed}.{did_you_mean(tag, tags)}")


# -- one directory for all ranks ------------------------------------------------------------------
class CheckpointRanks:
    """The ranks that save and load one checkpoint together.

    rank, num_ranks  this rank, and the number of ranks
    leader           true on the rank that names tags, writes small files and publishes
    """

    def __init__(self, ranks: Neighbours) -> None:
        self._ranks, self.rank, self.num_ranks = ranks, ranks.rank, ranks.num_ranks
        self._node_name = ranks.node_name
        self.leader = self.rank == 0

    def exchange(self, value: Any, operation: str) -> list[Any]:
        """Return the value of every rank (all-gather).

        Waits for the other ranks. `operation` names the exchange in errors.
        """
        return self._ranks.of_all(value, operation, beside=True)

    def all_or_raise(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Return the result of `work(*args, **kwargs)`. Waits for the other ranks.

        If it raises on one rank, all ranks raise. That rank raises its own error. The others raise
        CheckpointError with the error's text.
        """
        results: list[Result] = []
        failure: BaseException | None = None
        try:
            results.append(work(*args, **kwargs))
        except BaseException as error:
            failure = error
        words = None if failure is None else f"{type(failure).__name__}: {failure}"
        of_ranks = self.exchange(words, "checkpoint")
        if failure is not None:
            raise failure
        for rank, of_rank in enumerate(of_ranks):
            if of_rank is not None:
                raise CheckpointError(f"the checkpoint failed on rank {rank}: {of_rank}")
        return results[0]

    # -- one folder for all -----------------------------------------------------------------------
    def check_seen(self, path: Path) -> None:
        """Raise CheckpointError, on every rank, unless all see the directory that the leader made.

        Waits up to `WAIT_S` seconds for the directory to appear.
        """
        deadline = time.monotonic() + WAIT_S
        while not path.is_dir() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # makes a network file system look again
            time.sleep(0.05)
        answers = self.exchange((path.is_dir(), self._node_name), "folder")
        for rank, (is_seen, node) in enumerate(answers):
            if not is_seen:
                raise CheckpointError(
                    f"rank {rank} on {node} does not see {path}, which rank 0 made: {path.parent} "
                    f"is not the same folder on every node. {ADVICE}"
                )

    def check_same(self, tag: Path) -> None:
        """Raise CheckpointError, on every rank, if a rank's manifest differs from the leader's.

        It passes if the leader has no manifest: the caller raises for that tag.
        """
        path = tag / MANIFEST
        mark = None
        with contextlib.suppress(OSError):
            mark = zlib.crc32(path.read_bytes()) if self.num_ranks > 1 else None
        answers = self.exchange((mark, self._node_name), "manifest")
        leaders_mark = answers[0][0]
        for rank, (mark, node) in enumerate(answers):
            if leaders_mark not in (None, mark):
                finds = "finds no" if mark is None else "finds another"
                raise CheckpointError(
                    f"rank {rank} on {node} {finds} {path} than rank 0: {tag.parent} is not the "
                    f"same folder on every node. {ADVICE}"
                )

    def check_opened(self, tag: Path, mark: int) -> None:
        """Raise CheckpointError, on every rank, unless all have opened the same save.

        A race: a saver may replace the tag between one rank's opening and another's.
        """
        marks = self.exchange(mark, "open tags")
        for rank, other_mark in enumerate(marks):
            if other_mark != marks[0]:
                raise CheckpointError(
                    f"{tag}: was replaced while it was loaded: rank {rank} has opened another "
                    "save of it than rank 0. Load it again"
                )
