"""Disks: whether paths can hold the files of a run, and how fast each of them is.

Owns no bytes: it looks, writes a probe that it removes, and refuses what cannot work before the run
begins. Entered by the training thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stronghold.errors import BudgetError, ConfigError
from stronghold.memory.runfolder import RunDirectory
from stronghold.memory.slab import map_slab
from stronghold.native import ALIGNMENT, IoFile, IoQueue

PATH_KEY = "stronghold.nvme.path"
ENGINE_KEY = "stronghold.nvme.engine"
CAPACITY_KEY = "stronghold.nvme.capacity"
PROBE_BYTES = 64 << 20  # tens of milliseconds of an NVMe disk, half a second of a spinning one
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRate:
    """Sequential rates of a path, in 1e9 bytes per second."""

    read_gbps: float
    write_gbps: float

    @property
    def both_gbps(self) -> float:
        """Of what is read and written back, as moments are: bytes one way over the time of both."""
        return 1 / (1 / self.read_gbps + 1 / self.write_gbps)


def measure_rate(
    path: Path, *, depth: int, block_bytes: int, engine: str | None = None
) -> DiskRate:
    """Write and read a probe of 64 MiB under `path`, past the page cache where that works.

    `OSError` with the path when it cannot be written, also for want of space.
    """
    pieces = map_slab(PROBE_BYTES, torch.uint8)
    pieces.fill_(0x5A)  # not zeros: some disks store those for nothing
    with (
        open_queue(depth, block_bytes, engine) as queue,
        contextlib.closing(RunDirectory(path)) as folder,  # a crash here is cleaned up, too
        queue.open(folder.path / "probe", PROBE_BYTES) as file,
    ):
        # Twice: the first write of fresh blocks also pays for the file system's bookkeeping.
        writes = [_seconds(queue, file, pieces, write=True) for _ in range(2)]
        read_s = _seconds(queue, file, pieces, write=False)
    return DiskRate(read_gbps=PROBE_BYTES / read_s / 1e9, write_gbps=PROBE_BYTES / writes[-1] / 1e9)


def _seconds(queue: IoQueue, file: IoFile, pieces: torch.Tensor, *, write: bool) -> float:
    begin = time.perf_counter()
    submit = queue.write if write else queue.read
    queue.wait(submit(file, 0, pieces.data_ptr(), PROBE_BYTES))
    return max(time.perf_counter() - begin, 1e-9)


def open_queue(
    depth: int,
    block_bytes: int,
    engine: str | None,
    registered: Sequence[tuple[int, int]] = (),
) -> IoQueue:
    """An `IoQueue`; ConfigError where the kernel refuses the engine that the config names."""
    try:
        return IoQueue(depth, block_bytes, engine, registered)
    except OSError as error:
        if engine is None:
            raise
        raise ConfigError(
            f'{ENGINE_KEY}: got "{engine}", which the kernel refuses here ({error.strerror}). '
            'Remove it, or set "threads".'
        ) from error


def check_paths(paths: Sequence[Path]) -> None:
    """Raises ConfigError for a path that is missing, no directory, read-only, or given twice."""
    if not paths:
        raise ConfigError(f"{PATH_KEY}: got no path, expected a directory on an NVMe disk.")
    for path in paths:
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist"
            raise ConfigError(
                f'{PATH_KEY}: "{path}" {what}, expected a directory on an NVMe disk. '
                "Make it (and mount the disk), or name another."
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise unwritable(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))
    if len({path.resolve() for path in paths}) < len(paths):
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{PATH_KEY}: got one directory twice in {names}. Name each once.")


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for a path in which nothing can be made."""
    return ConfigError(
        f'{PATH_KEY}: "{path}" cannot be written ({error.strerror}). Give this user the right to '
        "write there (or mount it read-write), or name another directory."
    )


def check_capacity(need_bytes: int, capacity_bytes: int | None) -> None:
    """Raises BudgetError when the files together are larger than the configured capacity."""
    if capacity_bytes is not None and need_bytes > capacity_bytes:
        raise BudgetError(
            f"{CAPACITY_KEY}: what spills needs {need_bytes} bytes ({need_bytes / GIB:.2f} GiB), "
            f"and {capacity_bytes} ({capacity_bytes / GIB:.2f} GiB) are allowed. Raise it, or give "
            "more to stronghold.host_memory so that less spills."
        )


def check_space(need_bytes: Mapping[Path, int]) -> None:
    """Raises BudgetError when a file system has less room than the paths on it need together."""
    by_device: dict[int, list[Path]] = {}
    for path in need_bytes:
        by_device.setdefault(path.stat().st_dev, []).append(path)
    for paths in by_device.values():
        need = sum(need_bytes[path] for path in paths)
        have = free_bytes(paths[0])
        if need > have:
            raise no_space(paths, need, have)


def no_space(paths: Sequence[Path], need_bytes: int, have_bytes: int) -> BudgetError:
    """The error for a disk that is too small."""
    names = ", ".join(f'"{path}"' for path in paths)
    return BudgetError(
        f"{PATH_KEY}: what spills to {names} needs {need_bytes} bytes ({need_bytes / GIB:.2f} GiB)"
        f", and the disk has {have_bytes} free ({have_bytes / GIB:.2f} GiB). Free "
        f"{need_bytes - have_bytes} bytes there, add a path on another disk, or give more to "
        "stronghold.host_memory so that less spills."
    )


def free_bytes(path: Path) -> int:
    """What this user may still write under `path`, in whole pages."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize // ALIGNMENT * ALIGNMENT
