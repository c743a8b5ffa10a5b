"""A sweep: the same forecast for many values of one thing, and its picture.

Owns the values that are worth a look and how the picture looks; `answer` predicts each. One thread
enters; draws with Agg, so it needs no display.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stronghold.errors import ConfigError
from stronghold.forecast.answer import fits, outlook
from stronghold.forecast.page import seconds
from stronghold.forecast.question import Question
from stronghold.telemetry.plot import COLOURS, DPI, FAINT, INK, OTHER_COLOUR, save

MOST_POINTS = 16
GROWTH = 1.3  # from one number of layers to the next
SHORTEST = 128  # sequence

# By the words of `answer`: a bound has the colour of its lane in a timeline.
BOUND_COLOURS = {
    "compute": COLOURS["forward"],
    "link host to device": COLOURS["fetch"],
    "link device to host": COLOURS["drain"],
    "host memory bandwidth": COLOURS["update"],
    "nvme": COLOURS["load"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value's prediction; None where it does not fit."""

    value: int
    step_s: float | None
    tokens_per_s: float | None
    bound: str
    limit_s: float
    tokens: int


def sweep(question: Question, axis: str) -> list[Point]:
    """Predictions along "window", "batch", "seq" or "layers", in increasing order, until one does
    not fit; of layers and batches the largest that fits is the last but one."""
    points: list[Point] = []
    for value, asked in _questions(question, axis):
        points.append(_point(value, asked))
        if points[-1].step_s is None:
            break
    if all(point.step_s is None for point in points):
        raise ConfigError(f"--sweep {axis}: not even {axis} {points[0].value} fits")
    if points[-1].step_s is None and axis in ("batch", "layers"):
        low, high = points[-2].value, points[-1].value
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(_with(question, axis, middle)) else (low, middle)
        last = [_point(value, _with(question, axis, value)) for value in (low, high)]
        points = [*points[:-2], *(points[-2:-1] if low > points[-2].value else []), *last]
    return points


def _point(value: int, asked: Question) -> Point:
    found = outlook(asked)
    timing = found.timing
    return Point(
        value=value,
        step_s=None if timing is None else timing.step_s,
        tokens_per_s=None if timing is None else timing.tokens_per_s,
        bound="" if timing is None else timing.bound,
        limit_s=found.limits.seconds,
        tokens=asked.tokens,
    )


def _with(question: Question, axis: str, value: int) -> Question:
    subject = question.subject
    if axis == "window":
        # Resident blocks would need no window: with them every window is as good.
        return replace(question, window=value, resident_layers=0)
    if axis == "batch":
        return replace(question, batch=value)
    if axis == "seq":
        return replace(question, seq=value, subject=subject.with_positions(value))
    return replace(question, subject=subject.with_layers(value))


def _questions(question: Question, axis: str) -> Iterator[tuple[int, Question]]:
    for value in _values(question, axis):
        yield value, _with(question, axis, value)


