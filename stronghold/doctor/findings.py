"""What was found on a machine, and what is wrong with it.

Pure: owns the rules and their thresholds; measures and prints nothing. Each rule looks at the
findings and answers with a problem or None. Every threshold has its reason beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stronghold.doctor.disk import DiskRates
from stronghold.limits import HostLimits
from stronghold.plan.profile import MachineProfile

GIB = float(1 << 30)
# Bytes per second and lane of PCI Express after its line code, by the transfers per second that
# sysfs names: generations 1 to 6.
LANE_GBPS = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.969, 32.0: 3.938, 64.0: 7.563}
# Pinned copies reach 0.78 to 0.85 of that: packet headers, flow control.
LINK_SHARE = 0.7
SLOWEST_LINK_GBPS = 11.0  # PCIe 3.0 x16, what the oldest machines in use have
DUPLEX_SHARE = 1.25  # a link that is really shared by both directions gives 1.0
# While Adam runs, the copies take their own bytes from the same memory.
MEMORY_PER_LINK = 2.0
# One core draws half to two thirds of two channels, and nearly all of one.
CHANNEL_GAIN = 1.25
CHANNEL_CORES = 4
ADAM_SHARE = 0.7  # with AVX2 or more it reaches 0.9 and more of what memory gives
SLOWEST_READ_GBPS, SLOWEST_WRITE_GBPS = 1.5, 0.75  # NVMe disks give two to four times as much
AVAILABLE_SHARE = 0.5
SWAP_USED_BYTES = 64 << 20  # less was put away at leisure, long ago


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that makes training slower or smaller than this machine could."""

    what: str
    got: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: got {self.got}, expected {self.expected}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """The GPU's slot: 1e9 transfers per second and lane, and lanes, as they are and at most."""

    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def best_gbps(self) -> float:
        """By the standard, per direction, at the highest speed; 0 for an unknown one."""
        return LANE_GBPS.get(self.max_speed, 0.0) * self.max_width

    @property
    def best(self) -> str:
        return f"{self.max_speed:g} GT/s x{self.max_width}"

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """One machine. `disk` is None where none was asked for, `link` where there is no PCIe link or
    the system does not describe it; `isa` is the kernels' and `best_isa` the CPU's. `one_memory`:
    the GPU's memory is the host's."""

    profile: MachineProfile
    limits: HostLimits
    emulated: bool
    isa: str
    best_isa: str
    pin_error: str = ""
    pinnable_bytes: int = 0  # until `pin_error`
    one_memory: bool = False
    link: PcieLink | None = None
    disk: DiskRates | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The gravest first."""
        found = [rule(self) for rule in RULES]
        return tuple(problem for problem in found if problem is not None)


def _pinning(findings: Findings) -> Problem | None:
    if not findings.pin_error:
        return None
    return Problem(
        what="host memory cannot be pinned",
        got=f"{findings.pinnable_bytes / GIB:.2f} GiB of host memory could be pinned, then: "
        f"{findings.pin_error}",
        expected="memory that the GPU reads and writes by itself; the rest is copied once more, by "
        "the CPU",
        remedy="raise the limit of locked memory (ulimit -l unlimited; in a container "
        "--ulimit memlock=-1; under WSL2 more memory in .wslconfig)",
    )


def _one_memory(findings: Findings) -> Problem | None:
    if not findings.one_memory:
        return None
    return Problem(
        what="CPU and GPU share one memory",
        got=findings.profile.name,
        expected="a GPU with memory of its own: what leaves it makes room there",
        remedy="train without a stronghold section, or with resident_layers and resident_updates "
        '"all" and "gpu": here layers that stream are kept twice, and copies win nothing; states '
        "on NVMe do make room",
    )


def _slow_link(findings: Findings) -> Problem | None:
    if findings.emulated:
        return None
    link, profile = findings.link, findings.profile
    slower = min(profile.fetch_gbps, profile.drain_gbps)
    # Idle links run at their lowest speed: the card's and slot's best counts where now is less.
    standard = 0.0 if link is None else link.best_gbps
    expected = LINK_SHARE * standard or SLOWEST_LINK_GBPS
    if slower >= expected:
        return None
    if link is not None and link.width < link.max_width:
        remedy = (
            f"it runs with {link.width} of {link.max_width} lanes: move the card to a slot with "
            "all lanes, without a riser, and empty the slot that shares them"
        )
    else:
        remedy = (
            "put the card into a slot of the processor's own, of the card's generation, check "
            "the BIOS's link speed, and run on the cores of the GPU's NUMA node (nvidia-smi topo)"
        )
    return Problem(
        what="slow link between host and GPU",
        got=f"{slower:.1f} GB/s" + (f" on {link}" if link is not None else ""),
        expected=f"{expected:.0f} GB/s or more" + (f" of {link.best}" if link and standard else ""),
        remedy=remedy,
    )


def _shared_link(findings: Findings) -> Problem | None:
    profile = findings.profile
    alone = max(profile.fetch_gbps, profile.drain_gbps)
    if findings.emulated or profile.duplex_gbps >= DUPLEX_SHARE * alone:
        return None
    return Problem(
        what="both directions of the link share one",
        got=f"{profile.duplex_gbps:.1f} GB/s together",
        expected=f"{DUPLEX_SHARE * alone:.0f} GB/s or more, {alone:.1f} being one direction's",
        remedy="fill more memory channels; switch the IOMMU to pass-through (iommu=pt)",
    )


def _few_channels(findings: Findings) -> Problem | None:
    rates = findings.profile.memory_gbps
    best, one = max(rates.values()), rates[min(rates)]
    if max(rates) < CHANNEL_CORES or best >= CHANNEL_GAIN * one:
        return None
    return Problem(
        what="few memory channels",
        got=f"{best:.0f} GB/s with {max(rates)} threads, {one:.0f} with one",
        expected=f"{CHANNEL_GAIN * one:.0f} GB/s or more",
        remedy="put a memory module into every channel (`dmidecode -t memory` lists them): Adam "
        "on the CPU is as fast as memory",
    )


def _low_bandwidth(findings: Findings) -> Problem | None:
    profile = findings.profile
    best = max(profile.memory_gbps.values())
    expected = MEMORY_PER_LINK * profile.duplex_gbps
    if findings.emulated or best >= expected:
        return None
    return Problem(
        what="host memory is slow for this link",
        got=f"{best:.0f} GB/s",
        expected=f"{expected:.0f} GB/s or more, for Adam beside copies of "
        f"{profile.duplex_gbps:.0f} GB/s",
        remedy="fill every memory channel, use faster modules, or train with more tokens per step",
    )


def _no_vectors(findings: Findings) -> Problem | None:
    if findings.isa != "scalar":
        return None
    forced = findings.best_isa != "scalar"
    return Problem(
        what="Adam runs without vector instructions",
        got="scalar code",
        expected=f"{findings.best_isa}" if forced else "AVX2, AVX-512 or NEON",
        remedy="unset STRONGHOLD_ISA"
        if forced
        else "let the virtual machine show the processor's instructions (cpu host-passthrough), "
        "or use a processor made after 2013",
    )


def _forced_isa(findings: Findings) -> Problem | None:
    if findings.isa in ("scalar", findings.best_isa):
        return None
    return Problem(
        what="Adam does not use the best instructions",
        got=findings.isa,
        expected=findings.best_isa,
        remedy="unset STRONGHOLD_ISA",
    )


def _slow_adam(findings: Findings) -> Problem | None:
    profile = findings.profile
    best, memory = max(profile.adam_gbps.values()), max(profile.memory_gbps.values())
    if best >= ADAM_SHARE * memory:
        return None
    return Problem(
        what="Adam is slower than memory",
        got=f"{best:.0f} of {memory:.0f} GB/s",
        expected=f"{ADAM_SHARE * memory:.0f} GB/s or more",
        remedy="give the process more cores, and stop what else computes on them",
    )


def _cpu_quota(findings: Findings) -> Problem | None:
    quota, cores = findings.limits.cpu_quota, findings.limits.num_cores
    if quota is None or quota >= cores:
        return None
    return Problem(
        what="the control group stops threads that compute too long",
        got=f"{quota:g} cores' time for {cores} cores",
        expected="no quota, or as many cores as it pays for",
        remedy=f"start the container with --cpuset-cpus instead of --cpus, or set "
        f"stronghold.cpu_threads to {max(1, int(quota))}",
    )


def _swap(findings: Findings) -> Problem | None:
    limits = findings.limits
    if limits.swap_bytes == 0:
        return None
    used = limits.swap_used_bytes > SWAP_USED_BYTES
    return Problem(
        what="swap is in use" if used else "swap is on",
        got=f"{limits.swap_used_bytes / GIB:.1f} of {limits.swap_bytes / GIB:.1f} GiB used",
        expected="none: states that do not fit belong on NVMe, in large transfers",
        remedy="swapoff -a" + (", after something else has given memory back" if used else ""),
    )


def _available(findings: Findings) -> Problem | None:
    limits = findings.limits
    if limits.available_bytes >= AVAILABLE_SHARE * limits.usable_bytes:
        return None
    return Problem(
        what="others hold most of the host memory",
        got=f"{limits.available_bytes / GIB:.0f} of {limits.usable_bytes / GIB:.0f} GiB free",
        expected=f"{AVAILABLE_SHARE * limits.usable_bytes / GIB:.0f} GiB or more",
        remedy="end what holds it, and remove files from /dev/shm",
    )


def _locked_memory(findings: Findings) -> Problem | None:
    limits = findings.limits
    locked = limits.locked_bytes
    if findings.emulated or locked is None or locked >= AVAILABLE_SHARE * limits.usable_bytes:
        return None
    return Problem(
        what="the limit of locked memory is small",
        got=f"ulimit -l of {locked / GIB:.2f} GiB",
        expected="unlimited, since weights, gradients and offloaded activations are pinned",
        remedy="ulimit -l unlimited (for good: `* - memlock unlimited` in "
        "/etc/security/limits.conf; in a container --ulimit memlock=-1)",
    )


def _overcommit(findings: Findings) -> Problem | None:
    if findings.limits.overcommit != 2:
        return None
    return Problem(
        what="memory is promised only where it is backed",
        got="vm.overcommit_memory = 2",
        expected="0 or 1",
        remedy="sysctl vm.overcommit_memory=0: large mappings are refused otherwise although "
        "memory is free",
    )


def _huge_pages(findings: Findings) -> Problem | None:
    if findings.limits.huge_pages != "never":
        return None
    return Problem(
        what="huge pages are off",
        got="transparent_hugepage = never",
        expected="madvise or always: 10 to 27 % of Adam's rate",
        remedy="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _no_disk(findings: Findings) -> Problem | None:
    disk = findings.disk
    if disk is None or not disk.error:
        return None
    return Problem(
        what="the disk could not be measured",
        got=disk.error,
        expected=f"a file in {disk.path}",
        remedy="name a directory that can be written with --path",
    )


def _no_direct(findings: Findings) -> Problem | None:
    disk = findings.disk
    if disk is None or disk.error or disk.direct:
        return None
    return Problem(
        what="files pass through the page cache",
        got=f"no O_DIRECT in {disk.path}",
        expected="a local file system: ext4 or xfs",
        remedy="name a directory on a local disk with --path; network file systems, overlays and "
        "tmpfs cannot hold spilled states well",
    )


def _no_io_uring(findings: Findings) -> Problem | None:
    disk = findings.disk
    if disk is None or disk.error or disk.engine == "io_uring":
        return None
    if not disk.note:  # nothing was refused: it was not asked for
        return Problem(
            what="files are read and written by threads",
            got=disk.engine,
            expected="io_uring, which costs less processor time",
            remedy="unset STRONGHOLD_IO_ENGINE",
        )
    return Problem(
        what="the kernel refuses io_uring",
        got=disk.note,
        expected="io_uring, which costs less processor time than threads that read and write",
        remedy="sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that permits "
        "io_uring_setup, io_uring_enter and io_uring_register",
    )


def _slow_disk(findings: Findings) -> Problem | None:
    disk = findings.disk
    if disk is None or disk.error or not disk.direct:
        return None
    read, write = max(disk.read_gbps.values()), max(disk.write_gbps.values())
    if read >= SLOWEST_READ_GBPS and write >= SLOWEST_WRITE_GBPS:
        return None
    return Problem(
        what="slow disk",
        got=f"{read:.2f} GB/s read, {write:.2f} GB/s written in {disk.path}",
        expected=f"{SLOWEST_READ_GBPS:g} GB/s and {SLOWEST_WRITE_GBPS:g} GB/s, as NVMe gives",
        remedy="keep states in RAM, or name a directory on a local NVMe disk with --path",
    )


RULES: tuple[Callable[[Findings], Problem | None], ...] = (
    _one_memory,
    _pinning,
    _slow_link,
    _shared_link,
    _few_channels,
    _low_bandwidth,
    _no_vectors,
    _forced_isa,
    _slow_adam,
    _cpu_quota,
    _available,
    _swap,
    _locked_memory,
    _overcommit,
    _huge_pages,
    _no_disk,
    _no_direct,
    _no_io_uring,
    _slow_disk,
)
