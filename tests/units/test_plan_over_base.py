"""Laws of the plan over a prepared base: its frozen bytes take no room on the disk, wear nothing,
and leave memory before anything that would have to be written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from stronghold.errors import BudgetError
from stronghold.model.layout import ModelLayout, ParameterShape, layer_layout
from stronghold.plan.cost import Demand
from stronghold.plan.homes import FILE
from stronghold.plan.host_memory import BASE
from stronghold.plan.plan import Plan, make_plan
from tests.support.states import adam_states

TRAINED, FROZEN, BLOCKS = 2048, 30 * 2048, 6
OUTSIDE = 1 << 18  # elements of the layer that is no block
FROZEN_BYTES = 2 * FROZEN  # of one block


def layout_of() -> ModelLayout:
    """A layer that is no block, and blocks with an adapter."""
    sizes = [(0, OUTSIDE, False), *((TRAINED, FROZEN, True),) * BLOCKS]
    return ModelLayout(
        layers=tuple(
            layer_layout(
                [
                    ParameterShape(name=f"p{trains}", shape=(size,), trainable=trains)
                    for size, trains in ((trained, True), (frozen, False))
                    if size
                ],
                index=index,
                name=f"layer{index}",
                streamed=streamed,
            )
            for index, (trained, frozen, streamed) in enumerate(sizes)
        )
    )


def demand(**changes: Any) -> Demand:
    states = adam_states(torch.bfloat16)
    defaults = {"states": states, "accumulate": False, "window": 1, "nvme": True}
    return Demand(**{**defaults, **changes})


def plan_of(**changes: Any) -> Plan:
    return make_plan(layout_of(), demand(**changes))


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_bytes_of_a_base_take_no_room_and_are_not_written(accumulate: bool) -> None:
    options = {"accumulate": accumulate, "spill": "weights", "micro_batches": 2}
    copied = plan_of(**options)
    over_base = plan_of(base_in_file=True, **options)
    frozen, trained = BLOCKS * FROZEN_BYTES, BLOCKS * 2 * TRAINED
    assert over_base.nvme_bytes["weights"] == 2 * OUTSIDE
    assert over_base.nvme_bytes[BASE] == frozen
    assert over_base.nvme_total_bytes == copied.nvme_total_bytes - frozen - trained
    assert over_base.homes == copied.homes
    assert over_base.host_bytes == copied.host_bytes | {"weights": trained}
    before, after = copied.traffic, over_base.traffic
    assert after.nvme_written_bytes == before.nvme_written_bytes - trained
    assert after.nvme_read_bytes == before.nvme_read_bytes - (1 + 4) * trained
    (reason,) = (r for r in over_base.reasons if r.startswith("base: "))
    assert f"of {BLOCKS} layers" in reason
    assert "never written" in reason
    assert not any(r.startswith("base: ") for r in copied.reasons)
    assert f"{BASE}" in str(over_base)


def test_capacity_counts_what_is_written() -> None:
    need = plan_of(spill="weights", base_in_file=True).nvme_total_bytes
    plan_of(spill="weights", base_in_file=True, nvme_capacity_bytes=need)
    with pytest.raises(BudgetError, match=r"stronghold\.nvme\.capacity"):
        plan_of(spill="weights", base_in_file=True, nvme_capacity_bytes=need - 1)
    with pytest.raises(BudgetError, match=r"stronghold\.nvme\.capacity"):
        plan_of(spill="weights", nvme_capacity_bytes=need)


def in_files(plan: Plan) -> dict[int, set[str]]:
    """By layer: its arrays in files."""
    rows = ((layer, set(plan.homes.arrays(layer, FILE))) for layer in range(BLOCKS + 1))
    return {layer: arrays for layer, arrays in rows if arrays}


@pytest.mark.parametrize("nvme", [False, True])
def test_weights_of_the_base_leave_memory_first(nvme: bool) -> None:
    """As few blocks as possible, evenly over the depth. All else follows when that is not enough,
    if there are files for it."""
    options = {"base_in_file": True, "piece_bytes": 1, "nvme": nvme}
    whole = plan_of(**options)
    assert in_files(whole) == {}
    assert "base: read once; host memory holds all of it" in whole.reasons
    seen: list[int] = []
    has_more = False
    for budget in range(whole.host_total_bytes - 1, 0, -8192):
        try:
            plan = plan_of(host_budget_bytes=budget, **options)
        except BudgetError:
            break
        assert plan.host_total_bytes <= budget
        layers = in_files(plan)
        if all(arrays == {"weights"} for arrays in layers.values()) and 0 not in layers:
            assert not has_more
            gaps = [after - before for before, after in pairwise(sorted(layers))]
            assert not gaps or max(gaps) - min(gaps) <= 1
            assert plan.nvme_total_bytes == plan.traffic.nvme_written_bytes == 0
            seen.append(len(layers))
        else:  # then no frozen weight of a block is in memory
            has_more = True
            assert all("weights" in layers[layer] for layer in range(1, BLOCKS + 1))
    assert seen == sorted(seen)
    assert seen[0] >= 1
    assert seen[-1] == BLOCKS
    assert has_more == nvme


def test_a_plan_that_is_made_again_keeps_its_places() -> None:
    whole = plan_of(base_in_file=True, piece_bytes=1)
    budget = whole.host_total_bytes - FROZEN_BYTES
    plan = plan_of(base_in_file=True, piece_bytes=1, host_budget_bytes=budget)
    again = make_plan(layout_of(), replace(plan.demand, homes=plan.homes, host_budget_bytes=None))
    assert again.homes == plan.homes
    assert again.host_bytes == plan.host_bytes
    assert again.nvme_bytes == plan.nvme_bytes


def test_without_memory_limits_or_files_a_base_changes_nothing() -> None:
    for options in ({"nvme": False}, {}):
        plain, over_base = plan_of(**options), plan_of(**options, base_in_file=True)
        assert over_base.homes == plain.homes
        assert over_base.nvme_total_bytes == plain.nvme_total_bytes == 0
        assert over_base.host_bytes == plain.host_bytes
