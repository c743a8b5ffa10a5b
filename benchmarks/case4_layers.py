"""Case 4: the time of a step against the number of layers.

python benchmarks/case4_layers.py --sweep 16,24,32,40 --window 15
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import cases
from case_plots import draw_lines

SMALL, PAPER = (2, 4, 8), tuple(cases.PUBLISHED_LAYERS_MS)


def add(parser: argparse.ArgumentParser) -> None:
    cases.add_sweep(parser, "numbers of layers", SMALL, PAPER)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, task, machine = cases.parse(__doc__ or "", argv, add)
    published = cases.is_artifacts(task)
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.method}
    cells, found = [], []
    sweep = cases.sweep_of(arguments, machine, SMALL, PAPER)
    for layers in cases.progress(sweep, "layers"):
        rows = machine.compare(arguments.method, cases.at_layers(task, layers))
        found.append({"layers": layers, "rows": rows})
        line: list[object] = [layers]
        for row in rows:
            good = cases.speed(row) is not None
            line.append(
                f"{row['median_step_s'] * 1e3:,.1f}" if good else cases.result_in_words(row)
            )
            if good:
                series[row["method"]].append((layers, row["median_step_s"] * 1e3))
        cells.append(line + ([cases.PUBLISHED_LAYERS_MS.get(layers, "")] if published else []))
    heads = ["layers", *(f"{name}, ms" for name in arguments.method)]
    if published:
        heads.append("stronghold published*, ms")
        points = [(n, ms) for n, ms in cases.PUBLISHED_LAYERS_MS.items() if n in sweep]
        series["published, window 15*"] = [(float(n), ms) for n, ms in points]
    title = "Time of a step against layers"
    cases.leave(
        arguments,
        "case4",
        title=title,
        body=cases.markdown_table(heads, cells),
        data={"sweep": found},
        draw=lambda png: draw_lines(series, png, title=title, x="layers", y="ms per step"),
        task=task,
        machine=machine,
        layers=", ".join(map(str, sweep)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
