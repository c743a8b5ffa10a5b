"""What the quickstart prints and leaves: verdicts, pictures, and the numbers as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from matplotlib.figure import Figure

import stronghold
from stronghold.telemetry import trace
from stronghold.tools import plot

MIB = float(1 << 20)
COLUMNS = 96
Point = tuple[float, float]


def say(text: str, indent: str = "") -> None:
    """Print one paragraph; its later lines begin three columns further in."""
    later = f"{indent}   "
    lines = textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False
    )
    print("\n".join(lines), flush=True)


def compare_losses(windowed: list[float], plain: list[float]) -> bool:
    """Print some of both; whether all are equal bit for bit."""
    compared = range(1, len(plain) + 1)
    for step in sorted({1, len(plain) // 2, len(plain)} & set(compared)):
        a, b = windowed[step - 1], plain[step - 1]
        print(f"   loss in step {step:<3d}  {a:.9f} {'==' if a == b else '!='} {b:.9f}")
    equal = windowed == plain
    verdict = "are equal, bit for bit" if equal else "ARE NOT EQUAL: this is a bug"
    say(f"   the first {len(plain)} losses {verdict}")
    return equal


def compare_memory(report: Mapping[str, int], budget_bytes: int) -> bool:
    """Print peak bytes per tier against the plan; whether they agree and keep to the budget.

    `report` has the fields of `engine.memory_report()`.
    """
    within = report["gpu_peak"] <= budget_bytes
    parts = []
    for tier, name in (("gpu", "GPU"), ("host", "host")):
        planned, peak = report[f"{tier}_planned"], report[f"{tier}_peak"]
        within = within and planned == peak
        parts.append(f"{name} {peak / MIB:.2f} of {planned / MIB:.2f} MiB")
    verdict = "every peak is what was planned" if within else "THE PEAKS ARE NOT AS PLANNED: a bug"
    say(f"   {verdict}: {', '.join(parts)}")
    return within


def times_in_words(times: Mapping[str, float]) -> str:
    """Step seconds of `plain.compare_times`."""
    return (
        f"{times['window'] * 1e3:.0f} ms with the window, {times['plain'] * 1e3:.0f} ms in a plain "
        f"loop: ratio {times['window'] / times['plain']:.2f} (one torch thread; medians of "
        f"{times['turns']} turns of {count(times['steps_per_turn'], 'step')})"
    )


def count(number: float, what: str) -> str:
    """The number with its unit, in the plural unless it is 1."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def leave(folder: Path, title: str, numbers: Mapping[str, Any]) -> None:
    """Write losses.png, timeline.png and summary.json beside the trace."""
    curves = {
        "with the window": list(enumerate(numbers["losses"], 1)),
        "without it": list(enumerate(numbers["plain_losses"], 1)),
        "held-out text": numbers["held_out"],
    }
    if numbers["chunked"]:
        name = f"batch of {numbers['chunked']['batch']} in chunks of {numbers['chunked']['chunk']}"
        curves[name] = list(enumerate(numbers["chunked"]["losses"], 1))
    draw_losses(curves, folder / "losses.png", title=title)
    plot.draw_timeline(trace.read(folder / "trace.json"), folder / "timeline.png")
    summary = {"machine": machine(), **numbers}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print()
    say(
        f"written to {folder}/: losses.png, timeline.png (one step, lane by lane), summary.json "
        "(all numbers), log.txt (what the engines log), config.json, trace.json (opens in "
        "ui.perfetto.dev)"
    )


def device_name() -> str:
    """Where the quickstart computes, for a reader."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0))
    return f"an emulated device on {count(cores, 'core')} of {_processor()} (torch sees no GPU)"


def machine() -> dict[str, Any]:
    """Where the numbers were measured."""
    return {
        "command": shlex.join(["scripts/quickstart", *sys.argv[1:]]),
        "commit": _git("describe", "--always", "--dirty"),
        "system": platform.platform(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "threads_of_torch": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "stronghold": stronghold.__version__,
    }


def _git(*arguments: str) -> str | None:
    """What git answers about this checkout, None where there is no git or no checkout."""
    here = Path(__file__).resolve().parent
    with contextlib.suppress(OSError):
        answer = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        return answer.stdout.strip() or None
    return None


def _processor() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None


def draw_losses(curves: Mapping[str, Sequence[Point]], png: str | Path, *, title: str) -> None:
    """Draw (step, loss) curves to `png`, each over the ones before it.

    The first is wide and pale and the others thin, so that equal curves show as one inside the
    other; points that lie further apart than the first one's are marked.
    """
    figure = Figure(figsize=(9.0, 5.0), dpi=plot.DPI, facecolor="white")
    axes = figure.add_axes((0.075, 0.105, 0.90, 0.80))
    styles = [
        ("#a8c4e0", 5.0, "-"),
        (plot.INK, 1.1, "-"),
        ("#e15759", 1.6, "-"),
        ("#59a14f", 1.6, "--"),
    ]
    spacing = _spacing(next(iter(curves.values()), []))
    for (name, points), (colour, width, dashes) in zip(curves.items(), styles, strict=False):
        if not points:
            continue
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            linewidth=width,
            linestyle=dashes,
            marker="o" if _spacing(points) > spacing else "",
            markersize=4.5,
            solid_capstyle="round",
            label=f"{name}: {points[-1][1]:.3f} at step {points[-1][0]:,.0f}",
        )
    axes.set_title(title, color=plot.INK, fontsize=12, weight="bold", loc="left")
    axes.margins(x=0.01)
    plot.style(axes, "step", "nats per byte")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=9, labelcolor=plot.INK)
    plot.save(figure, png)


def _spacing(points: Sequence[Point]) -> float:
    """Mean distance of a curve's points along the axis of steps."""
    return (points[-1][0] - points[0][0]) / (len(points) - 1) if len(points) > 1 else 0.0
