"""Fits the quickstart's parts to the time that it has: how many steps each part takes.

Owns the shares of the time and the arithmetic. Reads no clock but the one that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

COMPARED_SHARE = 0.12  # of the time: steps with the window and without it
TIMED_SHARE = 0.18  # blocks that measure a step
CHUNKED_SHARE = 0.08  # steps whose batch goes through in chunks
CLOSING_S = 10.0  # a text and the pictures, after the training
# a training that was fitted ends at this multiple of the time: steps became slower
OVERRUN = 1.2

MOST_COMPARED, MOST_TRAINED, MOST_CHUNKED = 20, 250, 40
LEAST_TRAINED, LEAST_CHUNKED = 2, 2
MOST_TURNS, LEAST_TURNS = 5, 3  # of timed blocks of each kind; their median counts
MOST_BLOCK_STEPS = 4
FEW = 10  # a training of fewer steps shows that it runs, and hardly that it learns
FORWARD_SHARE = 1 / 3  # of a step's time: backward takes two forwards
# steps of the training that one in chunks is worth: twice the sequences
CHUNKED_COST = 2.0

# of the steps; denser where the loss falls
EVALUATED_AT = (0.04, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
# steps of a training that is evaluated so often; a shorter one, at its end
LEAST_CURVE = 100
MOST_HELD_OUT_BATCHES = 8
# of the training's time that evaluations may take: else fewer batches
HELD_OUT_SHARE = 0.25


class Watch:
    """Seconds since `begun_s` of its clock (default: now), and those that everything may take."""

    def __init__(
        self,
        budget_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        begun_s: float | None = None,
    ) -> None:
        self.budget_s = budget_s
        self.clock = clock
        self._begun_s = clock() if begun_s is None else begun_s

    def elapsed_s(self) -> float:
        return self.clock() - self._begun_s

    def left_s(self) -> float:
        """Negative when the time is over."""
        return self.budget_s - self.elapsed_s()

    def is_overrun(self) -> bool:
        """Whether even a training that became slower must end now."""
        return self.elapsed_s() > OVERRUN * self.budget_s - CLOSING_S


@dataclass(frozen=True, kw_only=True)
class Training:
    """The long part. `held_out_batches`: in one evaluation; one comes before the first step."""

    steps: int
    evaluated_after: tuple[int, ...]  # steps
    held_out_batches: int

    def seconds(self, step_s: float) -> float:
        evaluations = 1 + len(self.evaluated_after)
        return step_s * (self.steps + evaluations * self.held_out_batches * FORWARD_SHARE)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits, in the order in which it runs. 0 leaves a part out."""

    step_s: float
    compared_steps: int
    to_compare: int  # steps of both loops that have not run yet
    timed_s: float  # at most
    chunked_steps: int
    training: Training

    def seconds_before_training(self) -> float:
        in_steps = self.to_compare + self.chunked_steps * CHUNKED_COST
        # On a fast machine the blocks are over before their time is.
        most_timed_s = 2 * (1 + MOST_TURNS * MOST_BLOCK_STEPS) * self.step_s
        return in_steps * self.step_s + min(self.timed_s, most_timed_s)

    def seconds(self) -> float:
        """Of all that has not run yet."""
        training_s = self.training.seconds(self.step_s)
        return self.seconds_before_training() + training_s + CLOSING_S


def fit(
    step_s: float,
    watch: Watch,
    *,
    compared_steps: int | None = None,
    trained_steps: int | None = None,
    timed: bool = True,
    measured_steps: int = 0,
) -> Fit:
    """What fits, when a step takes `step_s` seconds. Numbers of steps that are given are kept.

    `measured_steps`: how many of the compared steps are over.
    """
    budget_s = watch.budget_s
    if compared_steps is None:
        compared_steps = _within(COMPARED_SHARE * budget_s / (2 * step_s), 1, MOST_COMPARED)
    compared_steps = max(compared_steps, measured_steps)
    timed_s = TIMED_SHARE * budget_s if timed and can_time(step_s, TIMED_SHARE * budget_s) else 0.0
    chunked_steps = steps_in_chunks(step_s, watch, trained_steps)
    before = Fit(
        step_s=step_s,
        to_compare=2 * compared_steps - measured_steps,
        compared_steps=compared_steps,
        timed_s=timed_s,
        chunked_steps=chunked_steps,
        training=Training(steps=0, evaluated_after=(), held_out_batches=0),
    )
    left_s = watch.left_s() - before.seconds_before_training()
    return replace(before, training=fit_training(step_s, left_s, trained_steps))


def steps_in_chunks(step_s: float, watch: Watch, trained_steps: int | None = None) -> int:
    """How many fit, at most as many as are trained; 0 when too few fit."""
    steps = int(CHUNKED_SHARE * watch.budget_s / (CHUNKED_COST * step_s))
    most = MOST_CHUNKED if trained_steps is None else min(MOST_CHUNKED, trained_steps)
    return 0 if steps < LEAST_CHUNKED else min(steps, most)


def fit_training(step_s: float, left_s: float, steps: int | None = None) -> Training:
    """The longest training that leaves `CLOSING_S` of `left_s`; of exactly `steps` if given."""
    left_s = max(0.0, left_s - CLOSING_S)
    if steps is not None:
        return Training(
            steps=steps, evaluated_after=_evaluations(steps), held_out_batches=MOST_HELD_OUT_BATCHES
        )
    # An evaluation before the training and one after it.
    evaluated_s = 2 * FORWARD_SHARE * step_s
    batches = _within(HELD_OUT_SHARE * left_s / evaluated_s, 1, MOST_HELD_OUT_BATCHES)
    for count in (len(EVALUATED_AT), 1):
        room = left_s / step_s - (1 + count) * batches * FORWARD_SHARE
        if room >= LEAST_CURVE:
            break
    steps = _within(room, LEAST_TRAINED, MOST_TRAINED if room >= LEAST_CURVE else LEAST_CURVE - 1)
    return Training(steps=steps, evaluated_after=_evaluations(steps), held_out_batches=batches)


def _evaluations(steps: int) -> tuple[int, ...]:
    parts = EVALUATED_AT if steps >= LEAST_CURVE else (1.0,)
    return tuple(sorted({max(1, round(steps * part)) for part in parts}))


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How often both kinds of blocks take turns, and how many steps a block has."""

    count: int
    block_steps: int


def can_time(step_s: float, limit_s: float) -> bool:
    """Whether the fewest blocks fit: a step of each kind that warms up, and the turns."""
    return fit_turns(2 * step_s, limit_s - 2 * step_s) is not None


def fit_turns(pair_s: float, left_s: float) -> Turns | None:
    """The most that fit, when a step of both kinds takes `pair_s`; None when too few do."""
    for count in (MOST_TURNS, LEAST_TURNS):
        block_steps = _within(left_s / (count * pair_s), 0, MOST_BLOCK_STEPS)
        if block_steps > 0:
            return Turns(count=count, block_steps=block_steps)
    return None


def _within(value: float, least: int, most: int) -> int:
    return max(least, min(most, int(value)))


def in_words(seconds: float) -> str:
    """A duration, rounded so that it claims no more than an estimate knows."""
    if seconds < 9.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 55:
        return f"{5 * round(seconds / 5)} s"
    minutes, tens = divmod(round(seconds / 10), 6)
    return f"{minutes} min" + (f" {10 * tens} s" if tens and minutes < 10 else "")
