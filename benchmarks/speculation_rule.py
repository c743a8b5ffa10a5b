"""When early updates are worth while: rules against sequences of norms.

    python benchmarks/speculation_rule.py [--steps 20000] [--save]

A step's early updates are of use if the step is not clipped (a hit: the step is shorter by the
gain) and are done again if it is (a miss: it is longer by the cost). The logarithm of a run's norm
follows an autoregressive process of first order. Norms of neighbouring steps are alike by
`correlation`, and `spread` is the standard deviation of the logarithm. `clipped` is the share of
steps whose norm passes the clip. Each rule sees the norms of earlier steps alone. The score is what
a rule saves, as a share of what one saves that knows every norm before.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from harness import describe, leave, provenance

from stronghold.streaming import early_updates

# of a step: half of it is saved; one layer of 32 is updated twice
GAIN, COST = 0.5, 0.03
CORRELATIONS = (0.0, 0.5, 0.9)
SPREADS = (0.1, 0.5)
CLIPPED = (0.001, 0.05, 0.5, 0.95, 1.0)
NEAR = (1.0, 1.25, 2.0)


class Always:
    """Starts early updates in every step."""

    is_likely = True

    def end_step(self, *, norm: float, clipping: float) -> None:
        """Learns nothing."""


class LastOne:
    """Starts them if the step before was not clipped."""

    def __init__(self) -> None:
        self.is_likely = True

    def end_step(self, *, norm: float, clipping: float) -> None:
        """The next step will be as this one."""
        self.is_likely = norm <= clipping


def norms(steps: int, correlation: float, spread: float, clipped: float) -> Iterator[float]:
    """Norms whose share above 1 is about `clipped`."""
    rng = random.Random(f"{correlation} {spread} {clipped}")
    normal = statistics.NormalDist()
    level = 3.0 if clipped == 1.0 else -normal.inv_cdf(1.0 - clipped) * spread
    state = rng.gauss(0.0, 1.0)
    for _ in range(steps):
        state = correlation * state + math.sqrt(1.0 - correlation**2) * rng.gauss(0.0, 1.0)
        yield math.exp(level + spread * state)


def saved(
    rule: Always | LastOne | early_updates.EarlyUpdateRule, of: list[float]
) -> tuple[float, float]:
    """What the rule saves, in steps, and its worst loss over a hundred steps."""
    total, recent, worst = 0.0, [0.0] * 100, 0.0
    for number, norm in enumerate(of):
        gain = 0.0
        if rule.is_likely:
            gain = GAIN if norm <= 1.0 else -COST
        total += gain
        recent[number % 100] = gain
        if number >= 100:
            worst = min(worst, sum(recent) / 100)
        rule.end_step(norm=norm, clipping=1.0)
    return total, worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--output", type=Path, help="write the data there")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    record = provenance()
    rules: dict[
        str, tuple[Callable[[], Always | LastOne | early_updates.EarlyUpdateRule], float]
    ] = {
        "always": (Always, 0.0),
        "as the step before": (LastOne, 0.0),
        **{f"pauses, near {near:g}": (early_updates.EarlyUpdateRule, near) for near in NEAR},
    }
    rows = []
    for correlation in CORRELATIONS:
        for spread in SPREADS:
            for clipped in CLIPPED:
                of = list(norms(args.steps, correlation, spread, clipped))
                best = GAIN * sum(norm <= 1.0 for norm in of)
                row = {"correlation": correlation, "spread": spread, "clipped": clipped}
                scores = {}
                for name, (rule, near) in rules.items():
                    with mock.patch.object(early_updates, "NEAR", near):
                        total, worst = saved(rule(), of)
                    scores[name] = {"saved": total / best if best else total, "worst": worst}
                rows.append({**row, "steps_saved_at_best": best, "rules": scores})
    heads = ["correlation", "spread", "clipped", *rules]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"{row['correlation']:g}", f"{row['spread']:g}", f"{row['clipped']:.1%}"]
        for score in row["rules"].values():
            unit = "" if row["steps_saved_at_best"] else " steps"
            cells.append(f"{score['saved']:.2f}{unit} ({score['worst']:+.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    page = "\n".join(
        [
            "# When early updates are worth while",
            "",
            describe(record),
            "",
            f"{args.steps} steps each. A hit saves {GAIN:g} of a step, a miss costs {COST:g}.",
            "A cell has the share of the savings of a rule that knows every norm before, and",
            "in brackets the worst mean of a hundred steps. Where every step is clipped nothing",
            "can be saved, and the cell has what was lost, in steps. The norms are made up: an",
            "autoregressive process, not a training run.",
            "",
            *lines,
        ]
    )
    leave("speculation-rule", page, {**record, "rows": rows}, to=args.output, keep=args.save)


if __name__ == "__main__":
    main()
