"""`stronghold doctor`: its page has one line per figure, then problems with their remedies.

Owns the words and the bounds. A rule stands here if its remedy is something that a user can carry
out (a command, a config key, a purchase, a mount option, a limit), and if the remedy changes the
speed of training or the size of the model that fits. Each bound has its reason beside it.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stronghold.plan.machine import default_path
from stronghold.tools import Answer
from stronghold.tools.doctor.examine import Findings, examine, gpu_name

GIB = float(1 << 30)
WIDTH = 100
# Pinned copies reach 0.78 to 0.85 of the standard's rate: packet headers, flow control.
LINK_SHARE = 0.7
SLOWEST_LINK_GBPS = 11.0  # PCIe 3.0 x16, the link of the oldest machines in use
SLOWEST_READ_GBPS = 1.5  # NVMe disks give two to four times as much
SLOWEST_WRITE_GBPS = 0.75
LOCKED_SHARE = 0.5  # of host memory


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Answer:
    """Print the figures and problems of this machine, and write its profile.

    The status is 2 if the profile could not be written. The page is printed even so.
    """
    findings = examine(arguments.device, arguments.path, step=progress)
    path = arguments.json or default_path(gpu_name(arguments.device))
    try:
        findings.profile.save(path)
    except OSError as error:
        progress(f"--json {path}: cannot be written: {error}")
        return Answer(text=page(findings), status=2)
    return Answer(text=f"{page(findings)}\n\nThe profile is in {path}")


def page(findings: Findings) -> str:
    """The text: one line per figure, then the problems with their remedies."""
    rows = list(_figures(findings))
    name_width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{name_width}}  {figure}" for name, figure in rows]
    return "\n".join([str(findings.profile.name), "", *lines, "", *_problem_lines(findings)])


# -- figures --------------------------------------------------------------------------------------
def _figures(findings: Findings) -> Iterator[tuple[str, str]]:
    profile, limits, disk = findings.profile, findings.limits, findings.disk
    where = f" ({findings.link})" if findings.link is not None else ""
    yield f"host to device{where}", _gbps(profile.fetch_gbps)
    yield "device to host", _gbps(profile.offload_gbps)
    yield "both at once", _gbps(profile.duplex_gbps)
    for dtype, rate in profile.flops.items():
        yield f"matrix products, {dtype}", _tflops(rate)
    backward = profile.attention_backward_flops or {}
    for dtype, rate in (profile.attention_flops or {}).items():
        yield f"attention, {dtype}", f"{_tflops(rate)}, backward {_tflops(backward[dtype])}"
    yield "device memory", f"{_gbps(profile.gpu_memory_gbps)}, {_gib(profile.gpu_memory_bytes)}"
    usable, free = _gib(limits.usable_bytes), _gib(limits.available_bytes)
    yield "host memory", f"{_gbps(profile.memory_gbps)}, {usable}, {free} free"
    lean = profile.adam_lean_gbps
    beside = "" if lean is None else f", with lean states {_gbps(lean)}"
    yield f"Adam ({findings.isa}), threads: 1", _gbps(profile.adam_thread_gbps)
    threads = f"threads: {profile.num_cores}"
    yield f"Adam ({findings.isa}), {threads}", f"{_gbps(profile.adam_gbps)}{beside}"
    if disk is not None and disk.error:
        yield "files", f"not measured: {disk.path}: {disk.error}; name another with --path"
    elif disk is not None:
        how = "O_DIRECT" if disk.direct else "page cache"
        yield "files", f"{disk.path} ({how})"
        yield "files, read", f"{disk.read_gbps:.2f} GB/s"
        yield "files, written", f"{disk.write_gbps:.2f} GB/s"
        yield "files, both at once", f"{disk.mixed_gbps:.2f} GB/s"
    locked = "unlimited" if limits.locked_bytes is None else _gib(limits.locked_bytes)
    yield "locked memory", f"{locked} (ulimit -l)"
    yield "cores", str(limits.num_cores)


def _gbps(rate: float) -> str:
    return f"{rate:.1f} GB/s"


def _tflops(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.0f} MiB"


# -- problems -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A setting or a part that makes training slower, or the largest model smaller."""

    what: str
    got: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: got {self.got}, expected {self.expected}"


def problems_of(findings: Findings) -> tuple[Problem, ...]:
    """The problems of a machine, the gravest first."""
    groups = (_link_problems, _host_problems, _disk_problems)
    return tuple(problem for group in groups for problem in group(findings))


def _problem_lines(findings: Findings) -> Iterator[str]:
    problems = problems_of(findings)
    yield f"problems: {len(problems)}" if problems else "No problem found."
    for number, problem in enumerate(problems, 1):
        yield from _wrapped(f"{number}. ", str(problem))
        yield from _wrapped("   -> ", problem.remedy)


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )


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
            got=findings.pin_error,
            expected="memory that the GPU reads and writes by itself; the CPU copies unpinned "
            "memory once more",
            remedy="raise the limit of locked memory (ulimit -l unlimited; in a container "
            "--ulimit memlock=-1; under WSL2 more memory in .wslconfig)",
        )
    if findings.profile.emulated:
        return
    link, profile = findings.link, findings.profile
    slower = min(profile.fetch_gbps, profile.offload_gbps)
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


def _host_problems(findings: Findings) -> Iterator[Problem]:
    limits = findings.limits
    quota, locked = limits.cpu_quota, limits.locked_bytes
    if findings.isa == "scalar":
        yield Problem(
            what="Adam runs without vector instructions",
            got="scalar code",
            expected="AVX2, AVX-512 or NEON",
            remedy="unset STRONGHOLD_ISA; let the virtual machine show the processor's "
            "instructions (cpu host-passthrough), or use a processor made after 2013",
        )
    if quota is not None and quota < limits.num_cores:
        yield Problem(
            what="the control group stops threads that compute too long",
            got=f"{quota:g} cores' time for {limits.num_cores} cores",
            expected="no quota, or as many cores as it pays for",
            remedy=f"start the container with --cpuset-cpus instead of --cpus, or set "
            f"stronghold.cpu_threads to {max(1, int(quota))}",
        )
    # A refusal of pinned memory has the same remedy, and is known for certain.
    is_known = findings.profile.emulated or bool(findings.pin_error)
    if locked is not None and locked < LOCKED_SHARE * limits.usable_bytes and not is_known:
        yield Problem(
            what="the limit of locked memory is small",
            got=f"ulimit -l of {locked / GIB:.2f} GiB",
            expected="unlimited, since weights, gradients and offloaded activations are pinned",
            remedy="ulimit -l unlimited (for good: `* - memlock unlimited` in "
            "/etc/security/limits.conf; in a container --ulimit memlock=-1)",
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
