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
from stronghold.tools import timeline

MIB = float(1 << 20)
COLUMNS = 96
Point = tuple[float, float]
LEAST_HELD_OUT = 5  # points that losses.png shows


def say(text: str, indent: str = "") -> None:
    """Print one paragraph; its later lines begin three columns further in."""
    later = f"{indent}   "
    lines = textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False
    )
    print("\n".join(lines), flush=True)


def compare_losses(windowed: list[float], plain: list[float], again: list[float]) -> bool:
    """Print some of both; whether all are equal bit for bit. `again`: of a second plain loop."""
    compared = range(1, len(plain) + 1)
    for step in sorted({1, len(plain) // 2, len(plain)} & set(compared)):
        a, b = windowed[step - 1], plain[step - 1]
        print(f"   loss in step {step:<3d}  {a:.9f} {'==' if a == b else '!='} {b:.9f}")
    equal = windowed == plain
    if equal:
        verdict = "are equal, bit for bit"
    elif again == plain:
        verdict = "ARE NOT EQUAL, and a second plain loop repeats the first one's: this is a bug"
    else:
        verdict = (
            "ARE NOT EQUAL, and a second plain loop differs from the first one, too: PyTorch does "
            "not repeat itself on this machine"
        )
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
    draw_losses(loss_curves(numbers), folder / "losses.png", title=title)
    timeline.draw_timeline(trace.read(folder / "trace.json"), folder / "timeline.png")
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


def loss_curves(numbers: Mapping[str, Any]) -> list[dict[str, list[Point]]]:
    """The curves of both parts of losses.png: the compared steps, and the training.

    Two held-out losses would show a straight line, which no training follows.
    """
    equal = "equal" if numbers["losses_equal"] else "NOT EQUAL"
    compared = {
        "with the window": _curve(numbers["windowed_losses"]),
        f"plain loop: {equal}": _curve(numbers["plain_losses"]),
    }
    training = {"training": _curve(numbers["losses"])}
    if len(numbers["held_out"]) >= LEAST_HELD_OUT:
        training["held-out text"] = numbers["held_out"]
    if numbers["chunked"]:
        name = f"batch of {numbers['chunked']['batch']} in chunks of {numbers['chunked']['chunk']}"
        training[name] = _curve(numbers["chunked"]["losses"])
    return [compared, training]


def _curve(losses: Sequence[float]) -> list[Point]:
    return list(enumerate(losses, 1))


def draw_losses(parts: Sequence[Mapping[str, Sequence[Point]]], png: Path, *, title: str) -> None:
    """Draw (step, loss) curves to `png`, one part beside the other.

    The first curve of a part is wide and pale and the others thin, so that equal curves show as one
    inside the other. Held-out losses are points.
    """
    figure = Figure(figsize=(11.0, 4.6), dpi=timeline.DPI, facecolor="white")
    styles = [
        {"color": "#a8c4e0", "linewidth": 5.0},
        {"color": timeline.INK, "linewidth": 1.1},
        {"color": "#59a14f", "linewidth": 1.6, "linestyle": "--"},
    ]
    for axes, curves in zip(figure.subplots(1, len(parts)), parts, strict=True):
        for (name, points), style in zip(curves.items(), styles, strict=False):
            axes.plot(
                *zip(*points, strict=True),
                **style,
                marker="o" if name == "held-out text" else "",
                markersize=4.5,
                solid_capstyle="round",
                label=f"{name}, {points[-1][1]:.3f} at step {points[-1][0]:,.0f}",
            )
        axes.margins(x=0.02)
        timeline.style(axes, "step", "nats per byte")
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, fontsize=9, labelcolor=timeline.INK)
    figure.suptitle(title, color=timeline.INK, fontsize=12, weight="bold", x=0.06, ha="left")
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.12, top=0.9, wspace=0.16)
    timeline.save(figure, png)
