"""The system's limits for this process: memory, locked memory, cores.

Reads control groups, resource limits and /proc, anew at every call. Never allocates, and decides
nothing. Any thread may enter.

[Note: memory that grows] Some virtual machines start with little memory, and get more as they use
it. Linux reports the memory of the moment. The environment variable STRONGHOLD_HOST_MEMORY, a whole
number of bytes, is the memory that the machine can have. A number below the machine's memory is a
cap on this process's share.
"""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from stronghold.errors import ConfigError

HOST_MEMORY = "STRONGHOLD_HOST_MEMORY"
_ROOT = Path("/")
# version 1 of control groups writes a number near 2**63 for "no limit"
NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """The limits of the host. Sizes are in bytes. None is "no limit", or unknown.

    memory_bytes     the machine's memory, or STRONGHOLD_HOST_MEMORY ([Note: memory that grows])
    available_bytes  memory that this process may still take
    cgroup_bytes     the least memory limit of the process's control groups
    locked_bytes     RLIMIT_MEMLOCK: memory that the process may lock
    num_cores        cores on which the process may run
    cpu_quota        the control groups' limit, in cores
    huge_pages       the chosen word of transparent_hugepage/enabled, or ""
    """

    memory_bytes: int
    available_bytes: int
    cgroup_bytes: int | None = None
    locked_bytes: int | None = None
    num_cores: int = 1
    cpu_quota: float | None = None
    huge_pages: str = ""

    @property
    def usable_bytes(self) -> int:
        """The machine's memory, or the control group's limit if that is less."""
        return min(self.memory_bytes, self.cgroup_bytes or self.memory_bytes)


def host_limits() -> HostLimits:
    """Read the limits as they are now."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    group_limits = [limit for limit, _ in memory_groups()]
    huge_pages = _text(_ROOT / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", huge_pages)
    return HostLimits(
        memory_bytes=stated_host_bytes() or int(psutil.virtual_memory().total),
        available_bytes=available_host_bytes(),
        cgroup_bytes=min(group_limits, default=None),
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        huge_pages=chosen[1] if chosen else "",
    )


def stated_host_bytes() -> int | None:
    """STRONGHOLD_HOST_MEMORY in bytes, or None if it is not set ([Note: memory that grows]).

    Raises ConfigError for anything but a whole number above 0.
    """
    text = os.environ.get(HOST_MEMORY, "")
    if not text:
        return None
    number = _number(text)
    if not number:
        raise ConfigError(
            f"{HOST_MEMORY}: got {text!r}, expected a whole number of bytes, such as 115000000000"
        )
    return number


def update_cores(num_cores: int, compute_threads: int) -> int:
    """The number of cores that the CPU optimizer gets by default, of `num_cores`.

    The training thread and autograd's thread compute with `compute_threads`: one of the two waits
    for the other. The transfer lanes launch copies, and sleep. On an H200 with 16 cores an update
    alone moved 138 GB/s with 13 threads, and 148 with 15.
    """
    return max(1, num_cores - compute_threads)


def available_host_bytes() -> int:
    """Memory that this process may still take, of the machine and of its control groups.

    Memory that the machine can still get counts ([Note: memory that grows]).
    """
    memory = psutil.virtual_memory()
    available = int(memory.available)
    stated = stated_host_bytes()
    if stated is not None:
        growth = max(0, stated - int(memory.total))
        available = min(stated, available + growth)
    left_in_groups = [limit - used for limit, used in memory_groups()]
    return max(0, min([available, *left_in_groups]))


def mapped_files() -> list[range]:
    """The addresses at which this process has mapped files of disks, in ascending order.

    Their pages are the system's cache, which counts as available. Files in memory (/dev/shm,
    memfd) are left out.
    """
    mapped = []
    for line in _text(_ROOT / "proc/self/maps").splitlines():
        addresses, _, _, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/") and not path[0].startswith(("/dev/", "/memfd:")):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            mapped.append(range(begin, end))
    return mapped


def memory_groups(root: Path = _ROOT) -> list[tuple[int, int]]:
    """(limit, bytes in use) of every control group of this process that has a memory limit.

    Cached files that were not used lately do not count: the kernel gives them up first.
    """
    groups = []
    for folder in _group_folders(root, "memory"):
        is_version_1 = "fs/cgroup/memory" in folder.as_posix()
        if is_version_1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            names = ("memory.max", "memory.current", "inactive_file")
        limit_file, usage_file, cache_statistic = names
        limit = _number(_text(folder / limit_file))
        used = _number(_text(folder / usage_file))
        if limit is not None and used is not None and limit < NO_LIMIT_BYTES:
            cached = _statistic(folder / "memory.stat", cache_statistic)
            groups.append((limit, used - cached))
    return groups


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The least processor time that a control group grants, in cores. None if there is no limit."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        quota_text, _, period_text = _text(folder / "cpu.max").partition(" ")
        if not quota_text:
            quota_text = _text(folder / "cpu.cfs_quota_us")
            period_text = _text(folder / "cpu.cfs_period_us")
        quota, period = _number(quota_text), _number(period_text)
        if quota is not None and period:  # "max", or -1, is no limit
            quotas.append(quota / period)
    return min(quotas, default=None)


def _group_folders(root: Path, controller: str) -> list[Path]:
    """The control groups of this process that exist, innermost first, of both versions.

    In a container the path may be the host's. The mounted root is the container's group then.
    """
    folders: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":  # version 2
            mounts = [root / "sys/fs/cgroup"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (controller, controllers)]
        else:
            continue
        for mount in mounts:
            innermost = mount / path.strip("/")
            chain = [innermost, *innermost.parents]
            folders += [folder for folder in chain if folder.is_relative_to(mount)]
    distinct = dict.fromkeys(folders)
    return [folder for folder in distinct if folder.is_dir()]


def _text(path: Path) -> str:
    """Contents of a small file, or "" if it is absent or cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def _statistic(path: Path, name: str) -> int:
    """The number after `name` in a file of "name number" lines, or 0."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0
