"""The doctor's rules: each compares a measured figure with a bound, and names a remedy.

A rule stands here if its remedy is something that a user can carry out (a command, a config key, a
purchase, a mount option, a limit), and if the remedy changes the speed of training or the size of
the model that fits. Each bound has its reason beside it. Pure: it measures and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stronghold.tools.doctor.findings import Findings

GIB = float(1 << 30)
# Pinned copies reach 0.78 to 0.85 of the standard's rate: packet headers, flow control.
LINK_SHARE = 0.7
SLOWEST_LINK_GBPS = 11.0  # PCIe 3.0 x16, the link of the oldest machines in use
# One core draws half to two thirds of two channels, and nearly all of one.
CHANNEL_GAIN = 1.25
CHANNEL_CORES = 4
SLOWEST_READ_GBPS = 1.5  # NVMe disks give two to four times as much
SLOWEST_WRITE_GBPS = 0.75
AVAILABLE_SHARE = 0.5
# the system swaps out so much of idle processes without need
SWAP_USED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A setting or a part that makes training slower, or the largest model smaller."""

    what: str
    got: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: got {self.got}, expected {self.expected}; {self.remedy}"


def problems_of(findings: Findings) -> tuple[Problem, ...]:
    """The problems of a machine, the gravest first."""
    groups = (_link_problems, _cpu_problems, _system_problems, _disk_problems)
    return tuple(problem for group in groups for problem in group(findings))


def _link_problems(findings: Findings) -> Iterator[Problem]:
    if findings.one_memory:
        yield Problem(
            what="CPU and GPU share one memory",
            got=findings.profile.name,
            expected="a GPU with memory of its own, in which offloaded layers free room",
            remedy="train without a stronghold section, or with resident_layers and "
            'resident_updates "all" and "gpu": a streamed layer lies in this memory twice, and '
            "copies win nothing; states on NVMe do free room",
        )
    if findings.pin_error:
        yield Problem(
            what="host memory cannot be pinned",
            got=f"{findings.pinnable_bytes / GIB:.2f} GiB of host memory could be pinned, then: "
            f"{findings.pin_error}",
            expected="memory that the GPU reads and writes by itself; the CPU copies unpinned "
            "memory once more",
            remedy="raise the limit of locked memory (ulimit -l unlimited; in a container "
            "--ulimit memlock=-1; under WSL2 more memory in .wslconfig)",
        )
    if not findings.emulated:
        yield from _slow_link(findings)


def _slow_link(findings: Findings) -> Iterator[Problem]:
    link = findings.link
    slower = min(findings.profile.fetch_gbps, findings.profile.offload_gbps)
    # An idle link runs at its lowest speed, so the best speed of card and slot counts.
    standard = 0.0 if link is None else link.best_gbps
    expected = LINK_SHARE * standard or SLOWEST_LINK_GBPS
    if slower >= expected:
        return
    remedy = (
        "put the card into a slot that the processor drives, of the card's generation, check the "
        "link speed in the BIOS, and run on the cores of the GPU's NUMA node (nvidia-smi topo -m)"
    )
    if link is not None and link.width < link.max_width:
        remedy = (
            f"it runs with {link.width} of {link.max_width} lanes: move the card to a slot with "
            "all lanes, without a riser, and empty the slot that shares them"
        )
    best = f" of {link.max_speed:g} GT/s x{link.max_width}" if link and standard else ""
    yield Problem(
        what="slow link between host and GPU",
        got=f"{slower:.1f} GB/s" + (f" on {link}" if link is not None else ""),
        expected=f"{expected:.0f} GB/s or more{best}",
        remedy=remedy,
    )


