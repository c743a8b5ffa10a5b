"""What a step performed, against its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stronghold.plan.schedule import GATE, Action, Kind

USES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.RELEASE})
LANES: dict[str, frozenset[Kind]] = {
    "fetch": frozenset({Kind.FETCH}),
    "offload": frozenset({Kind.OFFLOAD}),
    "update": frozenset({Kind.UPDATE, Kind.GATE, Kind.COMMIT}),
    "compute": USES,
}


def of_lane(actions: Iterable[Action], lane: str) -> list[str]:
    """The actions of one lane, as text, in order."""
    return [str(action) for action in actions if action.kind in LANES[lane]]


def expected(schedule: Sequence[Action], performed: Sequence[Action]) -> list[Action]:
    """The schedule, with an update behind the gate for each early one that was not committed. The
    schedule cannot know these: the norm decides, or the lane of updates was busy."""
    committed = {action.layer for action in performed if action.kind is Kind.COMMIT}
    left = {action.layer for action in performed if action.kind is Kind.WITHDRAW}
    left -= set(started(performed))
    behind_gate = False
    actions = []
    for action in schedule:
        behind_gate = behind_gate or action == GATE
        if action.kind is Kind.COMMIT and action.layer not in committed:
            action = Action(kind=Kind.UPDATE, layer=action.layer)
        if behind_gate or action.kind is not Kind.UPDATE or action.layer not in left:
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


def assert_as_scheduled(performed: Sequence[Action], schedule: Sequence[Action]) -> None:
    """A step performed its schedule, in its order on each lane."""
    wanted = expected(schedule, performed)
    for lane in LANES:
        assert (lane, *of_lane(performed, lane)) == (lane, *of_lane(wanted, lane))
