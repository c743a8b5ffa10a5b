"""Laws of the schedule: a step performs it, and another one changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from stronghold.plan.schedule import GATE, Action, Kind, Schedule, make_schedule
from tests.models import MODELS, loss_of
from tests.support.performed import assert_as_scheduled, started
from tests.support.training import Run, assert_identical, config, initialized, moments_of

STEPS = 4
Change = Callable[[list[Action]], list[Action]]


def updates_exchanged(actions: list[Action]) -> list[Action]:
    """The first two early updates change places, also where they are committed."""
    first, second = started(actions)[:2]
    other = {first: second, second: first}
    kinds = (Kind.UPDATE, Kind.COMMIT)
    return [
        replace(action, layer=other[action.layer])
        if action.kind in kinds and action.layer in other
        else action
        for action in actions
    ]


def one_behind_the_gate(actions: list[Action]) -> list[Action]:
    """The first early update stands behind the gate."""
    layer = started(actions)[0]
    early = actions.index(Action(kind=Kind.UPDATE, layer=layer))
    changed = [*actions[:early], *actions[early + 1 :]]
    commit = changed.index(Action(kind=Kind.COMMIT, layer=layer))
    changed[commit] = Action(kind=Kind.UPDATE, layer=layer)
    return changed


def gate_reversed(actions: list[Action]) -> list[Action]:
    """What stands behind the gate comes in the reverse of forward order."""
    gate = actions.index(GATE)
    behind = [a for a in actions[gate + 1 :] if a.kind is not Kind.RELEASE]
    return [*actions[: gate + 1], *reversed(behind), *actions[gate + 1 + len(behind) :]]


def changed_schedule(schedule: Schedule, change: Change) -> Schedule:
    """The schedule with the actions behind its uses changed."""
    behind_uses = [action for after in schedule.after for action in after]
    if not behind_uses:  # of an evaluation
        return schedule
    # The places of actions between uses stay: each use has as many behind it as before, but the
    # last one, which has the rest.
    actions, after = change(behind_uses), []
    for count in [len(each) for each in schedule.after[:-1]]:
        after.append(tuple(actions[:count]))
        actions = actions[count:]
    return replace(schedule, after=(*after, tuple(actions)))


def run(name: str) -> tuple[Run, Sequence[Action], Sequence[Action]]:
    """Its results, the last step's schedule, and what that step performed."""
    torch.manual_seed(0)
    model, make_batch = MODELS[name]()
    section: dict[str, Any] = {"window": 2, "early_layers": "all"}
    engine = initialized(model, config(clipping=1e4, section=section))
    result = Run()
    torch.manual_seed(1)
    for step in range(STEPS):
        schedule = engine.inspect().schedule
        loss = loss_of(engine(**make_batch(step)))
        engine.backward(loss)
        engine.step()
        result.losses.append(loss.detach().clone())
        result.norms.append(engine.get_global_grad_norm())
    performed = engine.inspect().performed
    result.weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
    result.moments = moments_of(engine)
    engine.destroy()
    return result, schedule, performed


@pytest.mark.parametrize("change", [updates_exchanged, one_behind_the_gate, gate_reversed])
def test_a_changed_schedule_changes_what_is_performed_and_no_bit(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, schedule, performed = run("gpt")
    assert_as_scheduled(performed, schedule)
    assert len(started(performed)) > 2

    def make(*args: Any, **options: Any) -> Schedule:
        return changed_schedule(make_schedule(*args, **options), change)

    monkeypatch.setattr("stronghold.streaming.executor.make_schedule", make)
    result, other_schedule, other_performed = run("gpt")
    assert other_schedule != schedule
    assert_as_scheduled(other_performed, other_schedule)
    assert [a for a in performed if a.kind is Kind.UPDATE] != [
        a for a in other_performed if a.kind is Kind.UPDATE
    ] or change is gate_reversed
    assert_identical(result, expected)
    assert result.norms == expected.norms