def _cpu_problems(findings: Findings) -> Iterator[Problem]:
    rates = findings.profile.memory_gbps
    best, one = max(rates.values()), rates[min(rates)]
    if max(rates) >= CHANNEL_CORES and best < CHANNEL_GAIN * one:
        yield Problem(
            what="few memory channels",
            got=f"{best:.0f} GB/s with {max(rates)} threads, {one:.0f} with one",
            expected=f"{CHANNEL_GAIN * one:.0f} GB/s or more",
            remedy="put a memory module into every channel (`dmidecode -t memory` lists them): "
            "Adam on the CPU is as fast as memory",
        )
    if findings.isa != findings.best_isa:
        yield Problem(
            what="Adam does not use the best instructions",
            got=findings.isa,
            expected=findings.best_isa,
            remedy="unset STRONGHOLD_ISA",
        )
    elif findings.isa == "scalar":
        yield Problem(
            what="Adam runs without vector instructions",
            got="scalar code",
            expected="AVX2, AVX-512 or NEON",
            remedy="let the virtual machine show the processor's instructions (cpu "
            "host-passthrough), or use a processor made after 2013",
        )


def _system_problems(findings: Findings) -> Iterator[Problem]:
    limits = findings.limits
    quota, locked = limits.cpu_quota, limits.locked_bytes
    enough = AVAILABLE_SHARE * limits.usable_bytes
    if quota is not None and quota < limits.num_cores:
        yield Problem(
            what="the control group stops threads that compute too long",
            got=f"{quota:g} cores' time for {limits.num_cores} cores",
            expected="no quota, or as many cores as it pays for",
            remedy=f"start the container with --cpuset-cpus instead of --cpus, or set "
            f"stronghold.cpu_threads to {max(1, int(quota))}",
        )
    if limits.available_bytes < enough:
        yield Problem(
            what="other processes hold most of the host memory",
            got=f"{limits.available_bytes / GIB:.0f} of {limits.usable_bytes / GIB:.0f} GiB free",
            expected=f"{enough / GIB:.0f} GiB or more",
            remedy="end the processes that hold it, and remove files from /dev/shm",
        )
    if limits.swap_used_bytes > SWAP_USED_BYTES:
        yield Problem(
            what="swap is in use",
            got=f"{limits.swap_used_bytes / GIB:.1f} of {limits.swap_bytes / GIB:.1f} GiB used",
            expected="none: states that do not fit belong on NVMe, in large transfers",
            remedy="end other processes that hold memory, then swapoff -a",
        )
    # A refusal of pinned memory has the same remedy, and is known for certain.
    limited = locked is not None and locked < enough
    if locked is not None and limited and not findings.emulated and not findings.pin_error:
        yield Problem(
            what="the limit of locked memory is small",
            got=f"ulimit -l of {locked / GIB:.2f} GiB",
            expected="unlimited, since weights, gradients and offloaded activations are pinned",
            remedy="ulimit -l unlimited (for good: `* - memlock unlimited` in "
            "/etc/security/limits.conf; in a container --ulimit memlock=-1)",
        )
    if limits.overcommit == 2:
        yield Problem(
            what="memory is promised only where it is backed",
            got="vm.overcommit_memory = 2",
            expected="0 or 1",
            remedy="sysctl vm.overcommit_memory=0: otherwise the system refuses large mappings "
            "although memory is free",
        )
    if limits.huge_pages == "never":
        yield Problem(
            what="huge pages are off",
            got="transparent_hugepage = never",
            expected="madvise or always: 10 to 27 % of Adam's rate",
            remedy="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _disk_problems(findings: Findings) -> Iterator[Problem]:
    disk = findings.disk
    if disk is None or disk.error:
        return
    if not disk.direct:
        yield Problem(
            what="files pass through the page cache",
            got=f"no O_DIRECT in {disk.path}",
            expected="a local file system: ext4 or xfs",
            remedy="name a directory on a local disk with --path; network file systems, overlays "
            "and tmpfs cannot hold spilled states well",
        )
        return
    read, write = disk.read_gbps, disk.write_gbps
    if read < SLOWEST_READ_GBPS or write < SLOWEST_WRITE_GBPS:
        yield Problem(
            what="slow disk",
            got=f"{read:.2f} GB/s read, {write:.2f} GB/s written in {disk.path}",
            expected=f"{SLOWEST_READ_GBPS:g} GB/s and {SLOWEST_WRITE_GBPS:g} GB/s, as NVMe gives",
            remedy="keep states in RAM, or name a directory on a local NVMe disk with --path",
        )
