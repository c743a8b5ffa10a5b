"""Laws of which updates are deferred: as many as make the step its longest lane, spread evenly."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from stronghold.device.simulated import Rates
from stronghold.model.layout import ModelLayout, layout
from stronghold.model.partition import partition
from stronghold.plan.deferral import shares, spread
from stronghold.plan.demand import Demand
from stronghold.simulate import LayerLoad, Workload, fastest_plan
from tests.sleeping import SleepingModel
from tests.test_deferral import small_pieces  # noqa: F401 - of every test here too

# -- the choice ------------------------------------------------------------------------------------
NUM_LAYERS, NUMEL = 16, 1 << 17
FORWARD_S, BACKWARD_S = 0.003, 0.006  # of a layer
SLACK = 1.15  # the figure
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
        weight_bytes=4,
        low_bytes=0,
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
    rates = Rates(
        fetch_gbps=1e2,
        drain_gbps=1e2,
        duplex_gbps=2e2,
        update_gbps=1e3 if on_disk else 32 * per_byte,  # Adam's bytes, and the norms'
        memory_gbps=1e4,
        device_gbps=1e3,
        load_gbps=8 * per_byte,
        spill_gbps=8 * per_byte,
        io_gbps=16 * per_byte,
        handover_s=5e-5,
    )
    loads = (LayerLoad(forward_s=FORWARD_S, backward_s=BACKWARD_S),) * NUM_LAYERS
    work = Workload(layers=loads, tokens=1)
    choice = fastest_plan(sizes(), demand, work, rates, dtype=torch.float32, asynchronous=False)
    return choice.forecast.step_s, max(1.0, load) * compute_s, len(choice.plan.deferred)


@pytest.mark.parametrize("kind", ["disk", "adam"])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 2.0, 4.0])
def test_the_search_defers_what_makes_the_step_the_longest_lane(load: float, kind: str) -> None:
    found_s, bound_s, count = forecast(kind, load, None)
    assert found_s <= SLACK * bound_s
    best_s = min(forecast(kind, load, k)[0] for k in range(NUM_LAYERS + 1))
    assert found_s <= NEAR * best_s
    if load <= 0.6:
        assert count == 0  # backward hides them: nothing is held
    elif 0.8 <= load <= 1.1:
        assert forecast(kind, load, 0)[0] > SLACK * bound_s  # not vacuous


def test_deferred_layers_are_spread_evenly() -> None:
    for count in range(NUM_LAYERS + 1):
        chosen = sorted(spread(sizes().layers, count))
        assert len(chosen) == count
        gaps = [after - before for before, after in itertools.pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert not chosen or abs(chosen[0] - (NUM_LAYERS - 1 - chosen[-1])) <= 1


def test_the_formulas_shares_fill_forward_and_backward() -> None:
    for updates_s in (0.5, 2.0, 2.5, 3.0, 3.5, 9.0):
        least, most = shares(forward_s=1.0, backward_s=2.0, updates_s=updates_s)
        for f in (least, most):
            step_s = max(2.0, (1 - f) * updates_s) + max(1.0, f * updates_s)
            assert step_s == pytest.approx(max(3.0, updates_s))
