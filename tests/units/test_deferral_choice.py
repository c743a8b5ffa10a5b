"""Which updates are deferred and which layers spill beside them: the search's choice, the formula's
shares, the plan. By simulation alone."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from stronghold.model.layout import ModelLayout, layout
from stronghold.model.partition import partition
from stronghold.plan.cost import Demand, LayerLoad, Workload, shares, spread
from stronghold.plan.homes import FILE, make_homes
from stronghold.plan.plan import Plan, make_plan
from stronghold.predict.simulate import fastest_plan, simulate
from tests.support.sleeping import SleepingModel, rates
from tests.support.states import adam_formats, adam_states

NUM_LAYERS, NUMEL = 16, 1 << 17
FORWARD_S, BACKWARD_S = 0.003, 0.006  # of a layer
SLACK = 1.15  # what is promised
NEAR = 1.02  # of the best count: the search prefers to hold less


@functools.cache
def sizes() -> ModelLayout:
    return layout(partition(SleepingModel([(NUMEL, 0.0, 0.0)] * NUM_LAYERS), None))


def forecast(kind: str, load: float, count: int | None) -> tuple[float, float, int]:
    """Seconds of a step, the least there can be, and the number of deferred layers (`count`, or
    what the search finds), where updates take `load` times what compute does."""
    compute_s = NUM_LAYERS * (FORWARD_S + BACKWARD_S)
    per_byte = NUM_LAYERS * NUMEL / (load * compute_s) / 1e9
    on_disk = kind == "disk"
    demand = Demand(
        states=adam_states(torch.float32),
        gated=False,
        accumulate=False,
        window=3,
        resident_layers=0,
        resident_updates="host",
        activations="keep",
        nvme=on_disk,
        spill="moments" if on_disk else None,
        deferred_layers=count,
    )
    update_gbps = 1e3 if on_disk else 32 * per_byte  # Adam's bytes, and the norms'
    machine = rates(1e2, 8 * per_byte, update_gbps=update_gbps, memory_gbps=1e4, handover_s=5e-5)
    loads = (LayerLoad(forward_s=FORWARD_S, backward_s=BACKWARD_S),) * NUM_LAYERS
    work = Workload(layers=loads)
    choice = fastest_plan(sizes(), demand, work, machine, asynchronous=False)
    return choice.forecast.step_s, max(1.0, load) * compute_s, len(choice.plan.deferred)


@pytest.mark.parametrize(
    ("load", "kind"),
    [  # each load with one of them, the one at which it matters most with both
        pytest.param(load, kind, marks=() if load == 1.0 or (k + n) % 2 else pytest.mark.slow)
        for k, load in enumerate((0.6, 0.8, 1.0, 1.3, 4.0))
        for n, kind in enumerate(("disk", "adam"))
    ],
)
def test_the_search_defers_what_makes_the_step_the_longest_lane(load: float, kind: str) -> None:
    found_s, bound_s, count = forecast(kind, load, None)
    assert found_s <= SLACK * bound_s
    best_s = min(forecast(kind, load, k)[0] for k in range(NUM_LAYERS + 1))
    assert found_s <= NEAR * best_s
    if load <= 0.6:
        assert count == 0  # backward hides them: nothing is held
    elif 0.9 <= load <= 1.1:
        assert forecast(kind, load, 0)[0] > SLACK * bound_s  # not vacuous


def test_deferred_layers_are_spread_evenly() -> None:
    for count in range(NUM_LAYERS + 1):
        chosen = sorted(spread(sizes().layers, count))
        assert len(chosen) == count
        gaps = [after - before for before, after in itertools.pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert not chosen or abs(chosen[0] - (NUM_LAYERS - 1 - chosen[-1])) <= 1


@pytest.mark.parametrize("gated", [False, True])
def test_what_ram_cannot_hold_spills_where_the_disk_is_hidden_best(gated: bool) -> None:
    """Updated as gradients come: of layers spread evenly, and these are deferred first. Behind the
    gate: of the last ones."""
    demand = Demand(states=adam_states(torch.float32), gated=gated, accumulate=False, window=3)
    whole = make_plan(sizes(), demand)
    for share in (0.2, 0.4, 0.6):
        budget = whole.host_total_bytes - int(share * 8 * NUMEL * NUM_LAYERS)
        with_disk = replace(demand, nvme=True, host_budget_bytes=budget, piece_bytes=1 << 16)
        plan = make_plan(sizes(), with_disk)
        filed = filed_layers(plan)
        assert len(filed) >= share * NUM_LAYERS
        assert plan.host_total_bytes <= budget
        if gated:
            assert filed == list(range(NUM_LAYERS - len(filed), NUM_LAYERS))
            continue
        gaps = [after - before for before, after in itertools.pairwise(filed)]
        assert max(gaps) <= 2 * NUM_LAYERS / len(filed)
        deferring = make_plan(sizes(), replace(with_disk, deferred_layers=3))
        assert deferring.host_total_bytes <= budget
        assert deferring.deferred <= set(filed_layers(deferring))
        assert len(deferring.deferred) == 3


def filed_layers(plan: Plan) -> list[int]:
    """The layers with arrays in files."""
    return [index for index in range(NUM_LAYERS) if plan.homes.arrays(index, FILE)]


@pytest.mark.parametrize("load", [0.8, 1.0])
def test_layers_spread_evenly_hide_the_disk_better_than_the_last_ones(load: float) -> None:
    """A third of the layers' moments on the disk, nothing deferred."""
    num_filed = NUM_LAYERS // 3
    compute_s = NUM_LAYERS * (FORWARD_S + BACKWARD_S)
    disk_gbps = 8 * NUMEL * num_filed / (load * compute_s) / 1e9
    even = {int((k + 0.5) * NUM_LAYERS / num_filed) for k in range(num_filed)}
    last = set(range(NUM_LAYERS - num_filed, NUM_LAYERS))
    assert step_with_files(even, disk_gbps) < 0.95 * step_with_files(last, disk_gbps)


def step_with_files(filed: set[int], disk_gbps: float) -> float:
    """Seconds of a step with the moments of layers `filed` on a disk."""
    moments = frozenset(("exp_avg", "exp_avg_sq"))
    demand = Demand(
        states=adam_states(torch.float32),
        gated=False,
        accumulate=False,
        window=3,
        nvme=True,
        homes=make_homes(
            sizes(),
            adam_formats(torch.float32),
            staged=[moments if i in filed else () for i in range(NUM_LAYERS)],
        ),
        piece_bytes=NUMEL,
    )
    machine = rates(1e2, disk_gbps, update_gbps=1e3, memory_gbps=1e4)
    loads = (LayerLoad(forward_s=FORWARD_S, backward_s=BACKWARD_S),) * NUM_LAYERS
    work = Workload(layers=loads)
    plan = make_plan(sizes(), demand)
    return simulate(sizes(), plan, work, machine).step_s


def test_the_formulas_shares_fill_forward_and_backward() -> None:
    for updates_s in (0.5, 2.0, 2.5, 3.0, 3.5, 9.0):
        least, most = shares(forward_s=1.0, backward_s=2.0, updates_s=updates_s)
        for f in (least, most):
            step_s = max(2.0, (1 - f) * updates_s) + max(1.0, f * updates_s)
            assert step_s == pytest.approx(max(3.0, updates_s))
