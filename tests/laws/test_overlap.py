"""Transfers and updates hide behind compute: the step takes the longest of them, and little more.

Compute is a sleep, which leaves the cores free as a GPU does; the link is paced; Adam is real.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from stronghold.refine import TRACED_STEPS, UNTOLD_STEPS
from stronghold.telemetry.trace import read
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import Measured, SleepingModel, timed_steps
from tests.support.training import config

NUM_LAYERS = 14
LAYER_NUMEL = 1 << 19  # 2 MiB in fp32
WARM_UP, MEASURED = UNTOLD_STEPS + TRACED_STEPS + 1, 3  # the plan is refined before that
SLACK = 1.15  # what is promised: fill and drain of one layer, and the hand-over between threads


def measure(
    section: dict[str, Any], clipping: float, forward_s: float, trace: Any
) -> dict[str, float]:
    """Medians over the measured steps, in seconds: the step, and how busy each lane was in it."""
    model = SleepingModel([(LAYER_NUMEL, forward_s, 2 * forward_s)] * NUM_LAYERS)
    settings = config(clipping=clipping, section={"trace": str(trace), **section})
    settings["stronghold"]["emulated"] = {"poison": False, **section.get("emulated", {})}
    engine, _, _, _ = stronghold.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    steps = timed_steps(engine, torch.ones(1024), WARM_UP + MEASURED)[WARM_UP:]
    num_deferred = len(engine.plan.deferred)
    engine.destroy()
    busy: dict[str, float] = {"step": statistics.median(steps), "deferred": num_deferred}
    spans = read(trace)
    for lane in ("compute", "fetch", "drain", "update"):
        durations = [span.duration_s for span in spans if span.lane == lane]
        busy[lane] = sum(durations) / (WARM_UP + MEASURED)
    return busy


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["early updates", "gated updates"])
@pytest.mark.parametrize(
    ("forward_s", "link_gbps"),
    [(0.001, 0.25), pytest.param(0.008, 0.5, marks=pytest.mark.slow)],
    ids=["link-bound", "compute-bound"],
)
@law_of_time
def test_step_takes_the_longest_lane(
    forward_s: float, link_gbps: float, clipping: float, tmp_path: Any
) -> None:
    section = {"window": 3, "cpu_threads": 1, "emulated": {"link_gbps": link_gbps}}
    busy = measure(section, clipping, forward_s, tmp_path / "trace.json")
    bound = max(busy["compute"], busy["fetch"], busy["drain"], busy["update"])
    on_time(busy["step"] <= SLACK * bound, busy)
    # Not vacuous: without overlap the step would be the sum.
    on_time(sum(busy[lane] for lane in ("compute", "fetch", "drain")) > 1.3 * bound, busy)


@pytest.mark.parametrize(
    "load", [1.25, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.8, 1.0))]
)
@law_of_time
def test_early_updates_hide_behind_forward_and_backward(load: float, tmp_path: Any) -> None:
    """Also where the CPU's Adam takes longer than backward: some layers are updated in forward."""
    found = measure_updates(load, tmp_path)
    on_time(found.step_s <= SLACK * found.bound_s, found)
    on_time(found.num_deferred > 0 or load < 1.0, found)


def measure_updates(load: float, path: Path, clipping: float = 0.0) -> Measured:
    """A model of which the CPU's Adam takes `load` times what compute takes."""
    forward_s = 0.004 / max(1.0, load / 1.25)  # Adam's time is limited
    nbytes = 32 * LAYER_NUMEL  # Adam's, and the norm's
    section = {
        "window": 3,
        "cpu_threads": 1,
        "emulated": {"update_gbps": nbytes / (load * 3 * forward_s) / 1e9},
    }
    busy = measure(section, clipping, forward_s, path / "trace.json")
    return Measured(
        step_s=busy["step"],
        bound_s=max(busy["compute"], busy["fetch"], busy["drain"], busy["update"]),
        alone_s=busy["compute"] + busy["update"],
        num_deferred=int(busy["deferred"]),
    )
