"""Ownership: one run's own directory under a user's path, and what dead runs left there.

Owns the directory's name, its owner file and the lock on it; never what else lies in it. A run
touches its own directory, and those of runs that are proven dead. Entered by the training thread,
and at the end of the process.

[Note: dead or alive] The owner file is locked (flock) as long as its run lives; the kernel drops
the lock however the process ends. A directory gets its name only when that lock is held, by a
rename, so a directory with the name and without the lock has no living owner. Some network file
systems forget locks or keep them to each machine; therefore a run is dead only when, beside that,
its process is gone: another boot of this host, or no process of that number and start time. Other
hosts' processes cannot be seen: their directories are left alone, and named in a warning.

[Note: forked children] share the lock, which ends with the last of them, and inherit the objects
that remove the directory: only the process that made it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import uuid
import weakref
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

PREFIX = "stronghold-"
OWNER = "owner.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger("stronghold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that a directory belongs to.

    `started` is its start in clock ticks since boot, which tells it from a later process of the
    same number; it and `boot_id` are "" where the system has no /proc.
    """

    pid: int
    host: str
    boot_id: str
    started: str
    created: str

    @classmethod
    def this_process(cls) -> Owner:
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            boot_id=_boot_id(),
            started=_start_of(os.getpid()) or "",
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    @property
    def foreign(self) -> bool:
        """Whether it ran on another machine: a container has a host name of its own, and the boot
        of its machine; after a reboot the host name is what stays."""
        return self.boot_id != _boot_id() and self.host != socket.gethostname()

    @property
    def gone(self) -> bool:
        """Whether the process of a run that is not foreign has ended."""
        return self.boot_id != _boot_id() or _start_of(self.pid) != self.started


class RunDirectory:
    """A new directory `stronghold-<uuid>` under `parent`, for this process alone.

    It goes with `close`, or at the end of the process, with what is in it; after a crash the next
    run's `reclaim` removes it. Raises `OSError` where it cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        name = f"{PREFIX}{uuid.uuid4().hex}"
        self.path = parent / name
        nameless = parent / f".{name}"  # until the lock is held: [Note: dead or alive]
        nameless.mkdir(mode=0o700)
        descriptor = -1
        try:
            descriptor = os.open(nameless / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            _lock(descriptor, self.path)
            os.write(descriptor, json.dumps(asdict(Owner.this_process()), indent=1).encode())
            nameless.rename(self.path)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            _remove_tree(nameless)
            raise
        self._remove = weakref.finalize(self, _remove_own, self.path, descriptor, os.getpid())

    def close(self) -> None:
        """Remove the directory and give up the lock. Twice is harmless, and so is a forked child's
        call."""
        self._remove()


def reclaim(parent: Path) -> int:
    """Remove the directories of dead runs under `parent`; their bytes on the disk.

    Those of living runs stay, as does everything that this user may not open.
    """
    reclaimed = 0
    for path in sorted(parent.glob(f"{PREFIX}*")):
        if path.is_dir() and not path.is_symlink():
            reclaimed += _reclaim_one(path)
    return reclaimed


def _reclaim_one(path: Path) -> int:
    try:
        descriptor = os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # not a run's, another user's, or removed since it was listed
        return 0
    try:
        if not _try_lock(descriptor) or not os.fstat(descriptor).st_nlink:
            return 0  # a living run's, or removed by another run that starts
        owner = _read_owner(descriptor)
        if owner is None:
            logger.warning("%s: its owner file cannot be read; remove it if nothing uses it", path)
            return 0
        if owner.foreign:
            logger.warning(
                "%s belongs to process %d of another host (%s) and is left alone; remove it if "
                "that run has ended",
                path,
                owner.pid,
                owner.host,
            )
            return 0
        return _remove_dead(path, owner) if owner.gone else 0
    finally:
        os.close(descriptor)


def _remove_dead(path: Path, owner: Owner) -> int:
    size = _bytes_on_disk(path)
    _remove_tree(path)
    logger.warning(
        "removed %s, left by a run that ended without cleaning up (process %d, %s): "
        "%d bytes reclaimed",
        path,
        owner.pid,
        owner.created,
        size,
    )
    return size


def _remove_own(path: Path, descriptor: int, pid: int) -> None:
    if os.getpid() != pid:  # [Note: forked children]
        return
    _remove_tree(path)  # while the lock is held: nobody takes it for dead
    os.close(descriptor)


def _remove_tree(path: Path) -> None:
    """The owner file goes last: what cannot be removed now, or a crash leaves here, is met again by
    the next run."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != OWNER:
                entry.unlink()
        (path / OWNER).unlink(missing_ok=True)
        path.rmdir()


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        logger.warning(
            "%s cannot be locked on this file system (%s): if this run is killed, "
            "remove it by hand",
            path,
            error.strerror,
        )


def _try_lock(descriptor: int) -> bool:
    """False where a living run holds the lock, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_owner(descriptor: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return None


def _bytes_on_disk(path: Path) -> int:
    size = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            size += file.lstat().st_blocks * 512
    return size


def _boot_id() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def _start_of(pid: int) -> str | None:
    """The start time of a running process, in ticks since boot; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started  # a zombie holds nothing any more
