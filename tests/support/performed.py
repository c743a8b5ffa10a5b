"""What a step performed, against its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stronghold.plan.schedule import GATE, Action, Kind

USES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.RELEASE})
LANES: dict[str, frozenset[Kind]] = {
    "fetch": frozenset({Kind.FETCH}),
    "drain": frozenset({Kind.OFFLOAD}),
    "update": frozenset({Kind.UPDATE, Kind.GATE, Kind.COMMIT}),
    "compute": USES,
}


def of_lane(actions: Iterable[Action], lane: str) -> list[str]:
    """The actions of one lane, as text, in order."""
    return [str(action) for action in actions if action.kind in LANES[lane]]


def expected(schedule: Sequence[Action], performed: Sequence[Action]) -> list[Action]:
    """The schedule, with an update behind the gate for each early one that was not committed. The
    schedule cannot know these: the norm decides, or the update had not begun."""
    committed = {action.layer for action in performed if action.kind is Kind.COMMIT}
    behind_gate = False
    actions = []
    for action in schedule:
        behind_gate = behind_gate or action == GATE
        if action.kind is Kind.COMMIT and action.layer not in committed:
            action = Action(kind=Kind.UPDATE, layer=action.layer)
        actions.append(action)
    return actions


def started(actions: Iterable[Action]) -> list[int]:
    """The layers whose updates stand before the gate."""
    layers = []
    for action in actions:
        if action == GATE:
            return layers
        if action.kind is Kind.UPDATE:
            layers.append(action.layer)
    return layers


def assert_as_scheduled(
    performed: Sequence[Action], schedule: Sequence[Action], *, has_early: bool = True
) -> None:
    """A step performed its schedule, in its order on each lane. `has_early`: no early update was
    held back since earlier steps were clipped."""
    wanted = expected(schedule, performed)
    if not has_early:
        gate = wanted.index(GATE)
        before = [action for action in wanted[:gate] if action.kind is not Kind.UPDATE]
        wanted = [*before, *wanted[gate:]]
    for lane in LANES:
        assert (lane, *of_lane(performed, lane)) == (lane, *of_lane(wanted, lane))
