"""The order in which several ranks reduce their layers: equal everywhere, whatever comes when."""

from __future__ import annotations

import torch

from stronghold.distributed.order import OneOrder, Order
from stronghold.distributed.process_groups import SilentGroup


def order(num_slots: int = 2, trained: tuple[int, ...] = (4, 3, 2, 1, 0)) -> OneOrder:
    return OneOrder(SilentGroup(2), trained, num_slots)


def test_a_process_alone_drains_what_is_complete() -> None:
    alone = Order()
    assert alone.complete(3) == [3]
    assert alone.reached(0) == []
    assert alone.making_room([2, 1]) == [2]
    assert alone.further([1, 0]) == [1, 0]
    assert not alone.passed(3)


def test_layers_are_due_in_one_order() -> None:
    ours = order()
    assert ours.complete(3) == []
    assert not ours.passed(3)
    assert ours.complete(4) == [4, 3]
    assert ours.passed(3)
    assert ours.complete(4) == []  # what comes twice waits for the rounds at the end
    assert ours.rest() == [2, 1, 0]


def test_who_comes_to_a_layer_has_closed_those_whose_slots_it_could_need() -> None:
    """Whether it used them or not: another rank waits for their reductions."""
    ours = order(num_slots=2)
    assert ours.reached(3) == []
    assert ours.reached(2) == [4]
    assert ours.reached(1) == [3]
    assert order(num_slots=1).reached(2) == [4, 3]
    assert ours.reached(7) == []  # not trained


def test_an_order_that_was_not_expected_closes_all_but_the_last_two() -> None:
    """Whatever slot another rank waits for, its layer came before the last one."""
    ours = order(num_slots=4)
    assert ours.reached(1) == []  # a place behind those that were skipped
    assert ours.reached(2) == []
    assert ours.reached(3) == [4, 3, 2, 1]


def test_a_slot_is_had_by_closing_all_before_the_first_that_gathers() -> None:
    assert order().making_room([1, 2]) == [4, 3, 2]


def test_further_rounds_are_of_what_any_rank_has() -> None:
    class Other(SilentGroup):
        def numbers(self, mine: torch.Tensor, operation: str) -> torch.Tensor:
            theirs = torch.tensor([0, 1, 0, 0, 0], dtype=torch.uint8)
            return torch.stack([mine, theirs])

    ours = OneOrder(Other(2), (4, 3, 2, 1, 0), 2)
    ours.rest()
    assert ours.further([1]) == [3, 1]
    assert OneOrder(Other(2), (), 2).further([]) == []


def test_an_order_is_expected_once_all_have_seen_it() -> None:
    ours = order()
    for layer in (3, 4, 0):
        ours.complete(layer)
    ours.begin_again()
    assert ours.seen == "[3, 4, 0, 2, 1]"
    assert ours.complete(3) == []  # as before
    ours.begin_again()
    ours.adopt()
    assert ours.complete(3) == [3]
