"""Beside the artifact's cases: throughput against tokens per step, and where streaming is free.

    python benchmarks/case6_tokens.py --layers 32 --sweep 1,2,4,8,16,32

The sweep is over samples per step. Break-even is where a method that streams reaches 97 % of plain.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import cases
from case_plots import draw_lines

SMALL, PAPER = (1, 2, 4), (1, 2, 4, 8, 16, 32)
EVEN = 0.97


def add(parser: argparse.ArgumentParser) -> None:
    cases.add_sweep(parser, "samples per micro-batch", SMALL, PAPER)


def break_even(points: dict[int, dict[str, float]], name: str) -> int | None:
    """Fewest tokens from which on the method keeps up with plain; None: nowhere in the sweep."""
    found = None
    for tokens in sorted(points, reverse=True):
        speeds = points[tokens]
        if name not in speeds or "plain" not in speeds or speeds[name] < EVEN * speeds["plain"]:
            break
        found = tokens
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments, task, machine = cases.parse(__doc__ or "", argv, add)
    points: dict[int, dict[str, float]] = {}
    cells: list[list[object]] = []
    found: list[dict[str, Any]] = []
    for batch in cases.progress(cases.sweep_of(arguments, machine, SMALL, PAPER), "batches"):
        sized = dataclasses.replace(task, batch=batch)
        rows = machine.compare(arguments.method, sized)
        found.append({"batch": batch, "tokens_per_step": sized.tokens_per_step, "rows": rows})
        good = {row["method"]: row["tokens_per_s"] for row in rows if cases.speed(row) is not None}
        points[sized.tokens_per_step] = good
        words = [
            f"{good[row['method']]:,.0f}" if row["method"] in good else cases.result_in_words(row)
            for row in rows
        ]
        cells.append([f"{sized.tokens_per_step:,}", *words])
    body = [
        cases.markdown_table(["tokens per step", *(f"{n}, /s" for n in arguments.method)], cells)
    ]
    even = {name: break_even(points, name) for name in arguments.method if name != "plain"}
    if "plain" in arguments.method:
        body += ["", f"Tokens per step from which a method reaches {EVEN:.0%} of plain:", ""]
        body += [
            f"- {name}: " + (f"{tokens:,}" if tokens else "nowhere in this sweep")
            for name, tokens in even.items()
        ]
    series = {
        name: [(float(tokens), speeds[name]) for tokens, speeds in points.items() if name in speeds]
        for name in arguments.method
    }
    title = "Throughput against tokens per step"
    cases.leave(
        arguments,
        "case6",
        title=title,
        body="\n".join(body),
        data={"sweep": found, "break_even_tokens": even},
        draw=lambda png: draw_lines(series, png, title=title, x="tokens per step", y="tokens/s"),
        task=task,
        machine=machine,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
