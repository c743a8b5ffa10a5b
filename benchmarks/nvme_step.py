"""How near a step is to its longest lane: compute, the disk, or the CPU's Adam.

    python benchmarks/nvme_step.py [--repeats 3] [--clipping 0.0] [--save]

The laws of tests/laws/test_overlap.py, as figures: a model of
sleeping layers on the emulated device, with moments on a paced disk or with a paced Adam in RAM,
for updates that take a tenth of what compute takes up to many times that. Nothing is pinned: which
updates are early is what the engine finds from its first steps. Each figure is the median of the
repeats' medians. Sleeps end late where others use the machine: judge `ratio` on a quiet one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from harness import ROOT, describe, hardware, provenance, save
from tqdm import tqdm

sys.path.insert(0, str(ROOT))

from tests.laws.test_overlap import (
    BALANCED,
    COMPUTE_BOUND,
    DISK_BOUND,
    measure_step,
    measure_updates,
)
from tests.support.sleeping import Measured

LOADS = (COMPUTE_BOUND, 0.6, *BALANCED, 2.0, DISK_BOUND)


def repeat(measure: Callable[[float, Path], Measured], load: float, repeats: int) -> dict[str, Any]:
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(load, Path(folder)))
    return {
        "load": load,
        "step_s": statistics.median(one.step_s for one in found),
        "bound_s": statistics.median(one.bound_s for one in found),
        "ratio": statistics.median(one.step_s / one.bound_s for one in found),
        "num_early": sorted(one.num_early for one in found),
    }


def table(results: dict[str, list[dict[str, Any]]], record: dict[str, Any]) -> str:
    lines = [
        "# A step and its longest lane",
        "",
        describe(record),
        "",
        "`load`: seconds of the updates by seconds of compute. `bound_s`: the longest lane's work.",
        "",
        "| updates | load | step_s | bound_s | ratio | early layers |",
        "|---|---|---|---|---|---|",
    ]
    for kind, rows in results.items():
        for row in rows:
            early = ", ".join(map(str, row["num_early"]))
            lines.append(
                f"| {kind} | {row['load']:g} | {row['step_s']:.4f} | {row['bound_s']:.4f} | "
                f"{row['ratio']:.3f} | {early} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clipping", type=float, default=0.0, help="above 0: updates are held back"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = provenance()
    kinds = {
        "on NVMe": partial(measure_step, clipping=args.clipping),
        "in RAM": partial(measure_updates, clipping=args.clipping),
    }
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for kind, measure in kinds.items():
        for load in tqdm(LOADS, desc=kind, disable=None, leave=False):
            results[kind].append(repeat(measure, load, args.repeats))
    markdown = table(results, record)
    print(markdown)
    if args.save:
        for path in save(f"nvme-step-{hardware()}", markdown, {**record, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
