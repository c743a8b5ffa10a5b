"""Transfers, updates and files hide behind compute: the step takes the longest of them, and little
more.

Compute is a sleep, which leaves the cores free as a GPU does; link and disk are paced; Adam and the
files are real.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.telemetry.trace import read
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import Measured, SleepingModel, timed_steps
from tests.support.training import config, initialized

LINKED_LAYERS, UPDATED_LAYERS, LAYER_NUMEL = 18, 28, 1 << 19  # 2 MiB in fp32
ON_DISK_LAYERS, ON_DISK_NUMEL = 12, 1 << 17
WARM_UP, MEASURED = 2, 3  # memory is touched for the first time in the first steps
# what is promised: fill and drain of one layer, and the hand-over between threads
SLACK = 1.15
LANES = ("compute", "fetch", "offload", "update", "load", "spill")
UPDATED = 28 / 32  # of the bytes that pass memory: the norm reads the rest
COMPUTE_BOUND = 0.15  # a disk's work in a step, in the time of compute's
BALANCED = (0.8, 1.0, 1.25)
DISK_BOUND = 20.0
SLOW_BUT_LAST = [*(pytest.param(x, marks=pytest.mark.slow) for x in BALANCED[:-1]), BALANCED[-1]]


def measure(
    layers: list[tuple[int, float, float]],
    section: dict[str, Any],
    emulated: dict[str, float],
    clipping: float,
    path: Path,
) -> tuple[dict[str, float], Any]:
    """The median step's seconds, and how busy each lane was in one; the plan."""
    path.mkdir(exist_ok=True)
    model = SleepingModel(layers)
    trace = str(path / "trace.json")
    section = {"window": 3, "cpu_threads": 1, "trace": trace, **section}
    section["emulated"] = {"poison": False, **emulated}
    engine = initialized(model, config(clipping=clipping, section=section))
    steps = timed_steps(engine, torch.ones(1024), WARM_UP + MEASURED)[WARM_UP:]
    plan = engine.plan
    engine.destroy()
    spans = read(path / "trace.json")
    busy = {
        lane: sum(s.duration_s for s in spans if s.lane == lane) / (WARM_UP + MEASURED)
        for lane in LANES
    }
    return {"step": statistics.median(steps), **busy}, plan


@law_of_time
def test_the_row_of_compute_has_each_use_of_a_layer_and_no_wait(tmp_path: Path) -> None:
    layers = [(LAYER_NUMEL, 0.001, 0.002)] * 4
    link_gbps = 4 * LAYER_NUMEL / 0.06 / 1e9  # 60 ms for a layer
    busy, _ = measure(layers, {}, {"link_gbps": link_gbps}, 0.0, tmp_path)
    row = [span.name for span in read(tmp_path / "trace.json") if span.lane == "compute"]
    forward, backward = [f"forward {k}" for k in range(4)], [f"backward {k}" for k in range(4)]
    assert [*dict.fromkeys(row)] == [*forward, "backward", *reversed(backward)]
    on_time(busy["compute"] < 0.13 * busy["step"], busy)


@pytest.mark.parametrize(
    "clipping",
    [pytest.param(0.0, marks=pytest.mark.slow), 1.0],
    ids=["early updates", "gated updates"],
)
@pytest.mark.parametrize(
    ("forward_s", "link_gbps"),
    [(0.001, 0.25), pytest.param(0.008, 0.5, marks=pytest.mark.slow)],
    ids=["link-bound", "compute-bound"],
)
@law_of_time
def test_step_takes_the_longest_lane(
    forward_s: float, link_gbps: float, clipping: float, tmp_path: Path
) -> None:
    layers = [(LAYER_NUMEL, forward_s, 2 * forward_s)] * LINKED_LAYERS
    busy, _ = measure(layers, {}, {"link_gbps": link_gbps}, clipping, tmp_path)
    bound = max(busy[lane] for lane in LANES)
    on_time(busy["step"] <= SLACK * bound, busy)
    # Not vacuous: without overlap the step would be the sum.
    on_time(sum(busy[lane] for lane in ("compute", "fetch", "offload")) > 1.3 * bound, busy)


