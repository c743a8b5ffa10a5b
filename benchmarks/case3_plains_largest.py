"""Case 3: throughput of every method at the largest size that plain training holds.

    python benchmarks/case3_plains_largest.py --layers 32

Without `--layers` that size is searched for, as in case 1; the artifact's is 32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import case1_largest
import cases
from case_plots import draw_bars

PUBLISHED_LAYERS = 32


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(layers=None)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, task, machine = cases.parse(__doc__ or "", argv, add)
    layers = arguments.layers
    if layers is None and machine.simulated:
        layers = PUBLISHED_LAYERS
    if layers is None:
        layers = case1_largest.run(["plain"], task, machine, None, 1)[0]["layers"]
        if not layers:
            raise SystemExit("case 3: plain trains no size under these caps")
    task = cases.at_layers(task, layers)
    rows = machine.compare(arguments.method, task)
    published = cases.is_artifacts(task) and layers == PUBLISHED_LAYERS
    known = cases.PUBLISHED_SAMPLES_PER_S[PUBLISHED_LAYERS] if published else {}
    plain = next((cases.speed(row) for row in rows if row["method"] == "plain"), None)
    cells, bars = [], {}
    for row in rows:
        name, found = row["method"], cases.speed(row)
        cells.append(
            [
                name,
                cases.result_in_words(row),
                f"{found / plain:.2f}" if found and plain else "",
                f"{row['median_step_s'] * 1e3:,.1f}" if found else "",
                *([known.get(name, "")] if published else []),
            ]
        )
        if found:
            bars[name] = found
    bars |= {f"{name}, published*": value for name, value in known.items()}
    heads = ["method", "samples/s", "of plain's", "ms/step", *(["published*"] if published else [])]
    title = "Throughput at plain's largest size"
    cases.leave(
        arguments,
        "case3",
        title=title,
        body=cases.markdown_table(heads, cells),
        data={"layers": layers, "rows": rows},
        draw=lambda png: draw_bars({"": bars}, png, title=title, unit="samples/s"),
        task=task,
        machine=machine,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
