"""Whether a method's losses are the reference's: the bound, and the verdict.

[Note: bound] Two correct programs differ by the order in which they add. How far that carries a
loss in this task is measured: the reference runs a second time with every micro-batch cut in two,
which is the same sum in another order. Up to step t a method may be FACTOR times as far from the
reference as the two were from each other at any step up to t, and never has to be nearer than
FLOOR, relative to the loss: rounding differs by more than order alone (another norm's sum, another
split of the master), but not by an order of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FACTOR = 8.0
FLOOR = {"fp32": 1e-5, "bf16": 2e-4}


def bounds(
    reference: Sequence[float], other_order: Sequence[float] | None, precision: str
) -> list[float]:
    """Allowed relative difference at every step; see [Note: bound]. FLOOR without a second run."""
    if other_order is None:
        return [FLOOR[precision]] * len(reference)
    allowed, noise = [], 0.0
    for own, other in zip(reference, other_order, strict=True):
        noise = max(noise, difference(own, other))
        allowed.append(max(FLOOR[precision], FACTOR * noise))
    return allowed


def difference(loss: float, reference: float) -> float:
    """Relative to the reference; infinite where either is not a number."""
    if not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / max(abs(reference), 1e-30)


def verdict(
    losses: Sequence[float], reference: Sequence[float] | None, allowed: Sequence[float]
) -> tuple[str, float | None, int | None]:
    """("equal", "wrong" or "unchecked"; largest relative difference; the first step, from 1, beyond
    the bound)."""
    if reference is None:
        return "unchecked", None, None
    if len(losses) != len(reference):
        return "wrong", math.inf, min(len(losses), len(reference)) + 1
    found = [difference(a, b) for a, b in zip(losses, reference, strict=True)]
    beyond = [
        step for step, (d, most) in enumerate(zip(found, allowed, strict=True), 1) if d > most
    ]
    return ("wrong" if beyond else "equal"), max(found), (beyond[0] if beyond else None)
