"""Pictures: the timeline of a trace, and a sweep of predictions.

Owns how they look. Never reads a trace file or computes a number that a log line shows. Runs in one
thread; draws with Agg, so it needs no display.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from stronghold.errors import ConfigError
from stronghold.telemetry.trace import STEP_LANE, Span, lane_order

COLOURS = {
    "forward": "#4e79a7",
    "backward": "#e15759",
    "recompute": "#9c755f",
    "fetch": "#59a14f",
    "drain": "#f28e2b",
    "reduce": "#ff9da7",
    "update": "#b07aa1",
    "norm": "#d4a6c8",
    "accumulate": "#86bcb6",
    "load": "#76b7b2",
    "spill": "#d4a514",
    "wait": "#d9d9d9",
}
OTHER_COLOUR = "#79706e"
INK, FAINT = "#22262b", "#8a9099"
WIDTH_INCHES, DPI = 15.0, 140
ROW_INCHES, ROW_HEIGHT = 0.46, 0.74
LABEL_POINTS = 8.5
PIXELS_PER_CHARACTER = LABEL_POINTS * DPI / 72 * 0.62
LABEL_MARGIN_PIXELS = 5
DARK_LABELS = frozenset({"wait", "load", "spill", "reduce"})
# By the words of a forecast: a bound has the colour of its lane in a timeline.
BOUND_COLOURS = {
    "compute": COLOURS["forward"],
    "link host to device": COLOURS["fetch"],
    "link device to host": COLOURS["drain"],
    "host memory bandwidth": COLOURS["update"],
    "nvme": COLOURS["load"],
}
LIMIT_LINE: dict[str, Any] = {"color": FAINT, "linewidth": 1.2, "linestyle": (0, (4, 3))}
LANE_WIDTH = 0.925  # share of the figure's width that the axes take


def draw_timeline(
    spans: Sequence[Span],
    png: str | Path,
    *,
    step: int | None = None,
    from_s: float | None = None,
    to_s: float | None = None,
) -> None:
    """Draw one row per lane to `png`.

    Shows the seconds `from_s` to `to_s` where given, else `step`, else the last step, else all.
    ConfigError when there is nothing to draw or the step is not in the trace.
    """
    begin_s, end_s, title = _extent(spans, step, from_s, to_s)
    visible = [
        span
        for span in spans
        if span.lane != STEP_LANE and span.end_s > begin_s and span.start_s < end_s
    ]
    if not visible:
        raise ConfigError(
            f"timeline: no operation between {begin_s:.3f} s and {end_s:.3f} s of the trace"
        )
    lanes = lane_order(span.lane for span in visible)
    height = ROW_INCHES * len(lanes) + 1.15
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0.055, 0.56 / height, LANE_WIDTH, ROW_INCHES * len(lanes) / height))
    axes.set_xlim(0.0, (end_s - begin_s) * 1e3)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, [span for span in visible if span.lane == lane], begin_s, end_s)
    _draw_steps(axes, spans, begin_s, end_s)
    _style_rows(axes, lanes, [_busy(visible, lane, begin_s, end_s) for lane in lanes])
    axes.set_xlabel("ms", color=FAINT, fontsize=9)
    figure.text(0.055, 1 - 0.30 / height, title, color=INK, fontsize=12, weight="bold", va="center")
    kinds = {span.kind for span in visible}
    entries = [Patch(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in kinds]
    if kinds - set(COLOURS):
        entries.append(Patch(color=OTHER_COLOUR, label="other"))
    shape = {"handlelength": 1.0, "handleheight": 1.0, "handletextpad": 0.5}
    anchor = (0.985, 1 - 0.30 / height)
    _legend(figure, entries, "center right", bbox_to_anchor=anchor, fontsize=9, **shape)
    save(figure, png)


def style(axes: Axes, x: str, y: str) -> None:
    """Of curves: a pale grid, no frame, and the axes' names."""
    axes.set_xlabel(x, color=FAINT, fontsize=9)
    axes.set_ylabel(y, color=FAINT, fontsize=9)
    axes.grid(color="#eceef1", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, entries: Sequence[Artist], loc: str, **more: Any) -> None:
    """In one row beside the title."""
    figure.legend(
        handles=entries,
        loc=loc,
        ncols=len(entries),
        frameon=False,
        labelcolor=INK,
        columnspacing=1.4,
        **more,
    )


