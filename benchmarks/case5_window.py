"""Case 5: the time of a step against the number of slots in the window.

python benchmarks/case5_window.py --layers 32 --sweep 2,4,6,8
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import cases
import compare
from case_plots import draw_lines

SMALL, PAPER = (1, 2, 4, 6), tuple(cases.PUBLISHED_WINDOW_MS)
OURS = "stronghold"


def add(parser: argparse.ArgumentParser) -> None:
    cases.add_sweep(parser, "windows", SMALL, PAPER)
    parser.set_defaults(layers=None)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, task, machine = cases.parse(__doc__ or "", argv, add)
    task = cases.at_layers(task, arguments.layers or (8 if machine.word == "emulated" else 32))
    published = cases.is_artifacts(task) and task.layers == 32
    sweep = cases.sweep_of(arguments, machine, SMALL, PAPER)
    points: list[tuple[float, float]] = []
    cells, found = [], []
    for window in cases.progress(sweep, "windows"):
        (row,) = machine.compare([OURS], dataclasses.replace(task, window=window))
        found.append({"window": window, "row": row})
        known = [cases.PUBLISHED_WINDOW_MS.get(window, "")] if published else []
        if cases.speed(row) is None:
            cells.append([window, cases.result_in_words(row), "", "", "", *known])
            continue
        points.append((window, row["median_step_s"] * 1e3))
        link = row["link_bytes"]
        cells.append(
            [
                window,
                f"{row['median_step_s'] * 1e3:,.1f}",
                f"{row['samples_per_s']:.4g}",
                compare.size(row["device_peak_bytes"]),
                "" if link is None else f"{link / 1e6:,.1f} MB",
                *known,
            ]
        )
    heads = ["window", "ms/step", "samples/s", "GPU peak", "over the link per step"]
    series = {OURS: points}
    if published:
        heads.append("published*, ms/step")
        shown = [(float(w), ms) for w, ms in cases.PUBLISHED_WINDOW_MS.items() if w in sweep]
        series["published*"] = shown
    title = "Time of a step against the window"
    cases.leave(
        arguments,
        "case5",
        title=title,
        body=cases.markdown_table(heads, cells),
        data={"sweep": found},
        draw=lambda png: draw_lines(series, png, title=title, x="slots", y="ms per step"),
        task=task,
        machine=machine,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
