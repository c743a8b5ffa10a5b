"""Which layers are updated early and which layers spill beside them: the search's choice, the plan.
By simulation alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from stronghold.model.layout import ModelLayout, layout
from stronghold.model.partition import partition
from stronghold.plan.cost import Demand, LayerWork, Workload
from stronghold.plan.homes import FILE
from stronghold.plan.plan import Plan, make_plan
from stronghold.predict.simulate import fastest_plan
from tests.support.sleeping import SleepingModel, rates
from tests.support.spread import middles
from tests.support.states import adam_states

NUM_LAYERS, NUMEL = 16, 1 << 17
FORWARD_S, BACKWARD_S = 0.003, 0.006  # of a layer
COMPUTE_S = NUM_LAYERS * (FORWARD_S + BACKWARD_S)
UPDATED = 28 / 32  # of the bytes that pass memory: the norm reads the rest
SECOND_BYTES = 12 * NUMEL  # of a layer's second arrays, in fp32
SLACK = 1.15  # what is promised
NEAR = 1.02  # of the best count: the search prefers to take less memory
TRIED = 1.04  # it tries some counts, and not each


@functools.cache
def sizes() -> ModelLayout:
    return layout(partition(SleepingModel([(NUMEL, 0.0, 0.0)] * NUM_LAYERS), None))


def demand_of(**more: Any) -> Demand:
    return Demand(states=adam_states(torch.float32), accumulate=False, window=3, **more)


@functools.cache
def forecast(load: float, count: int | None, room: int | None = None) -> tuple[float, float, int]:
    """Seconds of a step, what early updates can make of it, and the number of early layers
    (`count`, or what the search finds), where updates take `load` times what compute does. `room`:
    layers of which host memory can have a second set."""
    per_byte = NUM_LAYERS * NUMEL / (load * COMPUTE_S) / 1e9
    demand = demand_of(
        resident_layers=0, resident_updates="host", activations="keep", early_layers=count
    )
    if room is not None:
        bare = make_plan(sizes(), replace(demand, early_layers=0)).host_total_bytes
        demand = replace(demand, host_budget_bytes=bare + room * SECOND_BYTES)
    machine = rates(1e2, update_gbps=32 * per_byte, memory_gbps=1e4, handover_s=5e-5)
    loads = (LayerWork(forward_s=FORWARD_S, backward_s=BACKWARD_S),) * NUM_LAYERS
    choice = fastest_plan(sizes(), demand, Workload(layers=loads), machine, asynchronous=False)
    return (choice.forecast.step_s, least_s(UPDATED * load * COMPUTE_S), len(choice.plan.early))


def least_s(updates_s: float) -> float:
    """No schedule is faster: the longer of compute and updates."""
    return max(NUM_LAYERS * (FORWARD_S + BACKWARD_S), updates_s)


def all_early_s(updates_s: float) -> float:
    """Where every layer is early, backward has time for the last ones. The first ones wait behind
    the gate, and the forward of the last ones comes after their updates."""
    forward_s, backward_s = NUM_LAYERS * FORWARD_S, NUM_LAYERS * BACKWARD_S
    hidden = min(1.0, backward_s / updates_s)
    return max(backward_s, updates_s) + hidden * forward_s


@pytest.mark.parametrize(
    "load", [0.2, 1.0, 4.0, *(pytest.param(load, marks=pytest.mark.slow) for load in (0.6, 1.3))]
)
def test_the_search_updates_early_what_makes_the_step_shortest(load: float) -> None:
    found_s, bound_s, count = forecast(load, None)
    assert found_s <= SLACK * bound_s
    assert found_s <= TRIED * min(forecast(load, k)[0] for k in range(NUM_LAYERS + 1))
    everything_s = forecast(load, NUM_LAYERS)[0]  # what is too many is withdrawn
    assert everything_s <= SLACK * all_early_s(UPDATED * load * COMPUTE_S)
    assert everything_s <= forecast(load, 0)[0]
    if load <= 0.2:
        assert count == 0  # the next forward hides them: no second set
    elif load >= 0.6:
        assert forecast(load, 0)[0] > NEAR * found_s  # not vacuous


@pytest.mark.parametrize("room", [0, 1, 5])
def test_the_search_takes_no_more_early_layers_than_there_is_room_for(room: int) -> None:
    found_s, _, count = forecast(1.0, None, room)
    assert count <= room
    assert found_s <= NEAR * min(forecast(1.0, k, room)[0] for k in range(room + 1))


def test_the_last_layers_spill_first_and_are_not_early() -> None:
    demand = demand_of()
    whole = make_plan(sizes(), demand)
    for share in (0.2, 0.4, 0.6):
        budget = whole.host_total_bytes - int(share * 8 * NUMEL * NUM_LAYERS)
        with_disk = replace(demand, nvme=True, host_budget_bytes=budget, piece_bytes=1 << 16)
        plan = make_plan(sizes(), with_disk)
        filed = filed_layers(plan)
        assert plan.host_total_bytes <= budget
        assert filed == list(range(NUM_LAYERS - len(filed), NUM_LAYERS))
        assert len(filed) >= share * NUM_LAYERS
        early = make_plan(sizes(), replace(with_disk, early_layers=2))
        filed = filed_layers(early)
        assert early.host_total_bytes <= budget
        assert filed == list(range(NUM_LAYERS - len(filed), NUM_LAYERS))
        assert sorted(early.early) == middles([1] * filed[0], 2)


def filed_layers(plan: Plan) -> list[int]:
    """The layers with arrays in files."""
    return [index for index in range(NUM_LAYERS) if plan.homes.arrays(index, FILE)]
