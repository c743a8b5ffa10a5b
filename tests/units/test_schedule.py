"""Laws of the schedule: what one pass fetches and gives back, in which order, and how often."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache

import pytest

from stronghold.plan.schedule import (
    Action,
    Kind,
    Position,
    Schedule,
    canonical_uses,
    make_schedule,
    parse_schedule,
    update_order,
)
from tests.support.quiet import law_of_time, on_time

SEEDS = range(60)


def forward(*layers: int) -> tuple[Action, ...]:
    return tuple(Action(kind=Kind.FORWARD, layer=layer) for layer in layers)


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


# -- data --------------------------------------------------------------------------------------
def test_text_round_trips() -> None:
    schedule = make_schedule(
        canonical_uses(range(5), backward=True),
        num_slots=2,
        prefetch=1,
        resident=frozenset({3}),
        updates=dict(zip(range(5), [*Position, *Position], strict=False)),
    )
    assert parse_schedule(str(schedule)) == schedule
    assert str(parse_schedule(str(schedule))) == str(schedule)
    for action in schedule.actions:
        assert Action.parse(f"  {action}\n") == action


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_are_used_where_the_updates_stand(gated: bool) -> None:
    """Of two blocks between layers that have no backward of their own, one of which is early."""
    positions = [Position.EARLY, Position.GATE, Position.EARLY, Position.EARLY]
    updates = dict(enumerate([Position.GATE] * 4 if gated else positions))
    uses = [*canonical_uses(range(4), backward=False), *canonical_uses((1, 2), backward=True)[2:]]
    schedule = make_schedule(uses, num_slots=2, prefetch=1, updates=updates)
    shown = [str(a) for a in schedule.actions if a.kind not in (Kind.FETCH, Kind.RELEASE)][3:]
    expected = {
        True: "forward 3|offload 3|backward 2|offload 2|backward 1|offload 1|offload 0|gate|"
        "update 0|update 1|update 2|update 3",
        False: "forward 3|offload 3|update 3|backward 2|offload 2|update 2|backward 1|offload 1|"
        "offload 0|update 0|gate|commit 0|update 1|commit 2|commit 3",
    }
    assert "|".join(shown) == expected[gated]
    order = [a.layer for a in schedule.actions if a.kind is Kind.UPDATE]
    assert order == update_order(updates)


def test_text_that_is_no_action_is_refused() -> None:
    for text in ("fetch", "fetsch 1", "fetch x", ""):
        with pytest.raises(ValueError):
            Action.parse(text)


def test_the_schedule_of_three_layers_in_two_slots_is_this_one() -> None:
    schedule = make_schedule(canonical_uses(range(3), backward=True), num_slots=2, prefetch=1)
    assert str(schedule).splitlines() == [
        "forward 0",
        "release 0",
        "fetch 2",
        "forward 1",
        "forward 2",
        "backward 2",
        "release 2",
        "fetch 0",
        "backward 1",
        "backward 0",
    ]


def test_no_uses_give_no_actions() -> None:
    schedule = make_schedule((), num_slots=0, prefetch=0)
    assert schedule == Schedule(uses=(), steps=(), after=())
    assert str(schedule) == ""
    assert parse_schedule("") == schedule


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


def test_choices_that_would_take_turns_still_repeat() -> None:
    """Three layers in a ring and two slots: the fewest fetches alternate 1 and 2 a pass, and no
    one pass is the other's successor."""
    for num_layers, num_slots in ((3, 2), (4, 2), (5, 3), (7, 4)):
        for prefetch in range(num_slots):
            schedule = make_schedule(
                forward(*range(num_layers)), num_slots=num_slots, prefetch=prefetch
            )
            assert_steady(schedule, num_slots=num_slots)
            # The layer in use and those on their way turn over, the others' slots never do.
            assert num_fetches(schedule) == num_layers - (num_slots - 1 - prefetch)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_fetched_further_ahead_than_the_prefetch_depth(seed: int) -> None:
    uses = random_uses(seed)
    for num_slots in range(1, 6):
        for prefetch in range(num_slots):
            schedule = make_schedule(uses, num_slots=num_slots, prefetch=prefetch)
            for position, step in enumerate(schedule.steps):
                ahead: dict[int, None] = {}
                for k in range(len(uses)):
                    ahead.setdefault(uses[(position + k) % len(uses)].layer)
                reach = list(ahead)[: 1 + prefetch]
                for action in step[:-1]:
                    if action.kind is Kind.FETCH:
                        assert action.layer in reach


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


def test_a_resident_layer_is_fetched_once_before_its_forward_and_takes_no_slot() -> None:
    uses = canonical_uses(range(6), backward=True)
    resident = frozenset({0, 4, 5})
    for num_slots in (1, 2, 3):
        for prefetch in range(num_slots):
            schedule = make_schedule(
                uses, num_slots=num_slots, prefetch=prefetch, resident=resident
            )
            for layer in resident:
                fetch = Action(kind=Kind.FETCH, layer=layer)
                assert fetches(schedule, layer) == 1
                used = schedule.actions.index(Action(kind=Kind.FORWARD, layer=layer))
                assert schedule.actions.index(fetch) < used
                assert Action(kind=Kind.RELEASE, layer=layer) not in schedule.actions
            assert_steady(schedule, num_slots=num_slots, resident=resident)
            streamed = sum(fetches(schedule, layer) for layer in range(6) if layer not in resident)
            assert streamed == 2 * (3 - num_slots)


def fewest_fetches(uses: Sequence[Action], num_slots: int, start: frozenset[int]) -> int:
    """By search: the fewest fetches of a pass that begins and ends with `start` in the slots."""

    @cache
    def search(position: int, held: frozenset[int]) -> float:
        if position == len(uses):
            return 0 if start <= held else float("inf")
        layer = uses[position].layer
        if layer in held:
            return search(position + 1, held)
        if len(held) < num_slots:
            return 1 + search(position + 1, held | {layer})
        return 1 + min(search(position + 1, held - {other} | {layer}) for other in held)

    return int(search(0, start))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_of_slots_fetches_less_without_prefetch(seed: int) -> None:
    """Belady's rule against a search of every choice, from the same slots to the same slots."""
    uses = random_uses(seed)
    num_layers = len({use.layer for use in uses})
    for num_slots in range(1, num_layers + 1):
        schedule = make_schedule(uses, num_slots=num_slots, prefetch=0)
        released = [a.layer for a in schedule.steps[0][:-1] if a.kind is Kind.RELEASE]
        start = frozenset(held_at_start(schedule) - set(released))
        assert num_fetches(schedule) <= fewest_fetches(uses, num_slots, start)


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
