"""Ownership: one run's own directory under a user's path, and what dead runs left there.

Owns the directory's name, its owner file and the lock on it; never what else lies in it. A run
touches its own directory, and those of runs that are proven dead. Entered by the training thread,
and at the end of the process.

[Note: dead or alive] The owner file is locked (flock) as long as its run lives; the kernel drops
the lock however the process ends. A directory gets its name only when that lock is held, by a
rename, so a directory with the name and without the lock has no living owner. Some network file
systems forget locks or keep them to each machine; therefore a run is dead only when, beside that,
its process has ended (`process`). Of those of other hosts and containers that cannot be known:
their directories are left alone, and named in a warning.

[Note: shared paths] Others may write into the path, too, and put there what they like at any
moment. Only what is this user's is looked into. Whatever is opened, walked or removed is reached
from the directory's own descriptor, never by its path and never through a link: a name that is
exchanged meanwhile leads nowhere.

[Note: forked children] share the lock, which ends with the last of them, and inherit the objects
that remove the directory: only the process that made it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import stat
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from stronghold.process import Life, Process

PREFIX = "stronghold-"
OWNER = "owner.json"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OWNER_BYTES = 4096  # at most; one that we write has some 200

logger = logging.getLogger("stronghold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that a directory belongs to; `host` and `created` are for people."""

    process: Process
    host: str
    created: str

    @classmethod
    def this_process(cls) -> Owner:
        return cls(
            process=Process.this(),
            host=socket.gethostname(),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def as_json(self) -> str:
        words = {"pid": self.process.pid, "host": self.host, "created": self.created}
        return json.dumps({"process": str(self.process), **words}, indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> Owner | None:
        """None for what `as_json` never gives."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        words = [found.get(key) for key in ("process", "host", "created")]
        word, host, created = (word if isinstance(word, str) else "" for word in words)
        process = Process.parse(word)
        return None if process is None else cls(process=process, host=host, created=created)


class RunDirectory:
    """A new directory `stronghold-<uuid>` under `parent`, for this process alone.

    It goes with `close`, or at the end of the process, with what is in it; after a crash the next
    run's `reclaim` removes it. Raises `OSError` where it cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        name = f"{PREFIX}{uuid.uuid4().hex}"
        self.path = parent / name
        nameless = f".{name}"  # until the lock is held: [Note: dead or alive]
        with contextlib.ExitStack() as undo, _naming(self.path):
            above = _open_parent(parent)
            undo.callback(os.close, above)
            os.mkdir(nameless, mode=0o700, dir_fd=above)
            undo.callback(_remove, nameless, above, None)
            folder = _open_directory(nameless, above)
            undo.callback(os.close, folder)
            owner = os.open(OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            undo.callback(os.close, owner)
            undo.callback(os.unlink, OWNER, dir_fd=folder)
            if (error := _lock(owner)) is not None:
                logger.warning(
                    "%s cannot be locked on this file system (%s): if this run is killed, "
                    "remove it by hand",
                    self.path,
                    error.strerror,
                )
            os.write(owner, Owner.this_process().as_json().encode())
            os.rename(nameless, name, src_dir_fd=above, dst_dir_fd=above)
            undo.pop_all()
        self._remove = weakref.finalize(self, _remove_own, name, above, folder, owner, os.getpid())

    def close(self) -> None:
        """Remove the directory and give up the lock. Twice is harmless, and so is a forked child's
        call."""
        self._remove()


def reclaim(parent: Path) -> int:
    """Remove the directories of dead runs under `parent`; their bytes on the disk.

    Those of living runs stay, as does everything that is not this user's, or not a run's.
    """
    names: list[str] = []
    with contextlib.suppress(PermissionError):  # one may write without being allowed to list
        names = sorted(name for name in os.listdir(parent) if name.startswith(PREFIX))
    above = _open_parent(parent)
    try:
        return sum(_reclaim_one(parent / name, above) for name in names)
    finally:
        os.close(above)


def _reclaim_one(path: Path, above: int) -> int:
    with contextlib.ExitStack() as stack:
        try:
            folder = _open_directory(path.name, above)
        except OSError:  # no directory, closed to this user, or removed since it was listed
            return 0
        stack.callback(os.close, folder)
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE:
            logger.info("%r is another user's, or open to others, and is left alone", str(path))
            return 0
        try:  # not blocking: a pipe would wait for its other end
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(OWNER, flags, dir_fd=folder)
        except FileNotFoundError:  # not a run's, or removed since it was listed
            return 0
        except OSError as error:
            return _left_alone(path, f"cannot be opened ({error.strerror})")
        stack.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        of_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not of_ours or found.st_size > OWNER_BYTES:
            return _left_alone(path, "is none that a run of this user's has written")
        if _lock(descriptor) is not None or not os.fstat(descriptor).st_nlink:
            return 0  # a living run's, or removed by another run that starts
        owner = Owner.from_json(os.pread(descriptor, OWNER_BYTES, 0))
        if owner is None:
            return _left_alone(path, "cannot be read")
        life = owner.process.life
        if life is Life.UNSEEN:
            logger.warning(
                "%s belongs to process %d of another host or container (%s) and is left alone; "
                "remove it if that run has ended",
                path,
                owner.process.pid,
                owner.host,
            )
        return _remove_dead(path, above, folder, owner) if life is Life.ENDED else 0


def _left_alone(path: Path, why: str) -> int:
    logger.warning("%s: its owner file %s; remove it if nothing uses it", path, why)
    return 0


def _remove_dead(path: Path, above: int, folder: int, owner: Owner) -> int:
    size = _bytes_on_disk(folder)
    if not _remove(path.name, above, folder):
        return 0
    logger.warning(
        "removed %s, left by a run that ended without cleaning up (process %d, %s): "
        "%d bytes reclaimed",
        path,
        owner.process.pid,
        owner.created,
        size,
    )
    return size


def _remove_own(name: str, above: int, folder: int, owner: int, pid: int) -> None:
    if os.getpid() != pid:  # [Note: forked children]
        return
    _remove(name, above, folder)  # while the lock is held: nobody takes it for dead
    for descriptor in (owner, folder, above):
        os.close(descriptor)


def _remove(name: str, above: int, folder: int | None) -> bool:
    """Remove the directory `name` of `above`, open as `folder`, with what is in it; whether that
    worked. The owner file goes last: what stays, or a crash leaves here, is met by the next run."""
    with contextlib.suppress(OSError):
        if folder is not None:
            _empty(folder, but=OWNER)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(OWNER, dir_fd=folder)
        os.rmdir(name, dir_fd=above)  # no link, and nothing that holds anything
        return True
    return False


def _empty(folder: int, but: str = "") -> None:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            inner = _open_directory(entry.name, folder)
            try:
                _empty(inner)
            finally:
                os.close(inner)
            os.rmdir(entry.name, dir_fd=folder)
        elif entry.name != but:
            os.unlink(entry.name, dir_fd=folder)


def _bytes_on_disk(folder: int) -> int:
    size = 0
    for entry in _entries(folder):
        with contextlib.suppress(OSError):
            size += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                inner = _open_directory(entry.name, folder)
                try:
                    size += _bytes_on_disk(inner)
                finally:
                    os.close(inner)
    return size


def _entries(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _open_directory(name: str, above: int) -> int:
    """A descriptor of the directory `name` of `above`, never through a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=above)


def _open_parent(path: Path) -> int:
    """A descriptor to reach names by; the configured path may be a link, and closed to listing."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError names the whole path, which a system call by descriptor does not know."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _lock(descriptor: int) -> OSError | None:
    """Why it cannot be locked: a living run holds the lock, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None