def _values(question: Question, axis: str) -> list[int]:
    subject = question.subject
    if axis == "window":
        return _spread(1, subject.num_blocks)
    if axis == "batch":
        return [2**exponent for exponent in range(MOST_POINTS)]
    if axis == "seq":
        longest = subject.positions or SHORTEST * 2 ** (MOST_POINTS - 1)
        first = min(SHORTEST, longest)
        return [first * 2**k for k in range(MOST_POINTS) if first * 2**k <= longest]
    first = max(1, subject.num_blocks // 4)
    return sorted({round(first * GROWTH**k) for k in range(MOST_POINTS)})


def _spread(first: int, last: int) -> list[int]:
    """At most MOST_POINTS whole numbers from `first` to `last`, denser at the beginning."""
    if last - first < MOST_POINTS:
        return list(range(first, last + 1))
    ratio = (last / first) ** (1 / (MOST_POINTS - 1))
    return sorted({round(first * ratio**k) for k in range(MOST_POINTS)})


def table(points: Sequence[Point], axis: str) -> str:
    """One line per point."""
    lines = [f"{axis:>9}  {'step':>9}  {'tokens/s':>9}  {'limit':>9}  bound"]
    for point in points:
        if point.step_s is None or point.tokens_per_s is None:
            lines.append(f"{point.value:>9,}  does not fit")
            continue
        lines.append(
            f"{point.value:>9,}  {seconds(point.step_s):>9}  {point.tokens_per_s:>9,.0f}  "
            f"{seconds(point.limit_s):>9}  {point.bound}"
        )
    return "\n".join(lines)


# -- the picture ----------------------------------------------------------------------------------


def draw(points: Sequence[Point], axis: str, title: str, png: str | Path) -> None:
    """Step time and tokens per second over the swept values, each beside the physical limit, a dot
    in the colour of what bounds it."""
    figure = Figure(figsize=(11.0, 4.6), dpi=DPI, facecolor="white")
    fitting = [point for point in points if point.step_s is not None]
    scale, unit = (1e3, "ms") if max(point.step_s or 0.0 for point in fitting) < 1 else (1.0, "s")
    left, right = (figure.add_axes((x, 0.135, 0.415, 0.685)) for x in (0.062, 0.56))
    _curve(left, fitting, lambda point: (point.step_s or 0.0) * scale)
    _limit(left, fitting, lambda point: point.limit_s * scale)
    left.set_ylabel(f"step, {unit}", color=FAINT, fontsize=9)
    _curve(right, fitting, lambda point: point.tokens_per_s or 0.0)
    _limit(right, fitting, lambda point: point.tokens / point.limit_s)
    right.set_ylabel("tokens per second", color=FAINT, fontsize=9)
    best = max(fitting, key=lambda point: point.tokens_per_s or 0.0)
    right.text(
        1.0,
        1.025,
        f"most: {best.tokens_per_s:,.0f} tokens/s at {best.value:,}",
        transform=right.transAxes,
        ha="right",
        fontsize=8.5,
        color=INK,
    )
    for axes in (left, right):
        _style(axes, axis, points)
    figure.text(0.062, 0.945, title, color=INK, fontsize=12, weight="bold", va="center")
    _legend(figure, fitting)
    save(figure, png)


def _curve(axes: Axes, points: Sequence[Point], value: Callable[[Point], float]) -> None:
    xs, ys = [point.value for point in points], [value(point) for point in points]
    axes.plot(xs, ys, color=INK, linewidth=1.1, zorder=2)
    colours = [BOUND_COLOURS.get(point.bound, OTHER_COLOUR) for point in points]
    axes.scatter(xs, ys, s=34, c=colours, zorder=3, edgecolors="white", linewidths=0.8)


def _limit(axes: Axes, points: Sequence[Point], value: Callable[[Point], float]) -> None:
    xs, ys = [point.value for point in points], [value(point) for point in points]
    axes.plot(xs, ys, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)


def _style(axes: Axes, axis: str, points: Sequence[Point]) -> None:
    values = [point.value for point in points]
    if values[-1] >= 16 * values[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(_apart(values, axes), [f"{value:,}" for value in _apart(values, axes)])
    axes.minorticks_off()
    for point in points:
        if point.step_s is None:
            axes.axvline(point.value, color=FAINT, linewidth=1.2, linestyle=(0, (1, 2)))
            axes.annotate(
                f"{point.value:,} does not fit",
                (point.value, 0.5),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="center",
                fontsize=8,
                color=FAINT,
            )
    names = {"window": "window, slots", "batch": "sequences per micro-batch", "seq": "tokens"}
    axes.set_xlabel(names.get(axis, "layers"), color=FAINT, fontsize=9)
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.14)
    axes.grid(color="#eceef1", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _apart(values: Sequence[int], axes: Axes) -> list[int]:
    """Those of the values that are far enough apart to be written below the axis."""
    log = axes.get_xscale() == "log"
    places = [math.log(value) if log else float(value) for value in values]
    least = (places[-1] - places[0]) / 12
    shown: list[tuple[int, float]] = []
    for value, place in zip(reversed(values), reversed(places), strict=True):
        if not shown or shown[-1][1] - place >= least:
            shown.append((value, place))
    return [value for value, _ in reversed(shown)]


def _legend(figure: Figure, points: Sequence[Point]) -> None:
    bounds = dict.fromkeys(point.bound for point in points)
    entries = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            color=BOUND_COLOURS.get(bound, OTHER_COLOUR),
            label=f"bound by {bound}",
        )
        for bound in bounds
    ]
    entries.append(
        Line2D([], [], color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label="physical limit")
    )
    figure.legend(
        handles=entries,
        loc="center left",
        bbox_to_anchor=(0.05, 0.895),
        ncols=len(entries),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        columnspacing=1.4,
        handletextpad=0.4,
    )
