"""What was found on a machine, what is wrong with it, and both as text.

Pure: owns the rules, their thresholds, each with its reason beside it, and the words; measures and
prints nothing. Beside each figure stands what it bounds in training, by the arithmetic of a bf16
model of 8 B parameters with exact fp32 AdamW, so that machines can be compared.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stronghold.limits import HostLimits
from stronghold.optim import DEFAULT
from stronghold.optim.states import EXACT, states_of
from stronghold.plan.cost import break_even
from stronghold.plan.machine import ADAM_BF16_BYTES, ADAM_LEAN_BYTES, MachineProfile

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

WIDTH = 100
PARAMETERS = 8e9
STATES = states_of(torch.bfloat16, EXACT, DEFAULT.moments)  # of what the report speaks
STATE_BYTES = 12  # of a parameter on the host: bf16 weight, 16-bit remainder, two fp32 moments
Row = tuple[str, str, str]


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

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """In 1e9 bytes/s; by depth for reads and writes alone, at the best depth for both at once.
    `error`: why nothing was measured. Not `direct`: the rates are the page cache's."""

    path: str
    engine: str = ""
    note: str = ""
    direct: bool = False
    read_gbps: dict[int, float]
    write_gbps: dict[int, float]
    mixed_gbps: float = 0.0
    error: str = ""

    @property
    def best_depth(self) -> int:
        """The least depth that gives 95 % of the fastest read and write together."""
        total = {depth: self.read_gbps[depth] + self.write_gbps[depth] for depth in self.read_gbps}
        return min(depth for depth, rate in total.items() if rate >= 0.95 * max(total.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """One machine. `disk` is None where none was asked for, `link` where there is no PCIe link or
    the system does not describe it; `isa` is the kernels' and `best_isa` the CPU's. `one_memory`:
    the GPU's memory is the host's; `dead_builds`: locks that builds of torch's extensions left."""

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
    dead_builds: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The gravest first."""
        groups = (_of_the_link, _of_memory_and_adam, _of_the_system, _of_the_disk)
        return tuple(problem for group in groups for problem in group(self))


# -- what is wrong --------------------------------------------------------------------------------
def _of_the_link(findings: Findings) -> Iterator[Problem]:
    link, profile = findings.link, findings.profile
    if findings.one_memory:
        yield Problem(
            what="CPU and GPU share one memory",
            got=profile.name,
            expected="a GPU with memory of its own: what leaves it makes room there",
            remedy="train without a stronghold section, or with resident_layers and "
            'resident_updates "all" and "gpu": here layers that stream are kept twice, and copies '
            "win nothing; states on NVMe do make room",
        )
    if findings.pin_error:
        yield Problem(
            what="host memory cannot be pinned",
            got=f"{findings.pinnable_bytes / GIB:.2f} GiB of host memory could be pinned, then: "
            f"{findings.pin_error}",
            expected="memory that the GPU reads and writes by itself; the rest is copied once "
            "more, by the CPU",
            remedy="raise the limit of locked memory (ulimit -l unlimited; in a container "
            "--ulimit memlock=-1; under WSL2 more memory in .wslconfig)",
        )
    if findings.emulated:
        return
    slower, alone = sorted((profile.fetch_gbps, profile.drain_gbps))
    # Idle links run at their lowest speed: the card's and slot's best counts where now is less.
    standard = 0.0 if link is None else link.best_gbps
    expected = LINK_SHARE * standard or SLOWEST_LINK_GBPS
    remedy = (
        "put the card into a slot of the processor's own, of the card's generation, check "
        "the BIOS's link speed, and run on the cores of the GPU's NUMA node (nvidia-smi topo)"
    )
    if link is not None and link.width < link.max_width:
        remedy = (
            f"it runs with {link.width} of {link.max_width} lanes: move the card to a slot with "
            "all lanes, without a riser, and empty the slot that shares them"
        )
    if slower < expected:
        best = f" of {link.max_speed:g} GT/s x{link.max_width}" if link and standard else ""
        yield Problem(
            what="slow link between host and GPU",
            got=f"{slower:.1f} GB/s" + (f" on {link}" if link is not None else ""),
            expected=f"{expected:.0f} GB/s or more{best}",
            remedy=remedy,
        )
    if profile.duplex_gbps < DUPLEX_SHARE * alone:
        yield Problem(
            what="both directions of the link share one",
            got=f"{profile.duplex_gbps:.1f} GB/s together",
            expected=f"{DUPLEX_SHARE * alone:.0f} GB/s or more, {alone:.1f} being one direction's",
            remedy="fill more memory channels; switch the IOMMU to pass-through (iommu=pt)",
        )


def _of_memory_and_adam(findings: Findings) -> Iterator[Problem]:
    profile, rates = findings.profile, findings.profile.memory_gbps
    best, one = max(rates.values()), rates[min(rates)]
    if max(rates) >= CHANNEL_CORES and best < CHANNEL_GAIN * one:
        yield Problem(
            what="few memory channels",
            got=f"{best:.0f} GB/s with {max(rates)} threads, {one:.0f} with one",
            expected=f"{CHANNEL_GAIN * one:.0f} GB/s or more",
            remedy="put a memory module into every channel (`dmidecode -t memory` lists them): "
            "Adam on the CPU is as fast as memory",
        )
    expected = MEMORY_PER_LINK * profile.duplex_gbps
    if not findings.emulated and best < expected:
        yield Problem(
            what="host memory is slow for this link",
            got=f"{best:.0f} GB/s",
            expected=f"{expected:.0f} GB/s or more, for Adam beside copies of "
            f"{profile.duplex_gbps:.0f} GB/s",
            remedy="fill every memory channel, use faster modules, or train with more tokens per "
            "step",
        )
    if findings.isa == "scalar":
        forced = findings.best_isa != "scalar"
        yield Problem(
            what="Adam runs without vector instructions",
            got="scalar code",
            expected=f"{findings.best_isa}" if forced else "AVX2, AVX-512 or NEON",
            remedy="unset STRONGHOLD_ISA"
            if forced
            else "let the virtual machine show the processor's instructions (cpu "
            "host-passthrough), or use a processor made after 2013",
        )
    elif findings.isa != findings.best_isa:
        yield Problem(
            what="Adam does not use the best instructions",
            got=findings.isa,
            expected=findings.best_isa,
            remedy="unset STRONGHOLD_ISA",
        )
    adam = max(profile.adam_gbps.values())
    if adam < ADAM_SHARE * best:
        yield Problem(
            what="Adam is slower than memory",
            got=f"{adam:.0f} of {best:.0f} GB/s",
            expected=f"{ADAM_SHARE * best:.0f} GB/s or more",
            remedy="give the process more cores, and stop what else computes on them",
        )


def _of_the_system(findings: Findings) -> Iterator[Problem]:
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
            what="others hold most of the host memory",
            got=f"{limits.available_bytes / GIB:.0f} of {limits.usable_bytes / GIB:.0f} GiB free",
            expected=f"{enough / GIB:.0f} GiB or more",
            remedy="end what holds it, and remove files from /dev/shm",
        )
    if limits.swap_bytes:
        used = limits.swap_used_bytes > SWAP_USED_BYTES
        yield Problem(
            what="swap is in use" if used else "swap is on",
            got=f"{limits.swap_used_bytes / GIB:.1f} of {limits.swap_bytes / GIB:.1f} GiB used",
            expected="none: states that do not fit belong on NVMe, in large transfers",
            remedy="swapoff -a" + (", after something else has given memory back" if used else ""),
        )
    if not findings.emulated and locked is not None and locked < enough:
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
            remedy="sysctl vm.overcommit_memory=0: large mappings are refused otherwise although "
            "memory is free",
        )
    if findings.dead_builds:
        yield Problem(
            what="builds of torch's extensions did not end",
            got=f"locks of an hour ago and more: {', '.join(findings.dead_builds)}",
            expected="none: who loads these operators (DeepSpeed does) waits for them for ever",
            remedy=f"rm {' '.join(map(shlex.quote, findings.dead_builds))}",
        )
    if limits.huge_pages == "never":
        yield Problem(
            what="huge pages are off",
            got="transparent_hugepage = never",
            expected="madvise or always: 10 to 27 % of Adam's rate",
            remedy="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _of_the_disk(findings: Findings) -> Iterator[Problem]:
    disk = findings.disk
    if disk is None:
        return
    if disk.error:
        yield Problem(
            what="the disk could not be measured",
            got=disk.error,
            expected=f"a file in {disk.path}",
            remedy="name a directory that can be written with --path",
        )
        return
    if not disk.direct:
        yield Problem(
            what="files pass through the page cache",
            got=f"no O_DIRECT in {disk.path}",
            expected="a local file system: ext4 or xfs",
            remedy="name a directory on a local disk with --path; network file systems, overlays "
            "and tmpfs cannot hold spilled states well",
        )
    if disk.engine != "io_uring" and disk.note:
        yield Problem(
            what="the kernel refuses io_uring",
            got=disk.note,
            expected="io_uring, which costs less processor time than threads that read and write",
            remedy="sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that "
            "permits io_uring_setup, io_uring_enter and io_uring_register",
        )
    elif disk.engine != "io_uring":  # nothing was refused: it was not asked for
        yield Problem(
            what="files are read and written by threads",
            got=disk.engine,
            expected="io_uring, which costs less processor time",
            remedy="unset STRONGHOLD_IO_ENGINE",
        )
    read, write = max(disk.read_gbps.values()), max(disk.write_gbps.values())
    if disk.direct and (read < SLOWEST_READ_GBPS or write < SLOWEST_WRITE_GBPS):
        yield Problem(
            what="slow disk",
            got=f"{read:.2f} GB/s read, {write:.2f} GB/s written in {disk.path}",
            expected=f"{SLOWEST_READ_GBPS:g} GB/s and {SLOWEST_WRITE_GBPS:g} GB/s, as NVMe gives",
            remedy="keep states in RAM, or name a directory on a local NVMe disk with --path",
        )


# -- as text --------------------------------------------------------------------------------------
def table(findings: Findings) -> str:
    """One line per figure, then the problems with their remedies."""
    title = f"{findings.profile.name}, {findings.profile.measured}"
    parts = (_link_rows, _host_rows, _disk_rows, _memory_rows)
    rows = [row for rows_of in parts for row in rows_of(findings)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [title, ""]
    for name, figure, meaning in rows:
        head = f"{name:<{widths[0]}}  {figure:>{widths[1]}}  "
        lines += _wrapped(head, " " * len(head), meaning) or [head.rstrip()]
    return "\n".join([*lines, "", *_problems(findings)])


def _link_rows(findings: Findings) -> Iterator[Row]:
    profile = findings.profile
    weights = 2 * PARAMETERS / 1e9
    where = f" ({findings.link})" if findings.link is not None else ""
    yield (
        f"host to device{where}",
        _gbps(profile.fetch_gbps),
        f"a bf16 8 B model streams its weights ({weights:.0f} GB) in "
        f"{_s(weights / profile.fetch_gbps)}, twice per step",
    )
    leave_s = _s(weights / profile.drain_gbps)
    yield "device to host", _gbps(profile.drain_gbps), f"its gradients leave in {leave_s}"
    both_s = _s(2 * weights / profile.duplex_gbps)
    meaning = f"backward moves weights in and gradients out in {both_s} or more"
    yield "both at once", _gbps(profile.duplex_gbps), meaning
    for dtype, rate in profile.flops.items():
        meaning = ""
        if dtype == "bf16":
            step_s = 6 * PARAMETERS * 8192 / rate
            tokens = break_even(profile, "bf16", STATES, recompute=False).link
            meaning = (
                f"a step of 8192 tokens computes for {_s(step_s)}; from {tokens:,.0f} tokens per "
                "step on, compute hides the weights' two trips"
            )
        yield f"matrix products, {dtype}", f"{rate / 1e12:.4g} TFLOP/s", meaning
    for dtype, by_tokens in (profile.attention_flops or {}).items():
        tokens = max(by_tokens)
        width, rate = max(by_tokens[tokens].items())
        backward = (profile.attention_backward_flops or {})[dtype][tokens][width] / 1e12
        meaning = (
            f"backward {backward:.4g} TFLOP/s, over {tokens} tokens, with heads {width} wide; "
            "pairs that a causal mask leaves out count, too"
        )
        yield f"attention, {dtype}", f"{rate / 1e12:.4g} TFLOP/s", meaning
    meaning = "updates of layers that stay on the device, normalisation, activations"
    yield "device memory", _gbps(profile.gpu_memory_gbps), meaning


def _host_rows(findings: Findings) -> Iterator[Row]:
    profile = findings.profile
    most = max(profile.memory_gbps)
    for threads, rate in profile.memory_gbps.items():
        meaning = "bounds Adam and both directions of the link together" if threads == most else ""
        yield f"host memory, {threads_in_words(threads)}", _gbps(rate), meaning
    best = max(profile.adam_gbps, key=lambda threads: profile.adam_gbps[threads])
    for threads, rate in profile.adam_gbps.items():
        seconds = PARAMETERS * ADAM_BF16_BYTES / (rate * 1e9)
        meaning = f"updates 8 B parameters in {_s(seconds)}"
        if threads == best:
            meaning += ", hidden when a forward pass takes as long"
        yield f"Adam ({findings.isa}), {threads_in_words(threads)}", _gbps(rate), meaning
    if profile.adam_lean_gbps:
        threads, rate = max(profile.adam_lean_gbps.items(), key=lambda item: item[1])
        seconds = PARAMETERS * ADAM_LEAN_BYTES / rate
        meaning = f"updates 8 B parameters in {_s(seconds * 1e-9)}"
        yield f"Adam, lean states, {threads_in_words(threads)}", _gbps(rate), meaning


def _disk_rows(findings: Findings) -> Iterator[Row]:
    disk = findings.disk
    if disk is None or disk.error:
        return
    states = STATE_BYTES * PARAMETERS / 1e9
    for what, rates in (("read", disk.read_gbps), ("write", disk.write_gbps)):
        depth = max(rates, key=lambda key: rates[key])
        others = ", ".join(f"{rate:.2f} at {key}" for key, rate in rates.items())
        yield (
            f"file {what}s, depth {depth}",
            f"{rates[depth]:.2f} GB/s",
            f"states of an 8 B model ({states:.0f} GB) pass in {_s(states / rates[depth])}; "
            f"by depth: {others}",
        )
    how = f"{disk.engine}, {'O_DIRECT' if disk.direct else 'page cache'}"
    yield (
        "file reads and writes",
        f"{disk.mixed_gbps:.2f} GB/s",
        f"both at once, summed: such states come and go in {_s(2 * states / disk.mixed_gbps)} "
        f"({how}, {disk.path})",
    )


def _memory_rows(findings: Findings) -> Iterator[Row]:
    profile, limits = findings.profile, findings.limits
    if findings.emulated:
        device, holds = "emulated device", "the host's memory: a budget limits it"
    else:
        on_device = profile.gpu_memory_bytes / (STATE_BYTES + 2) / 1e9
        device = "device memory"
        holds = f"holds states and gradients of {on_device:.1f} B parameters whole"
    count = f"{profile.num_gpus} of them; " if profile.num_gpus > 1 else ""
    yield f"{device}, size", _gib(profile.gpu_memory_bytes), f"{count}{holds}"
    limited = limits.cgroup_bytes is not None and limits.cgroup_bytes < limits.memory_bytes
    meaning = "limited by the control group" if limited else ""
    yield "host memory, size", _gib(limits.usable_bytes), meaning
    fits = limits.available_bytes / STATE_BYTES / 1e9
    meaning = f"holds exact AdamW states ({STATE_BYTES} bytes) of {fits:.1f} B parameters"
    yield "host memory, free", _gib(limits.available_bytes), meaning
    locked = "unlimited" if limits.locked_bytes is None else _gib(limits.locked_bytes)
    yield "locked memory", locked, "ulimit -l: what a process may pin"
    if limits.swap_bytes:
        yield "swap", _gib(limits.swap_bytes), f"{_gib(limits.swap_used_bytes)} used"
    else:
        yield "swap", "none", ""
    quota = "" if limits.cpu_quota is None else f", {limits.cpu_quota:g} cores' time granted"
    yield "cores", str(limits.num_cores), f"that this process may use{quota}"


def _problems(findings: Findings) -> list[str]:
    problems = findings.problems
    if not problems:
        return ["No problem found."]
    lines = ["1 problem:" if len(problems) == 1 else f"{len(problems)} problems:"]
    for number, problem in enumerate(problems, 1):
        text = f"{problem.what}: {problem.got}; expected {problem.expected}."
        lines += _wrapped(f"{number}. ", "   ", text)
        lines += _wrapped("   -> ", "      ", problem.remedy)
    return lines


def _wrapped(first: str, later: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )


def threads_in_words(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _gbps(rate: float) -> str:
    return f"{rate:.1f} GB/s"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.0f} MiB"


def _s(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
