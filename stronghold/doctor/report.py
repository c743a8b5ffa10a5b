"""The findings as text: each figure, and beside it what it bounds in training.

Pure: owns the words and the layout; the command prints them. The arithmetic is that of a bf16 model
of 8 B parameters with exact fp32 AdamW, so that figures of machines can be compared.
"""

from __future__ import annotations

import textwrap

from stronghold.doctor.findings import GIB, Findings
from stronghold.doctor.measure import threads_in_words
from stronghold.plan.profile import ADAM_BF16_BYTES, MachineProfile

WIDTH = 100
PARAMETERS = 8e9
STATE_BYTES = 12  # of a parameter on the host: bf16 weight, 16-bit remainder, two fp32 moments
Row = tuple[str, str, str]


def table(findings: Findings) -> str:
    """One line per figure, then the problems with their remedies."""
    title = f"{findings.profile.name}, {findings.profile.measured}"
    rows = [*_link_rows(findings), *_host_rows(findings), *_disk_rows(findings)]
    rows += _memory_rows(findings)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [title, ""]
    for name, figure, meaning in rows:
        head = f"{name:<{widths[0]}}  {figure:>{widths[1]}}  "
        lines += _wrapped(head, " " * len(head), meaning) or [head.rstrip()]
    return "\n".join([*lines, "", *_problems(findings)])


def _link_rows(findings: Findings) -> list[Row]:
    profile = findings.profile
    weights = 2 * PARAMETERS / 1e9
    where = f" ({findings.link})" if findings.link is not None else ""
    tokens = break_even_tokens(profile)
    rows = [
        (
            f"host to device{where}",
            _gbps(profile.fetch_gbps),
            f"a bf16 8 B model streams its weights ({weights:.0f} GB) in "
            f"{_s(weights / profile.fetch_gbps)}, twice per step",
        ),
        (
            "device to host",
            _gbps(profile.drain_gbps),
            f"its gradients leave in {_s(weights / profile.drain_gbps)}",
        ),
        (
            "both at once",
            _gbps(profile.duplex_gbps),
            f"backward moves weights in and gradients out in "
            f"{_s(2 * weights / profile.duplex_gbps)} or more",
        ),
    ]
    for dtype, rate in profile.flops.items():
        meaning = ""
        if dtype == "bf16":
            step_s = 6 * PARAMETERS * 8192 / rate
            meaning = (
                f"a step of 8192 tokens computes for {_s(step_s)}; from {tokens:,.0f} tokens per "
                "step on, compute hides the weights' two trips"
            )
        rows.append((f"matrix products, {dtype}", f"{rate / 1e12:.4g} TFLOP/s", meaning))
    rows.append(
        (
            "device memory",
            _gbps(profile.gpu_memory_gbps),
            "updates of layers that stay on the device, normalisation, activations",
        )
    )
    return rows


def break_even_tokens(profile: MachineProfile) -> float:
    """Tokens per step from which 6 FLOP per parameter and token take longer than two bf16 weights
    over the link."""
    return 2 * 2 * profile.flops["bf16"] / (6 * profile.fetch_gbps * 1e9)


def _host_rows(findings: Findings) -> list[Row]:
    profile = findings.profile
    rows = []
    most = max(profile.memory_gbps)
    for threads, rate in profile.memory_gbps.items():
        meaning = "bounds Adam and both directions of the link together" if threads == most else ""
        rows.append((f"host memory, {threads_in_words(threads)}", _gbps(rate), meaning))
    best = max(profile.adam_gbps, key=lambda threads: profile.adam_gbps[threads])
    for threads, rate in profile.adam_gbps.items():
        seconds = PARAMETERS * ADAM_BF16_BYTES / (rate * 1e9)
        meaning = f"updates 8 B parameters in {_s(seconds)}"
        if threads == best:
            meaning += ", hidden when a forward pass takes as long"
        rows.append((f"Adam ({findings.isa}), {threads_in_words(threads)}", _gbps(rate), meaning))
    return rows


def _disk_rows(findings: Findings) -> list[Row]:
    disk = findings.disk
    if disk is None or disk.error:
        return []
    how = f"{disk.engine}, {'O_DIRECT' if disk.direct else 'page cache'}"
    states = STATE_BYTES * PARAMETERS / 1e9
    rows = []
    for what, rates in (("read", disk.read_gbps), ("write", disk.write_gbps)):
        depth = max(rates, key=lambda key: rates[key])
        others = ", ".join(f"{rate:.2f} at {key}" for key, rate in rates.items())
        rows.append(
            (
                f"file {what}s, depth {depth}",
                f"{rates[depth]:.2f} GB/s",
                f"states of an 8 B model ({states:.0f} GB) pass in {_s(states / rates[depth])}; "
                f"by depth: {others}",
            )
        )
    rows.append(
        (
            "file reads and writes",
            f"{disk.mixed_gbps:.2f} GB/s",
            f"both at once, summed: such states come and go in {_s(2 * states / disk.mixed_gbps)} "
            f"({how}, {disk.path})",
        )
    )
    return rows


def _memory_rows(findings: Findings) -> list[Row]:
    profile, limits = findings.profile, findings.limits
    limited = limits.cgroup_bytes is not None and limits.cgroup_bytes < limits.memory_bytes
    fits = limits.available_bytes / STATE_BYTES / 1e9
    on_device = profile.gpu_memory_bytes / (STATE_BYTES + 2) / 1e9
    locked = limits.locked_bytes
    quota = "" if limits.cpu_quota is None else f", {limits.cpu_quota:g} cores' time granted"
    device = "emulated device" if findings.emulated else "device memory"
    count = f"{profile.num_gpus} of them; " if profile.num_gpus > 1 else ""
    return [
        (
            f"{device}, size",
            _gib(profile.gpu_memory_bytes),
            count
            + (
                "the host's memory: a budget limits it"
                if findings.emulated
                else f"holds states and gradients of {on_device:.1f} B parameters whole"
            ),
        ),
        (
            "host memory, size",
            _gib(limits.usable_bytes),
            "limited by the control group" if limited else "",
        ),
        (
            "host memory, free",
            _gib(limits.available_bytes),
            f"holds exact AdamW states ({STATE_BYTES} bytes) of {fits:.1f} B parameters",
        ),
        (
            "locked memory",
            "unlimited" if locked is None else _gib(locked),
            "ulimit -l: what a process may pin",
        ),
        (
            "swap",
            _gib(limits.swap_bytes) if limits.swap_bytes else "none",
            f"{_gib(limits.swap_used_bytes)} used" if limits.swap_bytes else "",
        ),
        ("cores", str(limits.num_cores), f"that this process may use{quota}"),
    ]


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


def _gbps(rate: float) -> str:
    return f"{rate:.1f} GB/s"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.0f} MiB"


def _s(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
