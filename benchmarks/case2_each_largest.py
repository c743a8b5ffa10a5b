"""Case 2: throughput at each baseline's own largest size, against stronghold at that size.

    python benchmarks/case2_each_largest.py --sizes plain=32,l2l=78,zero-offload=48

Sizes are layers; without `--sizes` they are read from case 1's JSON (`--largest FILE`), or searched
for first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import case1_largest
import cases
from case_plots import draw_bars
from methods.task import Task

OURS = "stronghold"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", help="METHOD=LAYERS, joined by commas")
    parser.add_argument("--largest", type=Path, metavar="FILE", help="case 1's JSON")
    parser.add_argument("--resolution", type=int, default=1, help="of the search, in layers")


def sizes_of(arguments: argparse.Namespace, task: Task, machine: cases.Machine) -> dict[str, int]:
    """Layers by method; those that train nothing are left out."""
    if arguments.sizes:
        pairs = (word.partition("=") for word in arguments.sizes.split(","))
        return {name: int(layers) for name, _, layers in pairs}
    if arguments.largest:
        rows = json.loads(arguments.largest.read_text())["rows"]
    elif machine.simulated:
        return {name: layers for name, layers in cases.PUBLISHED_LARGEST.items() if name != OURS}
    else:
        rows = case1_largest.run(arguments.method, task, machine, None, arguments.resolution)
    return {row["method"]: row["layers"] for row in rows if row["layers"]}


def main(argv: Sequence[str] | None = None) -> int:
    arguments, task, machine = cases.parse(__doc__ or "", argv, add)
    sizes = {name: n for name, n in sizes_of(arguments, task, machine).items() if name != OURS}
    found = []
    for name, layers in cases.progress(list(sizes.items()), "sizes"):
        names = [OURS] if machine.simulated else [name, OURS]
        rows = {r["method"]: r for r in machine.compare(names, cases.at_layers(task, layers))}
        found.append({"baseline": name, "layers": layers, "rows": rows})
    published = cases.is_artifacts(task)
    cells, bars = [], {}
    for entry in found:
        name, layers, rows = entry["baseline"], entry["layers"], entry["rows"]
        theirs = cases.speed(rows[name]) if name in rows else None
        ours = cases.speed(rows[OURS])
        ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
        known = cases.PUBLISHED_SAMPLES_PER_S.get(layers, {}) if published else {}
        cells.append(
            [
                name,
                layers,
                cases.result_in_words(rows[name]) if name in rows else "not simulated",
                cases.result_in_words(rows[OURS]),
                ratio,
                *([known.get(name, ""), known.get(OURS, "")] if published else []),
            ]
        )
        pairs = {name: theirs, OURS: ours}
        if published:
            pairs |= {
                f"{name}, published*": known.get(name),
                f"{OURS}, published*": known.get(OURS),
            }
        bars[f"{layers} layers"] = bars.get(f"{layers} layers", {}) | {
            label: value for label, value in pairs.items() if value
        }
    heads = ["baseline", "layers", "its samples/s", "stronghold's", "ratio"]
    heads += ["its, published*", "stronghold's, published*"] if published else []
    title = "Throughput at each baseline's largest size"
    cases.leave(
        arguments,
        "case2",
        title=title,
        body=cases.markdown_table(heads, cells),
        data={"rows": found},
        draw=lambda png: draw_bars(bars, png, title=title, unit="samples/s"),
        task=task,
        machine=machine,
        layers="various",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
