"""Pictures of the cases: bars by method, lines over a sweep; in the look of stronghold's own.

Draws with Agg, so it needs no display. Never computes a figure that the table does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stronghold.tools.plot import DPI, FAINT, INK

OURS, OTHERS = ("#4e79a7", ("#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2"))
PALE = "#c9ced6"
BAR_INCHES = 0.42


def draw_bars(
    groups: Mapping[str, Mapping[str, float]], png: Path, *, title: str, unit: str
) -> None:
    """Horizontal bars: group -> name -> value. Ours are blue, names that end with a star pale."""
    rows = [(group, name, value) for group, bars in groups.items() for name, value in bars.items()]
    if not rows:
        return
    gaps = max(0, len(groups) - 1) if any(len(bars) > 1 for bars in groups.values()) else 0
    height = BAR_INCHES * (len(rows) + gaps) + 1.1
    figure, axes = _figure(height)
    place, ticks = 0.0, []
    previous = None
    for group, name, value in rows:
        if previous is not None and group != previous and gaps:
            place += 1.0
        previous = group
        axes.barh(place, value, height=0.72, color=_colour(name), zorder=2)
        axes.text(value, place, f" {value:.4g}", va="center", fontsize=9, color=INK)
        ticks.append((place, f"{group}: {name}" if group else name))
        place += 1.0
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], color=INK, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.15 * max(value for *_, value in rows))
    axes.set_xlabel(unit, color=FAINT, fontsize=9)
    _finish(figure, axes, png, title, grid="x", left=0.22)


def draw_lines(
    series: Mapping[str, Sequence[tuple[float, float]]], png: Path, *, title: str, x: str, y: str
) -> None:
    """Curves over a sweep: name -> (x, y) points."""
    figure, axes = _figure(4.6)
    drawn = [(name, points) for name, points in series.items() if points]
    if not drawn:
        return
    others = iter(OTHERS * len(drawn))
    for name, points in drawn:
        if name.endswith("*"):
            colour, dashes = PALE, "--"
        else:
            colour, dashes = (OURS if "stronghold" in name else next(others)), "-"
        axes.plot(
            [at for at, _ in points],
            [value for _, value in points],
            dashes,
            color=colour,
            linewidth=1.8,
            marker="o",
            markersize=4.5,
            label=name,
        )
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(x, color=FAINT, fontsize=9)
    axes.set_ylabel(y, color=FAINT, fontsize=9)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    _finish(figure, axes, png, title, grid="both", left=0.085)


def _colour(name: str) -> str:
    if name.endswith("*"):
        return PALE
    return OURS if "stronghold" in name else "#a8a29e"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.0, height), dpi=DPI, facecolor="white")
    return figure, figure.add_subplot()


def _finish(figure: Figure, axes: Axes, png: Path, title: str, *, grid: str, left: float) -> None:
    height = figure.get_figheight()
    figure.subplots_adjust(left=left, right=0.975, top=1 - 0.42 / height, bottom=0.55 / height)
    axes.set_title(title, color=INK, fontsize=12, weight="bold", loc="left")
    axes.grid(axis=grid, color="#eceef1", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    png.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(png, format="png")