def _extent(
    spans: Sequence[Span], step: int | None, from_s: float | None, to_s: float | None
) -> tuple[float, float, str]:
    """First and last second to show, and the title."""
    if not spans:
        raise ConfigError("timeline: the trace has no operations")
    if step is not None and (from_s is not None or to_s is not None):
        raise ConfigError("timeline: got a step and seconds; give one of them")
    steps = {
        int(span.name.split()[-1]): (span.start_s, span.end_s)
        for span in spans
        if span.lane == STEP_LANE
    }
    begin_s, end_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
    title = "all steps"
    if step is not None and step not in steps:
        known = f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
        raise ConfigError(f"timeline: step {step} is not in the trace, which has {known}")
    if steps and from_s is None and to_s is None:
        shown = max(steps) if step is None else step
        begin_s, end_s = steps[shown]
        title = f"step {shown}, {(end_s - begin_s) * 1e3:,.1f} ms"
    else:
        begin_s = begin_s if from_s is None else from_s
        end_s = end_s if to_s is None else to_s
        if from_s is not None or to_s is not None:
            title = f"{begin_s:.3f} s to {end_s:.3f} s"
    if end_s <= begin_s:
        raise ConfigError(
            f"timeline: the end, {end_s:.3f} s, is not after the start, {begin_s:.3f} s"
        )
    return begin_s, end_s, title


def _draw_lane(axes: Axes, row: int, spans: Sequence[Span], begin_s: float, end_s: float) -> None:
    """Boxes of one lane, the enclosing before the enclosed, with what fits written into them."""
    boxes, edges, colours = [], [], []
    pixels_per_ms = WIDTH_INCHES * DPI * LANE_WIDTH / ((end_s - begin_s) * 1e3)
    low, high = row - ROW_HEIGHT / 2, row + ROW_HEIGHT / 2
    label = _label_form(spans, pixels_per_ms)
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        left = (max(span.start_s, begin_s) - begin_s) * 1e3
        right = (min(span.end_s, end_s) - begin_s) * 1e3
        width = (right - left) * pixels_per_ms
        boxes.append([(left, low), (right, low), (right, high), (left, high)])
        # White edges part neighbours; where boxes are thinner than the edges they would erase them.
        edges.append(0.7 if width > 5 else 0.0)
        colours.append(COLOURS.get(span.kind, OTHER_COLOUR))
        if _fits(label(span), width):
            axes.text(
                (left + right) / 2,
                row,
                label(span),
                ha="center",
                va="center_baseline",
                color=INK if span.kind in DARK_LABELS else "white",
                fontsize=LABEL_POINTS,
                clip_on=True,
            )
    axes.add_collection(
        PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=edges)
    )