@pytest.mark.parametrize("load", SLOW_BUT_LAST)
@law_of_time
def test_early_updates_hide_behind_forward_and_backward(load: float, tmp_path: Path) -> None:
    """Also where the CPU's Adam takes longer than backward: the other layers, which lie between
    the early ones, are updated in forward."""
    # what backward has time for, and a little more
    share = 1.1 * (2 / 3) / (UPDATED * load)
    found = measure_updates(load, tmp_path, round(UPDATED_LAYERS * min(1.0, share)))
    on_time(found.alone_s > 1.3 * found.bound_s, found)  # not vacuous
    on_time(found.step_s <= SLACK * found.bound_s, found)


@law_of_time
def test_too_many_early_updates_are_withdrawn(tmp_path: Path) -> None:
    """Where every layer is early, backward has time for the last ones. Forward waits for the first
    ones, and then for nothing: the last ones are updated."""
    found = measure_updates(BALANCED[-1], tmp_path, UPDATED_LAYERS)
    forward_s = found.forward_s
    hidden = min(1.0, 2 * forward_s / found.updates_s)
    bound_s = max(3 * forward_s, found.updates_s + hidden * forward_s)
    on_time(found.step_s <= SLACK * bound_s, found)


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdates(Measured):
    """`updates_s`: of all layers. `forward_s`: a third of what compute took."""

    updates_s: float
    forward_s: float


def measure_updates(load: float, path: Path, early: int) -> MeasuredUpdates:
    """A model of which the CPU's Adam, with the norm, takes `load` times what compute takes."""
    forward_s = 0.004 / max(1.0, load / BALANCED[-1])  # Adam's time is limited
    nbytes = 32 * LAYER_NUMEL  # Adam's, and the norm's
    layers = [(LAYER_NUMEL, forward_s, 2 * forward_s)] * UPDATED_LAYERS
    pace = {"update_gbps": nbytes / (load * 3 * forward_s) / 1e9}
    busy, plan = measure(layers, {"early_layers": early}, pace, 0.0, path)
    assert len(plan.early) == early
    updates_s = UPDATED * load * 3 * forward_s * UPDATED_LAYERS
    return MeasuredUpdates(
        step_s=busy["step"],
        bound_s=max(busy["compute"], busy["fetch"], updates_s),
        alone_s=busy["compute"] + updates_s,
        num_early=early,
        updates_s=updates_s,
        forward_s=busy["compute"] / 3,
    )


# -- with moments on NVMe --------------------------------------------------------------------------
@law_of_time
def test_adam_is_idle_while_the_disk_is_the_bound_and_the_disk_while_compute_is(
    tmp_path: Path,
) -> None:
    for load in (COMPUTE_BOUND, DISK_BOUND):
        check_step(load, tmp_path / str(load))


@pytest.mark.parametrize("load", SLOW_BUT_LAST)
@law_of_time
def test_step_takes_the_longest_lane_with_files(load: float, tmp_path: Path) -> None:
    """Updates of layers with files begin behind the clip barrier, and hide behind forward."""
    check_step(load, tmp_path)


def check_step(load: float, path: Path) -> None:
    found = measure_step(load, path)
    # Not vacuous: without overlap the step would be the sum.
    on_time(found.alone_s > 1.15 * found.bound_s, found)
    on_time(found.step_s <= SLACK * found.bound_s, found)


def measure_step(load: float, path: Path) -> Measured:
    """A model of which the disk takes `load` times what compute takes."""
    forward_s = 0.005 / max(1.0, load / BALANCED[-1])  # the disk's time is limited
    compute_s = 3 * forward_s * ON_DISK_LAYERS
    nbytes = 8 * ON_DISK_NUMEL * ON_DISK_LAYERS  # each way
    disk_s = load * compute_s
    layers = [(ON_DISK_NUMEL, forward_s, 2 * forward_s)] * ON_DISK_LAYERS
    section = {"nvme": {"path": str(path), "spill": "moments"}}
    busy, plan = measure(layers, section, {"nvme_gbps": nbytes / disk_s / 1e9}, 0.0, path)
    assert plan.traffic.nvme_read_bytes == plan.traffic.nvme_written_bytes == nbytes
    # Sleeps and Python take what the machine makes of them.
    compute_s = min(busy["compute"], 1.2 * compute_s)
    backward_s = 2 / 3 * compute_s
    return Measured(
        step_s=busy["step"],
        bound_s=backward_s + max(compute_s / 3, disk_s, busy["fetch"] / 2, busy["update"]),
        alone_s=busy["load"] + busy["spill"] + compute_s,
        num_early=len(plan.early),
    )
