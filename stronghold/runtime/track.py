"""One kind of pass, in training or in evaluation: what it is predicted to use, and where it is.

Owns its schedule and the uses seen so far; moves nothing. The executor reads and writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stronghold.plan.planner import Plan
from stronghold.plan.schedule import Action, Schedule, make_schedule


@dataclass(slots=True, kw_only=True)
class Track:
    """`cursor`: the position in the schedule's uses; `recorded`: the uses of the running pass."""

    schedule: Schedule
    cursor: int = 0
    recorded: list[Action] = field(default_factory=list)


def make_track(plan: Plan, uses: Sequence[Action]) -> Track:
    """The track of passes that use layers in this order."""
    schedule = make_schedule(
        uses, num_slots=plan.window, prefetch=plan.prefetch, resident=plan.resident
    )
    return Track(schedule=schedule)
