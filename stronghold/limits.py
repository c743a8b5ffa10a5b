"""What the system lets this process have: memory, swap, locked memory, cores.

Owns the reading of control groups, resource limits and /proc, which are read anew by every call.
Never allocates or decides anything. Any thread may enter.

[Note: memory that grows] Some virtual machines start with little memory and get more as they use
it. Linux then reports the memory of now. STRONGHOLD_HOST_MEMORY, a whole number of bytes, is what
the machine can have. A number below the machine's memory is a cap on this process's share.
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
MANY_CORES, LANE_CORES = 8, 2  # from so many cores on, two are left to the lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Sizes in bytes; None is "no limit", or unknown where the system does not say.

    `memory_bytes` is the machine's, or STRONGHOLD_HOST_MEMORY ([Note: memory that grows]);
    `available_bytes` what this process may still take, `cgroup_bytes` the least limit of its
    control groups, `locked_bytes` RLIMIT_MEMLOCK.
    `cpu_quota` is the control group's, in cores. `overcommit` is vm.overcommit_memory;
    `huge_pages` the chosen word of transparent_hugepage/enabled, "" where there is none.
    """

    memory_bytes: int
    available_bytes: int
    cgroup_bytes: int | None = None
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    locked_bytes: int | None = None
    num_cores: int = 1
    cpu_quota: float | None = None
    overcommit: int = 0
    huge_pages: str = ""

    @property
    def usable_bytes(self) -> int:
        """The machine's memory, or the control group's limit if that is less."""
        return min(self.memory_bytes, self.cgroup_bytes or self.memory_bytes)


def host_limits() -> HostLimits:
    """The limits as they are now."""
    swap = psutil.swap_memory()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    groups = memory_groups()
    huge_pages = _text(_ROOT / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", huge_pages)
    return HostLimits(
        memory_bytes=stated_host_bytes() or int(psutil.virtual_memory().total),
        available_bytes=available_host_bytes(),
        cgroup_bytes=min((limit for limit, _ in groups), default=None),
        swap_bytes=int(swap.total),
        swap_used_bytes=int(swap.used),
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        overcommit=_number(_text(_ROOT / "proc/sys/vm/overcommit_memory")) or 0,
        huge_pages=chosen[1] if chosen else "",
    )


def stated_host_bytes() -> int | None:
    """STRONGHOLD_HOST_MEMORY in bytes, None without it. ConfigError for anything but a whole number
    above 0. See [Note: memory that grows]."""
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
    """How many of `num_cores` the CPU optimizer gets by default. The training thread or autograd's,
    one of which waits for the other, computes with `compute_threads`. The transfer lanes copy and
    launch beside them; with fewer than `MANY_CORES` they share the optimizer's."""
    lanes = LANE_CORES if num_cores >= MANY_CORES else 0
    return max(1, num_cores - compute_threads - lanes)


def available_host_bytes() -> int:
    """What this process may still take, of the machine and of its control groups. Memory that the
    machine can still get counts ([Note: memory that grows])."""
    memory = psutil.virtual_memory()
    available = int(memory.available)
    stated = stated_host_bytes()
    if stated is not None:
        available = min(stated, available + max(0, stated - int(memory.total)))
    return max(0, min([available, *(limit - used for limit, used in memory_groups())]))


def memory_groups(root: Path = _ROOT) -> list[tuple[int, int]]:
    """(limit, bytes in use) of every control group above this process that has a memory limit.
    Cached files that nobody touched lately do not count: the kernel gives them up first."""
    found = []
    for folder in _group_folders(root, "memory"):
        if "fs/cgroup/memory" in folder.as_posix():
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            names = ("memory.max", "memory.current", "inactive_file")
        limit, used = _number(_text(folder / names[0])), _number(_text(folder / names[1]))
        # Version 1 says "no limit" with a number near 2**63.
        if limit is not None and used is not None and limit < 1 << 60:
            found.append((limit, used - _statistic(folder / "memory.stat", names[2])))
    return found


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The least share of processor time, in cores, that a control group grants; None: no limit."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        granted, each = _number(quota), _number(period)
        if granted is not None and each:  # "max", or -1, is no limit
            quotas.append(granted / each)
    return min(quotas, default=None)


def _group_folders(root: Path, controller: str) -> list[Path]:
    """The control groups of this process that exist, innermost first, of both versions. In a
    container the path may be the host's: then the mounted root is the container's own group."""
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
            inner = mount / path.strip("/")
            chain = [inner, *inner.parents]
            folders += [folder for folder in chain if folder.is_relative_to(mount)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):  # absent, or not for us
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0
