"""What a few traced steps showed predicts the steps that follow."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.plan.cost import measured_rates, measured_workload
from stronghold.plan.estimate import estimate
from stronghold.telemetry.trace import Span
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import SleepingModel, rates
from tests.support.training import config, initialized

NUM_LAYERS, WARM_UP, TRACED, MEASURED = 5, 2, 2, 3
FORWARD_S, BACKWARD_S = 0.005, 0.010
NEAR = 0.2  # other processes were busy in one of the two measurements, perhaps


@pytest.mark.parametrize(
    ("activations", "accumulation"),
    [
        *(("keep", 2), ("recompute", 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("keep", 1), ("recompute", 2))),
    ],
)
@law_of_time
def test_traced_steps_predict_the_following(
    activations: str, accumulation: int, tmp_path: Path
) -> None:
    section: dict[str, Any] = {
        "window": 2,
        "activations": activations,
        "cpu_threads": 1,
        "trace": str(tmp_path / "trace.json"),
        "emulated": {"poison": False, "link_gbps": 0.04, "update_gbps": 0.4},
    }
    model = SleepingModel([(1 << 16, FORWARD_S, BACKWARD_S)] * NUM_LAYERS)
    engine = initialized(model, config(accumulation=accumulation, section=section))
    x, seconds = torch.ones(1, 1 << 13, requires_grad=True), []
    for step in range(WARM_UP + TRACED + MEASURED):
        if step == WARM_UP:
            before = len(engine.inspect().operations)
        if step == WARM_UP + TRACED:
            engine.synchronize()
            spans = engine.inspect().operations[before:]
        begun = time.perf_counter()
        for _ in range(accumulation):
            engine.backward(engine(x))
            engine.step()
        seconds.append(time.perf_counter() - begun)
    plan, layout = engine.plan, engine.inspect().layout
    engine.destroy()
    workload = measured_workload(
        spans,
        layout,
        activations=plan.activations,
        saved_bytes=(),
        micro_batches=accumulation,
        num_steps=TRACED,
    )
    found = measured_rates(spans, rates(77.0))
    on_time(found.fetch_gbps == pytest.approx(0.04, rel=0.2), found)
    on_time(found.offload_gbps == pytest.approx(0.04, rel=0.2), found)
    on_time(found.update_gbps == pytest.approx(0.4, rel=0.2), found)
    # The median: a layer may have been in the way of other processes.
    forward_s = statistics.median(load.forward_s for load in workload.layers)
    backward_s = statistics.median(load.backward_s for load in workload.layers)
    on_time(forward_s == pytest.approx(FORWARD_S, rel=0.3), workload)
    on_time(backward_s == pytest.approx(BACKWARD_S, rel=0.3), workload)
    predicted = estimate(layout, plan, workload, found, asynchronous=False).step_s
    on_time(
        predicted == pytest.approx(statistics.median(seconds[-MEASURED:]), rel=NEAR),
        (predicted, seconds),
    )


def test_a_lane_that_moved_nothing_keeps_its_known_rate() -> None:
    span = Span(lane="fetch", name="fetch 1", start_s=0.0, end_s=2.0, args={"nbytes": 10**9})
    found = measured_rates([span], rates(7.0))
    assert found.fetch_gbps == pytest.approx(0.5)
    assert (found.offload_gbps, found.update_gbps, found.load_gbps) == (7.0, 7.0, 1.0)
    assert found.duplex_gbps == pytest.approx(7.5)
