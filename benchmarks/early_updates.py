"""What early updates buy, where the optimizer takes longer than backward.

    python benchmarks/early_updates.py [--layers 16] [--rounds 3] [--steps 6] [--save]

Compute is sleep, which leaves the cores free as a GPU does. Link and updates are paced. Updates
take 2 times as long as backward (a dense model with few tokens), and 6 times (a model of experts).
The contenders alternate in one process: no layer is early, as many as backward has time for, and
all of them; each with a clip that no step reaches, and with one that every step passes. "bound" is
the longest lane's work in a step: no schedule can be faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from harness import ROOT, describe, leave, provenance

sys.path.insert(0, str(ROOT))

from stronghold.telemetry.trace import read
from tests.support.sleeping import SleepingModel, timed_steps
from tests.support.training import config, initialized

NUMEL = 1 << 19  # of a layer, in fp32
FORWARD_S = 0.006  # of a layer; backward takes twice that
UPDATE_BYTES = 28  # that a step of an fp32 parameter moves
LANES = ("compute", "fetch", "drain", "gradients", "update")
NEVER, ALWAYS = 1e6, 1e-6  # clips
WARM_UP = 3


class Contender:
    """One engine, and the seconds of its steps."""

    def __init__(self, load: float, early: int | str, clipping: float, num_layers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._trace = Path(self._folder.name) / "trace.json"
        backward_s = 2 * FORWARD_S
        section: dict[str, Any] = {
            "window": 3,
            "cpu_threads": 1,
            "early_layers": early,
            "trace": str(self._trace),
            "emulated": {
                "poison": False,
                "link_gbps": 4 * NUMEL / (0.3 * FORWARD_S) / 1e9,
                "update_gbps": UPDATE_BYTES * NUMEL / (load * backward_s) / 1e9,
            },
        }
        layers = [(NUMEL, FORWARD_S, backward_s)] * num_layers
        self._engine = initialized(
            SleepingModel(layers), config(clipping=clipping, section=section)
        )
        self._x = torch.ones(1024)
        self.seconds: list[float] = []
        self.run(WARM_UP)
        self.seconds.clear()
        self._num_steps = WARM_UP

    def run(self, steps: int) -> None:
        """Take so many steps."""
        self.seconds += timed_steps(self._engine, self._x, steps)
        self._engine.synchronize()

    def close(self, steps: int) -> dict[str, Any]:
        """The result, over `steps` steps in all."""
        performed = self._engine.inspect().performed
        kinds = [action.kind.value for action in performed]
        self._engine.destroy()
        spans = read(self._trace)
        self._folder.cleanup()
        busy = {
            lane: sum(span.duration_s for span in spans if span.lane == lane) / (WARM_UP + steps)
            for lane in LANES
        }
        return {
            "step_s": statistics.median(self.seconds),
            "busy": busy,
            "committed": kinds.count("commit"),
            "withdrawn": kinds.count("withdraw"),
        }


def measure(load: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each contender at this load."""
    kinds = [
        (early, clipping)
        for clipping in (NEVER, ALWAYS)
        for early in (0, max(1, round(1.1 * args.layers / load)), "all")
    ]
    contenders = [Contender(load, *kind, args.layers) for kind in kinds]
    for _ in range(args.rounds):
        for contender in contenders:
            contender.run(args.steps)
    rows = []
    for (early, clipping), contender in zip(kinds, contenders, strict=True):
        result = contender.close(args.rounds * args.steps)
        busy = result["busy"]
        # An update that is committed runs once; one that is dropped runs again.
        compute_s = 3 * FORWARD_S * args.layers
        update_s = load * 2 * FORWARD_S * args.layers
        bound_s = max(compute_s, update_s, busy["fetch"], busy["drain"])
        rows.append(
            {
                "load": load,
                "early": early,
                "clipped": clipping == ALWAYS,
                "bound_s": bound_s,
                "share": bound_s / result["step_s"],
                **result,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for load in (2.0, 6.0) for row in measure(load, args)]
    table = [
        [
            f"{row['load']:g}",
            "every step" if row["clipped"] else "no step",
            str(row["early"]),
            f"{row['step_s'] * 1e3:.0f}",
            f"{row['bound_s'] * 1e3:.0f}",
            f"{row['share']:.2f}",
            f"{row['committed']}",
            f"{row['withdrawn']}",
        ]
        for row in rows
    ]
    heads = ["updates / backward", "clipped", "early layers", "step, ms", "bound, ms"]
    heads += ["bound / step", "committed", "withdrawn"]
    text = (
        describe(__doc__, heads, table)
        if False
        else "\n".join([" | ".join(heads), *(" | ".join(row) for row in table)])
    )
    print(text)
    if args.save:
        leave("early-updates_emulated-cpu", rows, text, provenance())


if __name__ == "__main__":
    main()
