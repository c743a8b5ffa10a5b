"""Lean states: whether the learning rate is too small to move the largest weights.

Owns one look at the weights, in the first step whose rates are no larger than those of the step
before: a warm-up's first rates say nothing. The training thread enters, between two steps.

[Note: half a unit] A lean master has 24 bits: of a weight in [2^e, 2^(e+1)) half a unit in the last
place is 2^(e-16), and what is less than that is rounded away, in every step. Adam's steps are about
as large as the learning rate, most of them smaller. So weights from 2^(floor(log2(lr)) + 17) on
stand still, but for steps that are larger than the rate.
"""

from __future__ import annotations

import logging
import math

from stronghold.memory.host import HostStore
from stronghold.memory.layer import LayerState
from stronghold.runtime.adam import AdamSteps

SHOWN = 3  # layers that are named
PIECE_NUMEL = 1 << 22  # compared at once

logger = logging.getLogger("stronghold")


class Standstill:
    """Warns once, or never. Without effect for exact states, whose masters have every bit."""

    def __init__(self, host: HostStore, adam: AdamSteps) -> None:
        self._host, self._adam = host, adam
        self._before: list[float] | None = None
        self._looks = host.states.is_lean

    def end_step(self) -> None:
        """A step was taken."""
        if not self._looks:
            return
        rates, before = self._adam.rates(), self._before
        self._before = rates
        if before is None or any(now > then for now, then in zip(rates, before, strict=True)):
            return
        self._looks = False
        found = [(state, *self._standing(state)) for state in self._host.layers]
        standing = [(state, count, numel) for state, count, numel in found if count]
        if standing:
            named = ", ".join(f"{c} of {n} in {s.name}" for s, c, n in standing[:SHOWN])
            if len(standing) > SHOWN:
                named += f" and more in {len(standing) - SHOWN} other layers"
            logger.warning(
                "lean states: a step of the learning rate (%s) does not move %s: it is less than "
                "half a unit of masters of 24 bits that are so large. Raise the rate, or set "
                'stronghold.states to "exact", whose masters have all bits',
                ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)),
                named,
            )

    def _standing(self, state: LayerState) -> tuple[int, int]:
        """How many of this rank's weights of the layer stand still, and of how many."""
        state.records["weights"].writer.wait()
        count = numel = 0
        for part, rate in self._adam.rates_of(state):
            if rate <= 0.0:  # as asked
                continue
            least = 2.0 ** (math.floor(math.log2(rate)) + 17)  # [Note: half a unit]
            end = part.offset + part.numel
            for _, _, found in self._host.pieces(state.index, ("weights",), part.offset, end):
                numel += found["weights"].numel()
                for piece in found["weights"].split(PIECE_NUMEL):
                    count += int((piece.abs() >= least).sum())
        return count, numel
