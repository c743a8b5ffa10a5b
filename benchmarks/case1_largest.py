"""Case 1: the largest model that each method trains under the same caps on GPU and host memory.

    python benchmarks/case1_largest.py --machine here --gpu-memory 32GB --host-memory 90GB

Layers are doubled until a training of two steps does not fit, then bisected. Size is all that
counts here: without `--window` stronghold has one slot. Every try is kept in the file of `--tries`,
so that an interrupted search goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cases
from case_plots import draw_bars
from methods.task import Task, gpt_parameters

MOST_LAYERS = 4096


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tries", type=Path, metavar="FILE", help="keep every try here, and reuse")
    parser.add_argument("--resolution", type=int, default=1, help="layers between fits and not")


def largest(
    fits: Callable[[int], bool], *, start: int, most: int = MOST_LAYERS, resolution: int = 1
) -> tuple[int, int | None]:
    """(largest that fits, smallest known not to fit), 0 and None where there is none; `fits` must
    be monotone."""
    low, high = 0, None
    layers = start
    while high is None and layers <= most:
        if fits(layers):
            low, layers = layers, layers * 2
        else:
            high = layers
    while high is not None and high - low > resolution:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low, high


class Tries:
    """Results by method and layers, on disk."""

    def __init__(self, machine: cases.Machine, task: Task, file: Path | None) -> None:
        # Two steps: the second holds the optimizer's state and everything else of a steady state.
        self._task = dataclasses.replace(task, steps=1, warmup=1, window=task.window or 1)
        self._machine = machine
        self._file = file
        self.rows: dict[str, Any] = {}
        if file is not None and file.exists():
            self.rows = json.loads(file.read_text())

    def __call__(self, method: str, layers: int) -> cases.Row:
        task = cases.at_layers(self._task, layers)
        key = f"{method} {self._machine.word} {task.to_json()}"
        if key not in self.rows:
            row = self._machine.run(method, task)
            kept = ("status", "reason", "num_parameters", "device_peak_bytes", "host_peak_bytes")
            self.rows[key] = {name: row.get(name) for name in (*kept, "host_anonymous_peak_bytes")}
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(json.dumps(self.rows, indent=1) + "\n")
        found: cases.Row = self.rows[key]
        return found


class CannotRun(Exception):
    """The method ended otherwise than by fitting or not."""


def search(method: str, tries: Tries, start: int, resolution: int) -> cases.Row:
    """The row of one method: layers, parameters, and what stopped it."""

    def fits(layers: int) -> bool:
        row = tries(method, layers)
        if row["status"] not in ("ok", "out of memory"):
            raise CannotRun(f"{row['status']}: {row.get('reason')}")
        return bool(row["status"] == "ok")

    try:
        low, high = largest(fits, start=start, resolution=resolution)
    except CannotRun as error:
        return {"method": method, "layers": None, "reason": str(error)}
    row = tries(method, low) if low else {}
    return {
        "method": method,
        "layers": low,
        "num_parameters": row.get("num_parameters") or 0,
        "device_peak_bytes": row.get("device_peak_bytes"),
        "host_anonymous_peak_bytes": row.get("host_anonymous_peak_bytes"),
        "reason": tries(method, high)["reason"] if high else f"nothing up to {MOST_LAYERS} layers",
    }


def run(
    methods: Sequence[str], task: Task, machine: cases.Machine, file: Path | None, resolution: int
) -> list[cases.Row]:
    tries = Tries(machine, task, file)
    start = 2 if machine.word == "emulated" else 8
    found = cases.progress(methods, "largest size")
    return [search(method, tries, start, resolution) for method in found]


def table(rows: Sequence[cases.Row], task: Task) -> str:
    """Markdown, with the artifact's published sizes where the task is the artifact's."""
    published = cases.PUBLISHED_LARGEST if cases.is_artifacts(task) else {}
    cells = []
    for row in rows:
        size = row["layers"]
        numbers = (
            ["", ""] if size is None else [str(size), cases.count_in_words(row["num_parameters"])]
        )
        reason = " ".join(str(row["reason"]).split()).replace("|", "/")[:120]
        known = published.get(row["method"])
        cells.append([row["method"], *numbers, reason, *([known or ""] if published else [])])
    heads = ["method", "layers", "parameters", "what stopped the next size"]
    return cases.markdown_table([*heads, *(["layers published*"] if published else [])], cells)


def rows_are_large(rows: Sequence[cases.Row]) -> bool:
    return any((row.get("num_parameters") or 0) >= 10**9 for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, task, machine = cases.parse(__doc__ or "", argv, add)
    rows = run(arguments.method, task, machine, arguments.tries, arguments.resolution)
    unit, word = (1e9, "billions") if rows_are_large(rows) else (1e6, "millions")
    bars = {
        row["method"]: row["num_parameters"] / unit
        for row in rows
        if row["layers"] is not None and row["layers"] > 0
    }
    if cases.is_artifacts(task):
        for name, layers in cases.PUBLISHED_LARGEST.items():
            count = gpt_parameters(layers=layers, hidden=2048, vocab=50304, seq=1024)
            bars[f"{name}, published*"] = count / unit
    body = table(rows, task)
    if cases.is_artifacts(task):
        body += "\n\n\\* the artifact's own, V100 of 32 GB, 90 GB of RAM."
    cases.leave(
        arguments,
        "case1",
        title="Largest trainable size",
        body=body,
        data={"rows": rows},
        draw=lambda png: draw_bars(
            {"": bars}, png, title="Largest trainable size", unit=f"{word} of parameters"
        ),
        task=task,
        machine=machine,
        layers="various",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
