"""The doctor's page: one line per figure with what it bounds, then problems and remedies.

Owns the words. The last column of a line is arithmetic for one example, a bf16 model of 8 B
parameters with exact fp32 AdamW, so that machines can be compared. It measures and prints nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from operator import itemgetter

from stronghold.plan.machine import ADAM_BF16_BYTES, ADAM_LEAN_BYTES
from stronghold.tools.doctor.findings import Findings, threads_in_words
from stronghold.tools.doctor.rules import problems_of

GIB = float(1 << 30)
WIDTH = 100
PARAMETERS = 8e9
# of a parameter on the host: bf16 weight, 16-bit remainder, two fp32 moments
STATE_BYTES = 12
Row = tuple[str, str, str]


def page(findings: Findings) -> str:
    """The text: one line per figure, then the problems with their remedies."""
    title = f"{findings.profile.name}, {findings.profile.measured}"
    rows = [
        *_link_rows(findings),
        *_host_rows(findings),
        *_disk_rows(findings),
        *_memory_rows(findings),
    ]
    name_width = max(len(name) for name, _, _ in rows)
    figure_width = max(len(figure) for _, figure, _ in rows)
    lines = [title, ""]
    for name, figure, meaning in rows:
        head = f"{name:<{name_width}}  {figure:>{figure_width}}  "
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
    leave_s = _s(weights / profile.offload_gbps)
    yield ("device to host", _gbps(profile.offload_gbps), f"its gradients leave in {leave_s}")
    both_s = _s(2 * weights / profile.duplex_gbps)
    meaning = f"backward moves weights in and gradients out in {both_s} or more"
    yield "both at once", _gbps(profile.duplex_gbps), meaning
    for dtype, rate in profile.flops.items():
        meaning = ""
        if dtype == "bf16":
            step_s = 6 * PARAMETERS * 8192 / rate
            # per parameter: two trips of 2 bytes, 6 FLOPs for each token
            tokens = (2 * 2 / (profile.fetch_gbps * 1e9)) * (rate / 6)
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
    best, _ = max(profile.adam_gbps.items(), key=itemgetter(1))
    for threads, rate in profile.adam_gbps.items():
        seconds = PARAMETERS * ADAM_BF16_BYTES / (rate * 1e9)
        meaning = f"updates 8 B parameters in {_s(seconds)}"
        if threads == best:
            meaning += ", hidden when a forward pass takes as long"
        yield (f"Adam ({findings.isa}), {threads_in_words(threads)}", _gbps(rate), meaning)
    if profile.adam_lean_gbps:
        threads, rate = max(profile.adam_lean_gbps.items(), key=itemgetter(1))
        seconds = PARAMETERS * ADAM_LEAN_BYTES / rate
        meaning = f"updates 8 B parameters in {_s(seconds * 1e-9)}"
        yield f"Adam, lean states, {threads_in_words(threads)}", _gbps(rate), meaning


def _disk_rows(findings: Findings) -> Iterator[Row]:
    disk = findings.disk
    if disk is None:
        return
    if disk.error:
        yield ("files", "not measured", f"{disk.path}: {disk.error}; name another with --path")
        return
    states = STATE_BYTES * PARAMETERS / 1e9
    for what, rate in (("read", disk.read_gbps), ("write", disk.write_gbps)):
        yield (
            f"file {what}s",
            f"{rate:.2f} GB/s",
            f"states of an 8 B model ({states:.0f} GB) pass in {_s(states / rate)}",
        )
    how = "O_DIRECT" if disk.direct else "page cache"
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
    problems = problems_of(findings)
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