def _label_form(spans: Sequence[Span], pixels_per_ms: float) -> Callable[[Span], str]:
    """How to label every box of a kind: by name or by layer, whichever fits four of five, or not.

    One form for all of a kind: a label on every third box reads as if that box were special.
    """
    forms: dict[str, Callable[[Span], str]] = {}
    for kind in {span.kind for span in spans}:
        members = [span for span in spans if span.kind == kind]
        narrow_s = sorted(span.duration_s for span in members)[len(members) // 5]
        width = narrow_s * 1e3 * pixels_per_ms
        by_name = all(_fits(span.name, width) for span in members)
        by_layer = all(_fits(_layer(span), width) for span in members)
        forms[kind] = (
            (lambda span: span.name) if by_name else _layer if by_layer else (lambda _: "")
        )
    return lambda span: forms[span.kind](span)


def _layer(span: Span) -> str:
    return span.name.partition(" ")[2]


def _fits(label: str, width_pixels: float) -> bool:
    return len(label) * PIXELS_PER_CHARACTER + LABEL_MARGIN_PIXELS <= width_pixels


def _draw_steps(axes: Axes, spans: Sequence[Span], begin_s: float, end_s: float) -> None:
    """A line where a step ends inside the picture."""
    for span in spans:
        if span.lane == STEP_LANE and begin_s < span.end_s < end_s:
            at_ms = (span.end_s - begin_s) * 1e3
            axes.axvline(at_ms, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
            axes.annotate(
                f"end of {span.name}",
                (at_ms, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-3, 2),
                textcoords="offset points",
                ha="right",
                fontsize=7.5,
                color=FAINT,
            )


def _style_rows(axes: Axes, lanes: Sequence[str], busy: Sequence[float]) -> None:
    """Pale bands, the lanes' names, and how much of the time each was busy."""
    for row in range(len(lanes)):
        axes.axhspan(
            row - ROW_HEIGHT / 2, row + ROW_HEIGHT / 2, color="#f4f5f7", zorder=0, linewidth=0
        )
    axes.set_yticks(
        range(len(lanes)),
        [f"{lane}\n{share:.0%} busy" for lane, share in zip(lanes, busy, strict=True)],
    )
    axes.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=INK)
    axes.tick_params(axis="x", colors=FAINT, labelsize=9)
    axes.grid(axis="x", color="#dfe2e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _busy(spans: Sequence[Span], lane: str, begin_s: float, end_s: float) -> float:
    """Share of the shown time in which the lane had an operation, overlaps counted once."""
    busy_s, covered_s = 0.0, begin_s
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.lane != lane or span.kind == "wait":
            continue
        left, right = max(span.start_s, covered_s), min(span.end_s, end_s)
        busy_s += max(0.0, right - left)
        covered_s = max(covered_s, right)
    return busy_s / (end_s - begin_s)


# -- a sweep --------------------------------------------------------------------------------------


def draw_sweep(
    points: Sequence[tuple[int, Any]], png: str | Path, *, axis: str, title: str
) -> None:
    """Draw step time and tokens per second over the swept values to `png`, each beside the physical
    limit, a dot in the colour of what bounds it. `points`: values and their forecasts."""
    figure = Figure(figsize=(11.0, 4.6), dpi=DPI, facecolor="white")
    values = [value for value, found in points if found.fits]
    fitting = [found for _, found in points if found.fits]
    scale, unit = (1e3, "ms") if max(found.step_s for found in fitting) < 1 else (1.0, "s")
    left, right = (figure.add_axes((x, 0.135, 0.415, 0.685)) for x in (0.062, 0.56))
    colours = [BOUND_COLOURS.get(found.bound, OTHER_COLOUR) for found in fitting]
    steps = [found.step_s * scale for found in fitting]
    _draw_curve(left, values, steps, [found.limits.seconds * scale for found in fitting], colours)
    rates = [found.tokens_per_s for found in fitting]
    limits = [found.question.tokens / found.limits.seconds for found in fitting]
    _draw_curve(right, values, rates, limits, colours)
    most = f"most: {max(rates):,.0f} tokens/s at {values[rates.index(max(rates))]:,}"
    right.text(1.0, 1.025, most, transform=right.transAxes, ha="right", fontsize=8.5, color=INK)
    for axes, name in ((left, f"step, {unit}"), (right, "tokens per second")):
        _style_values(axes, points)
        axes.set_ylim(bottom=0.0)
        axes.margins(y=0.14)
        style(axes, axis, name)
    figure.text(0.062, 0.945, title, color=INK, fontsize=12, weight="bold", va="center")
    entries = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            color=BOUND_COLOURS.get(bound, OTHER_COLOUR),
            label=f"bound by {bound}",
        )
        for bound in dict.fromkeys(found.bound for found in fitting)
    ]
    entries.append(Line2D([], [], label="physical limit", **LIMIT_LINE))
    place = {"bbox_to_anchor": (0.05, 0.895), "fontsize": 8.5, "handletextpad": 0.4}
    _legend(figure, entries, "center left", **place)
    save(figure, png)


def _draw_curve(
    axes: Axes,
    xs: Sequence[int],
    values: Sequence[float],
    limits: Sequence[float],
    colours: Sequence[str],
) -> None:
    axes.plot(xs, values, color=INK, linewidth=1.1, zorder=2)
    axes.scatter(xs, values, s=34, c=colours, zorder=3, edgecolors="white", linewidths=0.8)
    axes.plot(xs, limits, zorder=1, **LIMIT_LINE)


def _style_values(axes: Axes, points: Sequence[tuple[int, Any]]) -> None:
    values = [value for value, _ in points]
    if values[-1] >= 16 * values[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(_apart(values, axes), [f"{value:,}" for value in _apart(values, axes)])
    axes.minorticks_off()
    for value, found in points:
        if not found.fits:
            axes.axvline(value, color=FAINT, linewidth=1.2, linestyle=(0, (1, 2)))
            axes.annotate(
                f"{value:,} does not fit",
                (value, 0.5),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="center",
                fontsize=8,
                color=FAINT,
            )


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


def save(figure: Figure, png: str | Path) -> None:
    """Write the picture, and its directory where there is none. Raises ConfigError."""
    FigureCanvasAgg(figure)
    try:
        Path(png).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, format="png")
    except OSError as error:
        raise ConfigError(
            f"{png}: the picture cannot be written ({error.strerror or error}); name another file"
        ) from error
