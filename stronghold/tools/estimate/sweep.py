"""`stronghold plan --sweep`: estimates along one axis, as a table and as a plot.

Owns which values of an axis are tried. It needs matplotlib, so only a sweep imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from stronghold.errors import ConfigError
from stronghold.plan.rules import last_that
from stronghold.tools import plot
from stronghold.tools.estimate.estimate import Estimate, estimate, fits, seconds
from stronghold.tools.estimate.question import Question

MOST_POINTS = 16  # of a sweep
GROWTH = 1.3  # from one number of layers to the next
SHORTEST = 128  # sequence
# A bound has the colour of its lane in a timeline.
BOUND_COLOURS = {
    "compute": plot.COLOURS["forward"],
    "link host to device": plot.COLOURS["fetch"],
    "link device to host": plot.COLOURS["offload"],
    "host memory bandwidth": plot.COLOURS["update"],
    "nvme": plot.COLOURS["load"],
}
AXIS_LABELS = {
    "window": "window, slots",
    "batch": "sequences per micro-batch",
    "seq": "tokens",
    "layers": "layers",
}


def table(points: Sequence[tuple[int, Estimate]], axis: str) -> str:
    """One line per point of `sweep`."""
    lines = [f"{axis:>9}  {'step':>9}  {'tokens/s':>9}  {'limit':>9}  bound"]
    for value, point in points:
        if not point.fits:
            lines.append(f"{value:>9,}  does not fit")
            continue
        lines.append(
            f"{value:>9,}  {seconds(point.step_s):>9}  {point.tokens_per_s:>9,.0f}  "
            f"{seconds(point.limits.seconds):>9}  {point.bound}"
        )
    return "\n".join(lines)


def draw(points: Sequence[tuple[int, Estimate]], axis: str, png: Path) -> None:
    """Draw step time and tokens per second of the points, beside the physical limit, as a PNG.

    The colour of a dot is that of the resource that bounds its step.
    """
    question = points[0][1].question
    figure = plot.new_figure(11.0, 4.6, f"{question.model.name}, {question.machine.name}")
    fitting = [(value, point) for value, point in points if point.fits]
    left, right = figure.subplots(1, 2)
    _draw_steps(left, fitting, axis)
    _draw_rates(right, fitting, axis)
    for axes in (left, right):
        _mark_unfitting(axes, points)
        if points[-1][0] >= 16 * points[0][0]:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_ylim(bottom=0.0)
    bounds = {point.bound: _colour(point) for _, point in fitting}
    dot: dict[str, Any] = {"marker": "o", "linestyle": ""}
    entries = [
        Line2D([], [], color=colour, label=f"bound by {bound}", **dot)
        for bound, colour in bounds.items()
    ]
    limit = Line2D([], [], label="physical limit", **plot.LIMIT_LINE)
    plot.add_legend(figure, [*entries, limit])
    plot.save(figure, png)


def _draw_steps(axes: Axes, fitting: Sequence[tuple[int, Estimate]], axis: str) -> None:
    longest_s = max(point.step_s for _, point in fitting)
    scale, unit = (1e3, "ms") if longest_s < 1 else (1.0, "s")
    steps = [point.step_s * scale for _, point in fitting]
    limits = [point.limits.seconds * scale for _, point in fitting]
    _draw_curve(axes, fitting, steps, limits)
    plot.style(axes, AXIS_LABELS[axis], f"step, {unit}")


def _draw_rates(axes: Axes, fitting: Sequence[tuple[int, Estimate]], axis: str) -> None:
    rates = [point.tokens_per_s for _, point in fitting]
    limits = [point.question.tokens / point.limits.seconds for _, point in fitting]
    _draw_curve(axes, fitting, rates, limits)
    best, _ = fitting[rates.index(max(rates))]
    label = f"tokens per second (most: {max(rates):,.0f} at {best:,})"
    plot.style(axes, AXIS_LABELS[axis], label)


def _draw_curve(
    axes: Axes,
    fitting: Sequence[tuple[int, Estimate]],
    figures: Sequence[float],
    limits: Sequence[float],
) -> None:
    """Draw the figures of the estimates with dots, and the physical limits as a dashed line."""
    values = [value for value, _ in fitting]
    axes.plot(values, figures, color=plot.INK, linewidth=1.1)
    axes.scatter(values, figures, c=[_colour(point) for _, point in fitting], zorder=3)
    axes.plot(values, limits, **plot.LIMIT_LINE)


def _mark_unfitting(axes: Axes, points: Sequence[tuple[int, Estimate]]) -> None:
    for value, point in points:
        if not point.fits:
            axes.axvline(value, color=plot.FAINT, linestyle=":")
            label = f"{value:,} does not fit "
            place = axes.get_xaxis_transform()
            axes.text(value, 0.5, label, transform=place, rotation=90, ha="right", va="center")


def _colour(point: Estimate) -> str:
    return BOUND_COLOURS.get(point.bound, plot.OTHER_COLOUR)


def sweep(question: Question, axis: str) -> list[tuple[int, Estimate]]:
    """Estimates along "window", "batch", "seq" or "layers", in increasing order.

    It ends with the first that does not fit. The largest number of layers, or batch, that fits is
    the last but one.
    """
    if axis == "window" and not question.model.num_blocks:
        raise ConfigError("--sweep window: the model has no repeated blocks, so there is no window")
    points: list[tuple[int, Estimate]] = []
    for value in _values(question, axis):
        points.append((value, estimate(_with(question, axis, value))))
        if not points[-1][1].fits:
            break
    if not any(point.fits for _, point in points):
        raise ConfigError(f"--sweep {axis}: not even {axis} {points[0][0]} fits")
    if not points[-1][1].fits and axis in ("batch", "layers"):
        *before, (fitting, _), (unfitting, _) = points
        largest = last_that(partial(_fits_with, question, axis), fitting, unfitting - 1)
        if largest > fitting:
            before.append(points[-2])
        last = [(value, estimate(_with(question, axis, value))) for value in (largest, largest + 1)]
        points = [*before, *last]
    return points


def _fits_with(question: Question, axis: str, value: int) -> bool:
    return fits(_with(question, axis, value))


def _with(question: Question, axis: str, value: int) -> Question:
    model = question.model
    if axis == "window":
        # Resident blocks would need no window: with them every window is as good.
        return replace(question, window=value, resident_layers=0)
    if axis == "batch":
        return replace(question, batch=value)
    if axis == "seq":
        return replace(question, seq=value, model=model.with_positions(value))
    return replace(question, model=model.with_layers(value))


def _values(question: Question, axis: str) -> list[int]:
    """The values to try, at most MOST_POINTS."""
    model, steps = question.model, range(MOST_POINTS)
    if axis == "window":
        last = model.num_blocks  # denser at the beginning
        if last <= MOST_POINTS:
            return list(range(1, last + 1))
        ratio = last ** (1 / (MOST_POINTS - 1))
        return sorted({round(ratio**k) for k in steps})
    if axis == "batch":
        return [2**k for k in steps]
    if axis == "seq":
        longest = model.positions or SHORTEST * 2 ** (MOST_POINTS - 1)
        first = min(SHORTEST, longest)
        return [first * 2**k for k in steps if first * 2**k <= longest]
    first = max(1, model.num_blocks // 4)
    return sorted({round(first * GROWTH**k) for k in steps})
