"""Laws of what the system allows: control groups of both versions, as their files say it."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from stronghold import limits
from stronghold.errors import ConfigError

GIB = 1 << 30
UNLIMITED = 0x7FFFFFFFFFFFF000  # what version 1 says


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_a_group_of_version_2_limits_with_all_groups_above_it(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job",
            "sys/fs/cgroup/user/memory.max": 8 * GIB,
            "sys/fs/cgroup/user/memory.current": 6 * GIB,
            "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 9",
            "sys/fs/cgroup/user/job/memory.max": "max",
            "sys/fs/cgroup/user/job/memory.current": 5 * GIB,
            "sys/fs/cgroup/user/cpu.max": "400000 100000",
            "sys/fs/cgroup/user/job/cpu.max": "max 100000",
        },
    )
    # cached files are given up first
    assert limits.memory_groups(root) == [(8 * GIB, 5 * GIB)]
    assert limits.cpu_quota(root) == 4.0


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """/proc/self/cgroup may name a path of the host that the container has not mounted."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../docker/abc",
            "sys/fs/cgroup/memory.max": 4 * GIB,
            "sys/fs/cgroup/memory.current": GIB,
            "sys/fs/cgroup/cpu.max": "150000 100000",
        },
    )
    assert limits.memory_groups(root) == [(4 * GIB, GIB)]
    assert limits.cpu_quota(root) == 1.5


def test_groups_of_version_1_are_read_by_controller(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 20 * GIB,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 16 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": 250000,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": 100000,
        },
    )
    assert limits.memory_groups(root) == [(16 * GIB, 2 * GIB)]
    assert limits.cpu_quota(root) == 2.5


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "0::/"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"},
        # and nobody says how much
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": GIB},
        {"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "nonsense"},
    ],
)
def test_without_limits_there_are_none(tmp_path: Path, files: dict[str, object]) -> None:
    root = tree(tmp_path, files)
    assert limits.memory_groups(root) == []
    assert limits.cpu_quota(root) is None


def test_the_least_of_machine_and_groups_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory_groups", lambda: [(3 * GIB, GIB), (5000, 2000)])
    assert limits.available_host_bytes() == 3000
    monkeypatch.setattr(limits, "memory_groups", lambda: [(5000, 9000)])
    assert limits.available_host_bytes() == 0
    monkeypatch.setattr(limits, "memory_groups", list)
    assert limits.available_host_bytes() == pytest.approx(
        psutil.virtual_memory().available, rel=0.2
    )


def test_memory_that_the_machine_will_get_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine of 16 GiB that can grow to 100: 10 are free now, and 84 will come."""
    now = SimpleNamespace(total=16 * GIB, available=10 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    monkeypatch.setattr(limits, "memory_groups", list)
    assert limits.available_host_bytes() == 10 * GIB
    monkeypatch.setenv("STRONGHOLD_HOST_MEMORY", str(100 * GIB))
    assert limits.available_host_bytes() == 94 * GIB
    assert limits.host_limits().usable_bytes == 100 * GIB
    monkeypatch.setattr(limits, "memory_groups", lambda: [(40 * GIB, 9 * GIB)])
    assert limits.available_host_bytes() == 31 * GIB


def test_less_than_the_machine_has_is_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(total=16 * GIB, available=10 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    monkeypatch.setattr(limits, "memory_groups", list)
    monkeypatch.setenv("STRONGHOLD_HOST_MEMORY", str(12 * GIB))
    assert limits.available_host_bytes() == 10 * GIB
    monkeypatch.setenv("STRONGHOLD_HOST_MEMORY", str(4 * GIB))
    assert limits.available_host_bytes() == 4 * GIB
    assert limits.host_limits().usable_bytes == 4 * GIB


@pytest.mark.parametrize("text", ["115GB", "0", "-5", "1e9"])
def test_memory_is_stated_in_whole_bytes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRONGHOLD_HOST_MEMORY", text)
    with pytest.raises(ConfigError, match=r"STRONGHOLD_HOST_MEMORY: got .*expected a whole number"):
        limits.available_host_bytes()


def test_pages_of_files_on_disks_are_found(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryFile(dir=tmp_path) as on_disk,
        open(os.memfd_create("m"), "wb") as in_ram,
    ):
        for number, is_on_disk in ((on_disk.fileno(), True), (in_ram.fileno(), False), (-1, False)):
            if number >= 0:
                os.truncate(number, mmap.PAGESIZE)
            pages = torch.frombuffer(mmap.mmap(number, mmap.PAGESIZE), dtype=torch.uint8)
            found = any(pages.data_ptr() in each for each in limits.mapped_files())
            assert found == is_on_disk


def test_the_groups_limit_is_what_the_host_has() -> None:
    roomy = limits.HostLimits(memory_bytes=8 * GIB, available_bytes=GIB, cgroup_bytes=9 * GIB)
    assert roomy.usable_bytes == 8 * GIB
    tight = limits.HostLimits(memory_bytes=8 * GIB, available_bytes=GIB, cgroup_bytes=2 * GIB)
    assert tight.usable_bytes == 2 * GIB


def test_this_machines_limits_are_those_that_the_system_states() -> None:
    now = limits.host_limits()
    assert now.memory_bytes == psutil.virtual_memory().total
    assert now.num_cores == len(os.sched_getaffinity(0))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert now.locked_bytes == (None if soft == resource.RLIM_INFINITY else soft)
    assert 0 < now.available_bytes <= now.usable_bytes


@pytest.mark.parametrize(
    ("num_cores", "compute_threads", "expected"),
    [(1, 1, 1), (2, 1, 1), (16, 1, 15), (2, 2, 1), (7, 4, 3), (8, 8, 1)],
)
def test_updates_get_the_cores_that_compute_leaves(
    num_cores: int, compute_threads: int, expected: int
) -> None:
    assert limits.update_cores(num_cores, compute_threads) == expected
