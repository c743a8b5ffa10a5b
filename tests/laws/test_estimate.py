"""A step takes the seconds of the estimate and the bytes of the plan."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.plan.cost import LayerWork, Workload
from stronghold.plan.estimate import estimate
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import SleepingModel, rates, timed_steps
from tests.support.training import config, initialized

WARM_UP, MEASURED = 2, 3
NUM_PLANS = 12
TIMES = 4.0
MEDIAN_ERROR, WORST_ERROR = 0.03, 0.10  # what is promised
WORST_ERROR_OF_ONE = 0.15  # at a GPU's times, where the engine's own work counts
INPUT_NUMEL = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One random machine, model and set of pinned choices."""

    layers: list[tuple[int, float, float]]
    link_gbps: float
    update_gbps: float
    clipping: float
    accumulation: int
    section: dict[str, Any]
    nvme_gbps: float | None = None


def random_case(seed: int, times: float = TIMES) -> Case:
    """Some 4 to 20 ms a layer in each lane, as on a GPU, so that any of them may be the bound. They
    are taken so many `times`, so that the engine's own work does not count. Few bytes, so that what
    is not paced does not count either.
    """
    rng = random.Random(seed)
    num_layers = rng.randint(4, 8)
    even = rng.random() < 0.5
    base = (1 << 16, times * rng.uniform(0.004, 0.012), times * rng.uniform(0.008, 0.024))
    layers = [
        base
        if even
        else (
            rng.choice([1, 2, 3]) << 15,
            base[1] * rng.uniform(0.5, 1.5),
            base[2] * rng.uniform(0.5, 1.5),
        )
        for _ in range(num_layers)
    ]
    window = rng.randint(1, num_layers)
    return Case(
        layers=layers,
        link_gbps=rng.uniform(0.012, 0.05) / times,
        update_gbps=rng.uniform(0.08, 0.3) / times,
        clipping=rng.choice([0.0, 1.0]),
        accumulation=rng.choice([1, 1, 2]),
        section={
            "window": window,
            "activations": rng.choice(["keep", "offload", "recompute"]),
            "resident_layers": rng.choice([0, 0, 0, num_layers // 2]),
            "cpu_threads": 1,
            "early_layers": rng.randint(0, num_layers),
        },
    )


def error_of(case: Case) -> float:
    """How far the estimated seconds are off, as a share. The peaks are the plan's bytes."""
    paces = {"link_gbps": case.link_gbps, "update_gbps": case.update_gbps}
    emulated = {"poison": False, "nvme_gbps": case.nvme_gbps, **paces}
    section = {**case.section, "emulated": emulated}
    model = SleepingModel(case.layers)
    engine = initialized(
        model, config(clipping=case.clipping, accumulation=case.accumulation, section=section)
    )
    # the first layer has a backward too
    x = torch.ones(1, INPUT_NUMEL, requires_grad=True)
    steps = timed_steps(engine, x, WARM_UP + MEASURED, case.accumulation)
    report = engine.memory_report()
    layout, plan = engine.inspect().layout, engine.plan
    engine.destroy()
    planned = (plan.gpu_total_bytes, plan.host_total_bytes)
    assert (report.gpu_peak, report.host_peak) == planned, case
    disk = () if case.nvme_gbps is None else (case.nvme_gbps,)
    machine = rates(case.link_gbps, *disk, update_gbps=case.update_gbps, handover_s=5e-5)
    workload = Workload(
        layers=tuple(
            LayerWork(forward_s=forward_s, backward_s=backward_s, saved_bytes=4 * INPUT_NUMEL)
            for _, forward_s, backward_s in case.layers
        ),
        micro_batches=case.accumulation,
    )
    forecast = estimate(layout, plan, workload, machine, asynchronous=False)
    # Steps may alternate, and other processes only ever slow them down: the fastest pair.
    pairs = [(a + b) / 2 for a, b in pairwise(steps[WARM_UP:])]
    return abs(forecast.step_s / min(pairs) - 1.0)


def spilling_case(seed: int, path: Path, times: float = TIMES) -> Case:
    """With states in files, of a disk that is paced."""
    rng = random.Random(1000 + seed)
    case, nvme = (
        random_case(seed, times),
        {"path": str(path), "spill": rng.choice(["moments", "weights"])},
    )
    return replace(
        case, section={**case.section, "nvme": nvme}, nvme_gbps=rng.uniform(0.05, 0.4) / times
    )


def compare(cases: Iterable[Case]) -> None:
    """Seconds are within the bounds over all cases."""
    errors = [error_of(case) for case in cases]
    on_time(statistics.median(errors) <= MEDIAN_ERROR, errors)
    on_time(max(errors) <= WORST_ERROR, errors)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: to wake a second one takes milliseconds on some machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@law_of_time
def test_a_step_takes_the_estimated_time(tmp_path: Path) -> None:
    for case in (random_case(0, 1.0), spilling_case(0, tmp_path, 1.0)):
        error = error_of(case)
        on_time(error <= WORST_ERROR_OF_ONE, error)


@pytest.mark.slow
@law_of_time
def test_steps_of_twelve_plans_take_the_estimated_time() -> None:
    compare(map(random_case, range(NUM_PLANS)))


@pytest.mark.slow
@law_of_time
def test_steps_of_twelve_plans_with_files_take_the_estimated_time(tmp_path: Path) -> None:
    compare(spilling_case(seed, tmp_path) for seed in range(NUM_PLANS))
