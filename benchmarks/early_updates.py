"""What early updates buy, where the optimizer takes longer than backward.

    python benchmarks/early_updates.py [--layers 32] [--rounds 3] [--steps 4] [--save]

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

from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import LayerWork, Workload
from stronghold.plan.plan import Plan
from stronghold.predict.simulate import simulate
from stronghold.telemetry.trace import read
from tests.support.sleeping import SleepingModel, rates, timed_steps
from tests.support.training import config, initialized

NUMEL = 1 << 19  # of a layer, in fp32
FORWARD_S = 0.006  # of a layer; backward takes twice that
UPDATE_BYTES = 28  # that a step of an fp32 parameter moves
LANES = ("compute", "fetch", "offload", "gradients", "update")
NEVER, ALWAYS = 1e6, 1e-6  # clips
WARM_UP = 3


class Contender:
    """One engine, and the seconds of its steps."""

    def __init__(self, load: float, early: int | str, clipping: float, num_layers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._trace = Path(self._folder.name) / "trace.json"
        link_gbps = 4 * NUMEL / (0.3 * FORWARD_S) / 1e9
        update_gbps = UPDATE_BYTES * NUMEL / (load * 2 * FORWARD_S) / 1e9
        section: dict[str, Any] = {
            "window": 3,
            "cpu_threads": 1,
            "early_layers": early,
            "trace": str(self._trace),
            "emulated": {"poison": False, "link_gbps": link_gbps, "update_gbps": update_gbps},
        }
        layers = [(NUMEL, FORWARD_S, 2 * FORWARD_S)] * num_layers
        self._engine = initialized(
            SleepingModel(layers), config(clipping=clipping, section=section)
        )
        self._rates = rates(link_gbps, update_gbps=update_gbps)
        self._x = torch.ones(1024)
        self.seconds: list[float] = []
        self.run(WARM_UP)
        self.seconds.clear()

    def run(self, steps: int) -> None:
        """Take so many steps."""
        self.seconds += timed_steps(self._engine, self._x, steps)
        self._engine.synchronize()

    def predicted_s(self, layout: ModelLayout, plan: Plan, compute_s: float) -> float:
        """The simulator's seconds of a step, from the paces and the measured compute of a step."""
        forward_s = compute_s / 3 / len(layout.layers)
        load = LayerWork(forward_s=forward_s, backward_s=2 * forward_s)
        work = Workload(layers=(load,) * len(layout.layers))
        return simulate(layout, plan, work, self._rates, asynchronous=False).step_s

    def close(self, steps: int) -> dict[str, Any]:
        """The result, over `steps` steps in all."""
        now = self._engine.inspect()
        kinds = [action.kind.value for action in now.performed]
        self._engine.destroy()
        spans = read(self._trace)
        self._folder.cleanup()
        busy = {
            lane: sum(span.duration_s for span in spans if span.lane == lane) / (WARM_UP + steps)
            for lane in LANES
        }
        return {
            "step_s": statistics.median(self.seconds),
            "predicted_s": self.predicted_s(now.layout, now.plan, busy["compute"]),
            "busy": busy,
            "committed": kinds.count("commit"),
            "withdrawn": kinds.count("withdraw"),
        }


def measure(load: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each contender at this load."""
    in_time = min(args.layers, max(1, round(1.1 * args.layers / load)))
    kinds = [(early, clip) for clip in (NEVER, ALWAYS) for early in (0, in_time, "all")]
    contenders = [Contender(load, *kind, args.layers) for kind in kinds]
    for _ in range(args.rounds):
        for contender in contenders:
            contender.run(args.steps)
    rows = []
    for (early, clipping), contender in zip(kinds, contenders, strict=True):
        result = contender.close(args.rounds * args.steps)
        busy = result["busy"]
        compute_s = 3 * FORWARD_S * args.layers
        update_s = load * 2 * FORWARD_S * args.layers
        bound_s = max(compute_s, update_s, busy["fetch"], busy["offload"])
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
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--loads", type=float, nargs="+", default=[2.0, 6.0])
    parser.add_argument("--output", type=Path, help="write the data there")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = provenance()
    rows = [row for load in args.loads for row in measure(load, args)]
    heads = ["updates / backward", "clipped", "early layers", "step, ms", "longest lane, ms"]
    heads += ["longest lane / step", "predicted / step", "committed", "left to the gate"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [
            f"{row['load']:g}",
            "every step" if row["clipped"] else "no step",
            str(row["early"]),
            f"{row['step_s'] * 1e3:.0f}",
            f"{row['bound_s'] * 1e3:.0f}",
            f"{row['share']:.2f}",
            "" if row["clipped"] else f"{row['predicted_s'] / row['step_s']:.2f}",
            str(row["committed"]),
            str(row["withdrawn"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    page = "\n".join(
        [
            "# Early updates",
            "",
            describe(record),
            "",
            f"{args.layers} layers. Compute is sleep. Link and updates are paced, on the",
            f"emulated device. Medians of {args.rounds * args.steps} steps; contenders alternate.",
            "The simulator predicts from the paces and the measured seconds of compute. Nothing",
            "here has run on a GPU.",
            "",
            *lines,
        ]
    )
    leave("early-updates", page, {**record, "rows": rows}, to=args.output, keep=args.save)


if __name__ == "__main__":
    main()
