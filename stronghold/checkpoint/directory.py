"""Directories of checkpoints: tags, `latest`, and how a new tag appears all at once.

Owns the names in a save directory and the order in which they become durable. Never opens a file of
tensors.

[Note: publication] A tag is written into a hidden directory, every file and the directory itself
are fsynced, and one rename makes it visible; then `latest` is replaced in the same way. A tag that
exists is exchanged with the new one in one system call where the file system can (Linux, most
local file systems). Elsewhere the old one first steps aside under a name from which `resolve`
brings it back. So at every instant the newest tag that `latest` names is complete.

[Note: leftovers] The hidden name says which process wrote it. The next save removes those of
processes that are gone; a process is known by its id and its start, since ids are used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
from pathlib import Path

import psutil

from stronghold.errors import CheckpointError, ConfigError, did_you_mean

LATEST = "latest"
RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100  # fcntl.h
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
HIDDEN = re.compile(r"\.(?P<tag>.+)\.tmp-(?P<host>.+)-(?P<pid>\d+)-(?P<start>\d+)")


def check_tag(tag: object) -> str:
    """The tag as a string that is one directory's name."""
    name = str(tag)
    if not name or name.startswith(".") or "/" in name or name in (LATEST, ".", ".."):
        raise ConfigError(f"checkpoint tag {name!r}: expected the name of one directory")
    return name


def hidden_name(tag: str) -> str:
    """Where this process writes `tag` before it is complete."""
    start = int(psutil.Process().create_time())
    return f".{tag}.tmp-{socket.gethostname()}-{os.getpid()}-{start}"


def begin(save_dir: Path, tag: str) -> Path:
    """An empty hidden directory for `tag`; leftovers of processes that are gone are removed."""
    save_dir.mkdir(parents=True, exist_ok=True)
    for path in save_dir.iterdir():
        match = HIDDEN.fullmatch(path.name)
        if match and not _alive(match):
            remove(path)
    restore_aside(save_dir, tag)
    hidden = save_dir / hidden_name(tag)
    remove(hidden)  # a save of this process that failed
    hidden.mkdir()
    return hidden


def _alive(match: re.Match[str]) -> bool:
    if match["host"] != socket.gethostname():
        return True  # another machine's: it cannot be known
    try:
        return abs(psutil.Process(int(match["pid"])).create_time() - int(match["start"])) < 2
    except psutil.NoSuchProcess:
        return False


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
    if not final.exists():
        hidden.rename(final)
        sync_directory(final.parent)
        return
    if not _exchange(hidden, final):
        aside = aside_of(final.parent, final.name)
        remove(aside)
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


def aside_of(save_dir: Path, tag: str) -> Path:
    """Where an old tag waits while the new one takes its name, without an exchange."""
    return save_dir / f".{tag}.old"


def restore_aside(save_dir: Path, tag: str) -> None:
    """Bring back a tag whose replacement never took its name."""
    aside = aside_of(save_dir, tag)
    if aside.is_dir():
        if (save_dir / tag).exists():
            remove(aside)
        else:
            aside.rename(save_dir / tag)


def write_latest(save_dir: Path, tag: str) -> None:
    """Make `latest` name `tag`, at once."""
    hidden = save_dir / hidden_name(LATEST)
    with open(hidden, "w", encoding="utf-8") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(save_dir / LATEST)
    sync_directory(save_dir)


def read_latest(save_dir: Path) -> str | None:
    """The tag that `latest` names, or None without the file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (save_dir / LATEST).read_text(encoding="utf-8").strip()
    return None


def resolve(load_dir: Path, tag: str) -> Path:
    """The directory of `tag`. CheckpointError, with the tags that are there, when it is not."""
    restore_aside(load_dir, tag)
    path = load_dir / tag
    if path.is_dir():
        return path
    tags = (
        [found.name for found in sorted(load_dir.iterdir()) if _is_tag(found)]
        if load_dir.is_dir()
        else []
    )
    there = f"the tags there are {', '.join(tags)}" if tags else "there is no tag in it"
    raise CheckpointError(f"{path}: no such checkpoint; {there}.{did_you_mean(tag, tags)}")


def _is_tag(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")
