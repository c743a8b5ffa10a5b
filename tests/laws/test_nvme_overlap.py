"""With moments on NVMe a step takes the longest of its lanes and little more, and what the
simulator predicts.

Compute is a sleep, link and disk are paced; Adam and the files are real.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import stronghold
from stronghold.plan.cost import LayerLoad, Workload
from stronghold.refine import TRACED_STEPS, UNTOLD_STEPS
from stronghold.simulate import simulate
from stronghold.telemetry.trace import read
from tests.laws.test_simulate import INPUT_NUMEL, MEDIAN_ERROR, WORST_ERROR, Case, random_case
from tests.laws.test_simulate import WARM_UP as PINNED_WARM_UP
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import Measured, SleepingModel, rates, timed_steps
from tests.support.training import config

NUM_LAYERS = 12
LAYER_NUMEL = 1 << 17
WARM_UP, MEASURED = UNTOLD_STEPS + TRACED_STEPS + 1, 3  # the plan is refined before it is measured
SLACK = 1.15  # what is promised
COMPUTE_BOUND = 0.15  # a disk's work in a step, in the time of compute's
BALANCED = (0.8, 1.0, 1.25)
DISK_BOUND = 20.0
FORWARD_S = 0.005


@law_of_time
def test_adam_is_idle_while_the_disk_is_the_bound_and_the_disk_while_compute_is(
    tmp_path: Path,
) -> None:
    for load in (COMPUTE_BOUND, DISK_BOUND):
        check_step(load, tmp_path / str(load))


@pytest.mark.parametrize(
    "load", [pytest.param(x, marks=pytest.mark.slow) if x < 1.25 else x for x in BALANCED]
)
@law_of_time
def test_step_takes_the_longest_lane(load: float, tmp_path: Path) -> None:
    """Also where the disk takes longer than backward, and not much longer than all of compute."""
    num_deferred = check_step(load, tmp_path)
    on_time(num_deferred > 0 or load < 1.0, num_deferred)


def check_step(load: float, path: Path) -> int:
    """The number of layers that were deferred."""
    found = measure_step(load, path)
    # Not vacuous: without overlap the step would be the sum.
    on_time(found.alone_s > 1.15 * found.bound_s, found)
    on_time(found.step_s <= SLACK * found.bound_s, found)
    return found.num_deferred


def measure_step(load: float, path: Path, clipping: float = 0.0) -> Measured:
    """A model of which the disk takes `load` times what compute takes."""
    path.mkdir(exist_ok=True)
    forward_s = FORWARD_S / max(1.0, load / BALANCED[-1])  # the disk's time is limited
    compute_s = 3 * forward_s * NUM_LAYERS
    nvme_gbps = 8 * LAYER_NUMEL * NUM_LAYERS / (load * compute_s) / 1e9
    model = SleepingModel([(LAYER_NUMEL, forward_s, 2 * forward_s)] * NUM_LAYERS)
    section = {
        "window": 3,
        "cpu_threads": 1,
        "trace": str(path / "trace.json"),
        "nvme": {"path": str(path), "spill": "moments"},
        "emulated": {"poison": False, "nvme_gbps": nvme_gbps},
    }
    engine, _, _, _ = stronghold.initialize(
        model=model,
        config=config(clipping=clipping, section=section),
        model_parameters=model.parameters(),
    )
    steps = timed_steps(engine, torch.ones(1024), WARM_UP + MEASURED)
    plan = engine.plan
    engine.destroy()
    step_s = statistics.median(steps[WARM_UP:])
    spans = read(path / "trace.json")
    busy = {
        lane: sum(s.duration_s for s in spans if s.lane == lane) / (WARM_UP + MEASURED)
        for lane in ("compute", "fetch", "drain", "update", "load", "spill")
    }
    # Sleeps and Python take what the machine makes of them.
    compute_s = min(busy["compute"], 1.2 * compute_s)
    disk_s = plan.traffic.nvme_read_bytes / (nvme_gbps * 1e9)
    assert (
        plan.traffic.nvme_read_bytes
        == plan.traffic.nvme_written_bytes
        == 8 * LAYER_NUMEL * NUM_LAYERS
    )
    bound = max(compute_s, disk_s, busy["fetch"], busy["drain"], busy["update"])
    return Measured(
        step_s=step_s,
        bound_s=bound,
        alone_s=busy["load"] + busy["spill"] + compute_s,
        num_deferred=len(plan.deferred),
    )


# -- the simulator ---------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class Spilling:
    case: Case
    spill: str
    nvme_gbps: float


def spilling_case(seed: int) -> Spilling:
    rng = random.Random(1000 + seed)
    spill = rng.choice(["moments", "weights"])
    return Spilling(case=random_case(seed), spill=spill, nvme_gbps=rng.uniform(0.05, 0.4))


def predicted_and_measured(of: Spilling, path: Path) -> tuple[float, float]:
    """Seconds of a step; peaks are equal."""
    case = of.case
    paces = {"link_gbps": case.link_gbps, "update_gbps": case.update_gbps}
    emulated = {"poison": False, "nvme_gbps": of.nvme_gbps, **paces}
    section = {**case.section, "nvme": {"path": str(path), "spill": of.spill}, "emulated": emulated}
    model = SleepingModel(case.layers)
    engine, _, _, _ = stronghold.initialize(
        model=model,
        config=config(clipping=case.clipping, accumulation=case.accumulation, section=section),
        model_parameters=model.parameters(),
    )
    x = torch.ones(1, INPUT_NUMEL, requires_grad=True)
    steps = timed_steps(engine, x, PINNED_WARM_UP + MEASURED, case.accumulation)
    report, layout, plan = engine.memory_report(), engine._stack.layout, engine.plan
    engine.destroy()
    machine = rates(case.link_gbps, of.nvme_gbps, update_gbps=case.update_gbps, handover_s=5e-5)
    found = simulate(
        layout, plan, workload_of(case), machine, dtype=torch.float32, asynchronous=False
    )
    assert (found.gpu_peak_bytes, found.host_peak_bytes) == (report.gpu_peak, report.host_peak)
    # Two steps, since two may alternate; the pair that other work on the machine disturbed least.
    pairs = pairwise(steps[PINNED_WARM_UP:])
    return found.step_s, min((one + other) / 2 for one, other in pairs)


def workload_of(case: Case) -> Workload:
    layers = [
        LayerLoad(forward_s=forward_s, backward_s=backward_s, saved_bytes=4 * INPUT_NUMEL)
        for _, forward_s, backward_s in case.layers
    ]
    return Workload(layers=tuple(layers), micro_batches=case.accumulation)


def check(seeds: range, path: Path) -> None:
    errors: list[float] = []
    for seed in seeds:
        predicted_s, measured_s = predicted_and_measured(spilling_case(seed), path)
        errors.append(abs(predicted_s / measured_s - 1.0))
    on_time(statistics.median_low(errors) <= MEDIAN_ERROR, errors)  # half of them are within it
    on_time(max(errors) <= WORST_ERROR, errors)


@law_of_time
def test_the_prediction_is_what_a_step_takes(tmp_path: Path) -> None:
    check(range(1), tmp_path)


@pytest.mark.slow
@law_of_time
def test_the_prediction_is_what_a_step_takes_for_thirty_plans(tmp_path: Path) -> None:
    check(range(30), tmp_path)
