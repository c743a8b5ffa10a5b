"""`stronghold trace`: draws the trace of a run as a timeline with one row per lane.

One thread enters. It draws with Agg, so it needs no display.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stronghold.errors import ConfigError
from stronghold.telemetry import trace
from stronghold.telemetry.trace import STEP_LANE, Span, lane_order
from stronghold.tools import Answer

COLOURS = {
    "forward": "#4e79a7",
    "backward": "#e15759",
    "recompute": "#9c755f",
    "fetch": "#59a14f",
    "offload": "#f28e2b",
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
WIDTH_INCHES, ROW_INCHES, DPI = 15.0, 0.46, 140
ROW_HEIGHT = 0.74  # of a lane's boxes, in rows
LIMIT_LINE: dict[str, Any] = {"color": FAINT, "linewidth": 1.2, "linestyle": "--"}
LETTERS = 160  # letters of labels, side by side, fill the width
ROUNDED_S = 2e-9  # a trace keeps nanoseconds: spans that touch may overlap by so much


def run(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Draw `arguments.file`. The answer is the path of the picture."""
    spans = trace.read(arguments.file)
    png = arguments.output or arguments.file.with_suffix(".png")
    draw_timeline(spans, png, step=arguments.step)
    return Answer(text=str(png))


def draw_timeline(spans: Sequence[Span], png: str | Path, *, step: int | None = None) -> None:
    """Draw one row per lane to `png`: `step`, else the last step, else all of a trace without one.

    Raises ConfigError if there is nothing to draw, or if the step is not in the trace.
    """
    begin_s, end_s, title = _extent(spans, step)
    visible = [
        span
        for span in spans
        if span.lane != STEP_LANE
        and span.end_s > begin_s + ROUNDED_S
        and span.start_s < end_s - ROUNDED_S
    ]
    if not visible:
        raise ConfigError(f"timeline: {title} has no operations")
    lanes = lane_order(span.lane for span in visible)
    size = WIDTH_INCHES, ROW_INCHES * len(lanes) + 1.3
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", color=INK, weight="bold")
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, [span for span in visible if span.lane == lane], begin_s, end_s)
    for span in spans:
        if span.lane == STEP_LANE and begin_s < span.end_s < end_s:
            end_ms = (span.end_s - begin_s) * 1e3
            axes.axvline(end_ms, **LIMIT_LINE)
            axes.text(end_ms, -0.5, f"end of {span.name}", ha="right", va="bottom", fontsize=8)
    axes.set_xlim(0.0, (end_s - begin_s) * 1e3)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    busy = [f"{lane}\n{_busy(visible, lane, begin_s, end_s):.0%} busy" for lane in lanes]
    axes.set_yticks(range(len(lanes)), busy)
    style(axes, "ms", "")
    kinds = {span.kind for span in visible}
    entries = [Patch(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in kinds]
    if kinds - set(COLOURS):
        entries.append(Patch(color=OTHER_COLOUR, label="other"))
    legend = {"ncols": len(entries), "frameon": False, "labelcolor": INK}
    figure.legend(handles=entries, loc="outside lower center", **legend)
    save(figure, png)


def style(axes: Axes, x: str, y: str) -> None:
    """Give the axes their names, a pale grid and no frame."""
    axes.set_xlabel(x, color=FAINT)
    axes.set_ylabel(y, color=FAINT)
    axes.grid(color="#eceef1")
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0)
    axes.spines[:].set_visible(False)


def _extent(spans: Sequence[Span], step: int | None) -> tuple[float, float, str]:
    """The first and the last second to show, and the title."""
    if not spans:
        raise ConfigError("timeline: the trace has no operations")
    steps = {
        int(span.name.split()[-1]): (span.start_s, span.end_s)
        for span in spans
        if span.lane == STEP_LANE
    }
    if step is not None and step not in steps:
        known = f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
        raise ConfigError(f"timeline: step {step} is not in the trace, which has {known}")
    if not steps:
        return min(s.start_s for s in spans), max(s.end_s for s in spans), "all steps"
    shown = max(steps) if step is None else step
    begin_s, end_s = steps[shown]
    return begin_s, end_s, f"step {shown}, {(end_s - begin_s) * 1e3:,.1f} ms"


def _draw_lane(axes: Axes, row: int, spans: Sequence[Span], begin_s: float, end_s: float) -> None:
    """Draw the boxes of one lane, the enclosing before the enclosed.

    Boxes of a kind have labels, names or else layers, if all but the narrowest have room. A label
    on every third box would look special.
    """
    kinds: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=_outer_first):
        kinds[span.kind].append(span)
    for kind, members in kinds.items():
        boxes = [_box(span, begin_s, end_s) for span in members]
        place = (row - ROW_HEIGHT / 2, ROW_HEIGHT)
        colour = COLOURS.get(kind, OTHER_COLOUR)
        axes.broken_barh(boxes, place, facecolor=colour, edgecolor="white", linewidth=0.2)
        durations_s = sorted(span.duration_s for span in members)
        narrow_s = durations_s[len(members) // 5]
        num_letters = LETTERS * narrow_s / (end_s - begin_s)
        names = [span.name for span in members]
        layers = [name.partition(" ")[2] for name in names]
        for labels in (names, layers):
            if max(map(len, labels)) < num_letters:
                _draw_labels(axes, row, labels, boxes)
                break


def _box(span: Span, begin_s: float, end_s: float) -> tuple[float, float]:
    """Return the left end and the width, in ms, of the shown time of a span."""
    left_s = max(span.start_s, begin_s)
    right_s = min(span.end_s, end_s)
    return (left_s - begin_s) * 1e3, (right_s - left_s) * 1e3


def _draw_labels(
    axes: Axes, row: int, labels: Sequence[str], boxes: Sequence[tuple[float, float]]
) -> None:
    for label, (left, width) in zip(labels, boxes, strict=True):
        axes.text(left + width / 2, row, label, ha="center", va="center", clip_on=True)


def _outer_first(span: Span) -> tuple[float, float]:
    return span.start_s, -span.end_s


def _busy(spans: Sequence[Span], lane: str, begin_s: float, end_s: float) -> float:
    """The share of the shown time in which the lane had an operation. Overlaps count once."""
    busy_s, covered_s = 0.0, begin_s
    for span in sorted(spans, key=attrgetter("start_s")):
        if span.lane != lane or span.kind == "wait":
            continue
        left, right = max(span.start_s, covered_s), min(span.end_s, end_s)
        busy_s += max(0.0, right - left)
        covered_s = max(covered_s, right)
    return busy_s / (end_s - begin_s)


def save(figure: Figure, png: str | Path) -> None:
    """Write the picture, and its directory if that is missing. Raises ConfigError."""
    FigureCanvasAgg(figure)
    try:
        Path(png).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, format="png")
    except OSError as error:
        raise ConfigError(
            f"{png}: the picture cannot be written ({error.strerror or error}); name another file"
        ) from error
