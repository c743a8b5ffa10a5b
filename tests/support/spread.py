"""Which layers a plan spreads its early updates over, as the law says it: not as the plan does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction


def middles(numels: Sequence[int], count: int) -> list[int]:
    """The positions of `count` layers of so many elements: cut all elements into `count` equal
    parts, and take the layer in the middle of each. Where that one is taken, or would leave too few
    layers for the parts that follow, take the nearest one that is free and does not."""
    ends = list(itertools.accumulate(numels))
    count = min(count, len(numels))
    chosen: list[int] = []
    for part in range(count):
        middle = Fraction(2 * part + 1, 2 * count) * ends[-1]
        position = next(k for k, end in enumerate(ends) if end >= middle)
        first = chosen[-1] + 1 if chosen else 0
        last = len(numels) - (count - part)
        chosen.append(min(max(position, first), last))
    return chosen
