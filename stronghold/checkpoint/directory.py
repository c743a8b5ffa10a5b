"""Directories of checkpoints: tags, `latest`, and the atomic publication of a new tag.

Owns the names in a save directory, and the order in which they become durable. Owns also the
agreement of ranks that save and load together: an error of one is an error of all, and all see one
folder. It never opens a file of tensors. The training thread and the io lane enter.

[Note: publication]

1. A save of TAG writes into the hidden directory .TAG.saving, and holds a lock (flock) on it. So a
   second save of this tag at the same time is refused. A save that was killed holds no lock: the
   next save of this tag empties its directory and takes it.
2. The ranks write their files into it. Each file is fsynced, then the directory.
3. One rename makes it visible as the tag. One system call exchanges it with a tag that exists, if
   the file system can (Linux, most local file systems). Elsewhere a rename hides the old tag first,
   as .TAG.replaced. If the process ends between both renames, `resolve` brings the old tag back.
4. The save replaces `latest` in one rename. Then it removes the old tag.

So at every instant `latest` names a complete tag: the old one or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from stronghold.checkpoint.files import HeldFile, MissingError, write_durably
from stronghold.errors import CheckpointError, ConfigError, did_you_mean
from stronghold.train.processes import RankGroup

logger = logging.getLogger("stronghold")

LATEST = "latest"
# People who followed DeepSpeed's documentation look for it beside the tags.
FP32_SCRIPT = Path(__file__).parents[1] / "tools" / "zero_to_fp32.py"
RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100  # fcntl.h
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
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
@contextlib.contextmanager
def hidden_directory(final: Path) -> Iterator[Path]:
    """Context manager for an empty hidden directory beside `final`, locked by this process.

    Its exit removes what then has the hidden name. Raises CheckpointError while another save of
    `final` runs.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    path = final.with_name(f".{final.name}.saving")
    path.mkdir(exist_ok=True)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(lock, final)
        for left in path.iterdir():
            remove(left)
        try:
            yield path
        finally:
            remove(path)
    finally:
        os.close(lock)


def _lock(descriptor: int, final: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{final}: another save of it has not ended: wait for that one, or give this one "
            "another name"
        ) from error
    except OSError as error:  # a file system without locks
        logger.debug("%s: no lock on its hidden directory: %s", final, error)


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """Context manager for a hidden directory to write into.

    The directory becomes `final` at the end of the block. After an exception it is removed.
    """
    with hidden_directory(final) as hidden:
        yield hidden
        publish(hidden, final)


def _replaced(final: Path) -> Path:
    """The name of an old tag between two renames."""
    return final.with_name(f".{final.name}.replaced")


# -- publication ----------------------------------------------------------------------------------
def publish(hidden: Path, final: Path) -> None:
    """Make a complete hidden directory visible as `final` ([Note: publication]).

    Afterwards an old `final` has the hidden name, or is removed. Waits for the disk.
    """
    sync_directory(hidden)
    if not final.exists():
        hidden.rename(final)
    elif not exchange_names(hidden, final):
        remove(_replaced(final))
        final.rename(_replaced(final))
        hidden.rename(final)
    sync_directory(final.parent)
    remove(_replaced(final))


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


def write_latest(save_dir: Path, tag: str) -> None:
    """Make `latest` name `tag`, in one rename, and put the script beside it. Waits for the disk."""
    replace_file(save_dir / LATEST, tag.encode())
    with contextlib.suppress(OSError):  # the tag is complete without it
        replace_file(save_dir / FP32_SCRIPT.name, FP32_SCRIPT.read_bytes())
    sync_directory(save_dir)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file in one rename."""
    # saves of other tags may write the same file at the same time
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        write_durably(hidden, content)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


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
        return check_tag(file.read().decode().strip())
    except ValueError as error:
        raise CheckpointError(f"{path}: does not name a tag: {error}") from error
    finally:
        file.close()


def resolve(load_dir: Path, tag: str) -> Path:
    """Return the directory of `tag`.

    Raises CheckpointError, with the names of the tags that exist, if it is missing.
    """
    path = load_dir / tag
    if not path.exists():
        with contextlib.suppress(OSError):  # there is none, or another process was faster
            _replaced(path).rename(path)
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

    def __init__(self, ranks: RankGroup) -> None:
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

    def check_opened(self, tag: Path, mark: int) -> None:
        """Raise CheckpointError, on every rank, unless all have opened the same save."""
        answers = self.exchange((mark, self._node_name), "open tags")
        for rank, (other, node) in enumerate(answers):
            if other != answers[0][0]:
                raise CheckpointError(
                    f"{tag}: rank {rank} on {node} has opened another save of it than rank 0: it "
                    f"was replaced meanwhile, or {tag.parent} is not the same folder on every "
                    f"node. {ADVICE}"
                )
