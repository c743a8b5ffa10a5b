"""Laws of the schedule: what one pass fetches and gives back, in which order, and how often."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from stronghold.plan.schedule import Action, Kind, Schedule, canonical_uses, make_schedule
from tests.support.quiet import law_of_time, on_time

SEEDS = range(60)


def fetches(schedule: Schedule, layer: int) -> int:
    return schedule.actions.count(Action(kind=Kind.FETCH, layer=layer))


def num_fetches(schedule: Schedule) -> int:
    return sum(action.kind is Kind.FETCH for action in schedule.actions)


def walk(
    schedule: Schedule, held: set[int], *, num_slots: int, resident: frozenset[int] = frozenset()
) -> None:
    """Perform one pass on `held` and fail on anything that an honest window could not do."""
    held -= resident  # stale: updated since
    for step in schedule.steps:
        moved = [action.layer for action in step[:-1]]
        assert len(moved) == len(set(moved)), f"a layer moves twice in one step: {step}"
        for action in step:
            if action.kind is Kind.RELEASE:
                assert action.layer not in resident, f"{action} of a resident layer"
                assert action.layer in held, f"{action} of a layer that is not held"
                held.remove(action.layer)
            elif action.kind is Kind.FETCH:
                assert action.layer not in held, f"{action} of a layer that is held"
                held.add(action.layer)
                assert len(held - resident) <= num_slots, f"{action} takes a slot too many"
            else:
                assert action.layer in held, f"{action} of a layer that is not held"


def held_at_start(schedule: Schedule) -> set[int]:
    """The layers whose first action is not their fetch."""
    first: dict[int, Action] = {}
    for action in schedule.actions:
        first.setdefault(action.layer, action)
    return {layer for layer, action in first.items() if action.kind is not Kind.FETCH}


def assert_steady(
    schedule: Schedule, *, num_slots: int, resident: frozenset[int] = frozenset()
) -> None:
    """Every pass is possible after the previous one, and leaves the slots as it found them."""
    start = held_at_start(schedule) - resident
    assert len(start) <= num_slots
    held = set(start)
    for _ in range(3):
        walk(schedule, held, num_slots=num_slots, resident=resident)
        assert held - resident == start


def random_uses(seed: int) -> tuple[Action, ...]:
    """Skips, repeats and both kinds in any order."""
    generator = random.Random(seed)
    num_layers, num_uses = generator.randint(1, 7), generator.randint(1, 16)
    return tuple(
        Action(
            kind=generator.choice((Kind.FORWARD, Kind.BACKWARD)),
            layer=generator.randrange(num_layers),
        )
        for _ in range(num_uses)
    )


# -- what every schedule keeps -----------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_uses_repeats_for_ever(seed: int) -> None:
    """Never more than the slots, every use has its layer, the end of a pass is its beginning."""
    uses = random_uses(seed)
    generator = random.Random(seed)
    num_layers = 1 + max(use.layer for use in uses)
    resident = frozenset(generator.sample(range(num_layers), generator.randint(0, num_layers // 2)))
    for num_slots in range(1, num_layers + 2):
        for prefetch in range(num_slots):
            schedule = make_schedule(
                uses, num_slots=num_slots, prefetch=prefetch, resident=frozenset()
            )
            assert schedule.uses == uses == tuple(step[-1] for step in schedule.steps)
            assert_steady(schedule, num_slots=num_slots)
            forwards = {use.layer for use in uses if use.kind is Kind.FORWARD}
            if all(_forward_first(uses, layer) for layer in resident):
                schedule = make_schedule(
                    uses, num_slots=num_slots, prefetch=prefetch, resident=resident
                )
                assert_steady(schedule, num_slots=num_slots, resident=resident)
                for layer in resident:
                    assert fetches(schedule, layer) == (layer in forwards)


def _forward_first(uses: Sequence[Action], layer: int) -> bool:
    kinds = [use.kind for use in uses if use.layer == layer]
    return not kinds or kinds[0] is Kind.FORWARD


def test_what_the_prefetch_depth_reaches_is_on_its_way() -> None:
    """At each use the next `prefetch` layers are held: the other half of the depth's meaning."""
    uses = canonical_uses(range(9), backward=True)
    for num_slots in range(1, 10):
        for prefetch in range(num_slots):
            schedule = make_schedule(uses, num_slots=num_slots, prefetch=prefetch)
            held = held_at_start(schedule)
            for position, step in enumerate(schedule.steps):
                for action in step[:-1]:
                    (held.discard if action.kind is Kind.RELEASE else held.add)(action.layer)
                ahead: dict[int, None] = {}
                for k in range(len(uses)):
                    ahead.setdefault(uses[(position + k) % len(uses)].layer)
                assert set(list(ahead)[: 1 + prefetch]) <= held


# -- how much it fetches -----------------------------------------------------------------------
@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 17])
def test_a_training_pass_fetches_twice_the_layers_that_are_not_in_the_window(
    num_layers: int,
) -> None:
    uses = canonical_uses(range(num_layers), backward=True)
    for num_slots in range(1, num_layers + 3):
        for prefetch in range(num_slots):
            schedule = make_schedule(uses, num_slots=num_slots, prefetch=prefetch)
            assert num_fetches(schedule) == 2 * max(0, num_layers - num_slots)
            for layer in range(num_layers):
                assert fetches(schedule, layer) <= 2


@law_of_time
def test_a_pass_of_eighty_layers_is_scheduled_in_milliseconds() -> None:
    """A changed order is learned between two steps: it must not be felt. Without lookup tables the
    wide windows took 30 ms and more; the bound leaves room for a busy machine."""
    uses = canonical_uses(range(80), backward=True)
    for num_slots in (2, 8, 40):
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            make_schedule(uses, num_slots=num_slots, prefetch=num_slots - 1)
            seconds.append(time.perf_counter() - begun)
        on_time(min(seconds) < 0.05, seconds)
