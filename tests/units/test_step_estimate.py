"""The estimate equals sums that a reader can do by hand, with one slow lane at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stronghold.errors import StateError
from stronghold.plan.cost import Demand, LayerWork, Workload
from stronghold.plan.estimate import End, Lanes, StepEstimate, estimate
from stronghold.plan.machine import Rates
from stronghold.plan.plan import Plan, make_plan
from stronghold.tools.estimate.model import from_sizes
from tests.support.states import adam_states

NUM_BLOCKS, FORWARD_S, BACKWARD_S = 6, 0.010, 0.020
SAVED_BYTES = 10**9  # by autograd, in a block
COMPUTE_S = NUM_BLOCKS * (FORWARD_S + BACKWARD_S)
LAYOUT = from_sizes(NUM_BLOCKS, 256, 4, 1024, 128).layout
BLOCK = LAYOUT.layers[LAYOUT.streamed[0]]
ALL_FAST = Rates(
    fetch_gbps=1e6,
    offload_gbps=1e6,
    duplex_gbps=2e6,
    update_gbps=1e6,
    memory_gbps=1e9,
    device_gbps=1e6,
    load_gbps=1e6,
    spill_gbps=1e6,
    io_gbps=2e6,
    handover_s=0.0,
)


def plan_of(**settings: Any) -> Plan:
    demand = Demand(states=adam_states(torch.bfloat16), accumulate=False, window=2, cpu_threads=1)
    return make_plan(LAYOUT, replace(demand, **settings))


def step_of(plan: Plan, **rates: float) -> StepEstimate:
    """A step in which blocks compute, and all other layers take no time."""
    layers = [
        LayerWork(forward_s=FORWARD_S, backward_s=BACKWARD_S, saved_bytes=SAVED_BYTES)
        if layer.streamed
        else LayerWork(forward_s=0.0, backward_s=0.0)
        for layer in LAYOUT.layers
    ]
    step = estimate(LAYOUT, plan, Workload(layers=tuple(layers)), replace(ALL_FAST, **rates))
    assert sum(step.shares.values()) == pytest.approx(1.0)
    again_s = NUM_BLOCKS * FORWARD_S if "recompute" in plan.activations else 0.0
    assert step.shares["compute"] * step.step_s == pytest.approx(COMPUTE_S + again_s, rel=1e-3)
    return step


def test_with_fast_lanes_a_step_is_its_compute() -> None:
    step = step_of(plan_of())
    assert step.bound == "compute"
    assert step.step_s == pytest.approx(COMPUTE_S, rel=1e-3)


def test_with_one_slot_each_fetch_adds_to_the_step() -> None:
    """Forward fetches every block. Backward finds the last one in its slot."""
    fetch_s = 0.040
    gbps = BLOCK.weight_bytes / fetch_s * 1e-9
    # What is no block is updated on the GPU, and never fetched.
    step = step_of(plan_of(window=1, resident_updates="gpu"), fetch_gbps=gbps, duplex_gbps=2e6)
    assert step.bound == "fetch"
    assert step.step_s == pytest.approx(COMPUTE_S + (2 * NUM_BLOCKS - 1) * fetch_s, rel=1e-3)


def test_forward_waits_for_updates_one_after_the_other() -> None:
    """Updates run behind the clip barrier. Those of all layers last longer than forward."""
    plan, update_s = plan_of(), 0.060
    moved = [layer.update_bytes for layer in LAYOUT.layers]
    gbps = BLOCK.update_bytes / update_s * 1e-9
    step = step_of(plan, update_gbps=gbps)
    head_s = moved[-1] * 1e-9 / gbps
    last_block_s = max(FORWARD_S, head_s)  # it computes while the head is updated
    # Norms of the first block and of the embeddings follow backward.
    norm_s = 2 * sum(layer.num_trained for layer in LAYOUT.layers[: BLOCK.index + 1]) * 1e-9 / gbps
    updates_s = sum(moved[:-1]) * 1e-9 / gbps
    expected_s = NUM_BLOCKS * BACKWARD_S + norm_s + updates_s + last_block_s
    assert step.bound == "update"
    assert step.step_s == pytest.approx(expected_s, rel=1e-3)


def test_recomputed_blocks_run_forward_twice() -> None:
    step = step_of(plan_of(activations="recompute"))
    assert step.step_s == pytest.approx(COMPUTE_S + NUM_BLOCKS * FORWARD_S, rel=1e-3)


def test_backward_waits_for_offloaded_activations() -> None:
    back_s = 0.050
    step = step_of(plan_of(activations="offload"), fetch_gbps=SAVED_BYTES / back_s * 1e-9)
    assert step.bound == "fetch"
    # Only the last block computes beside none of them.
    expected_s = NUM_BLOCKS * (FORWARD_S + back_s) + BACKWARD_S
    assert step.step_s == pytest.approx(expected_s, rel=1e-2)


def test_a_slow_calling_thread_bounds_the_step() -> None:
    launch_s = 0.050
    step = step_of(plan_of(), launch_s=launch_s)
    assert step.bound == "launch"
    assert step.step_s == pytest.approx(2 * len(LAYOUT.layers) * launch_s, rel=0.1)


def test_no_step_is_faster_than_the_disk() -> None:
    plan = plan_of(nvme=True, spill="moments")
    gbps = plan.traffic.nvme_read_bytes * 1e-9  # reads take a second, and so do writes
    step = step_of(plan, load_gbps=gbps, spill_gbps=gbps, io_gbps=gbps)
    assert step.bound in ("load", "spill")
    assert 2.0 - 1e-9 <= step.step_s <= 2.0 + COMPUTE_S


def test_a_transfer_gets_what_an_earlier_one_leaves_of_the_link() -> None:
    lanes = Lanes(replace(ALL_FAST, fetch_gbps=1.0, offload_gbps=1.0, duplex_gbps=1.5))
    assert lanes.move("fetch", 1e9, End(0.0)).at_s == pytest.approx(1.0)
    # a second at half the rate, and the other half alone
    assert lanes.move("offload", 1e9, End(0.0)).at_s == pytest.approx(1.5)


def test_an_update_gets_what_transfers_leave_of_the_memory() -> None:
    lanes = Lanes(replace(ALL_FAST, fetch_gbps=1.0, update_gbps=1.5, memory_gbps=2.0))
    assert lanes.move("fetch", 1e9, End(0.0)).at_s == pytest.approx(1.0)
    # a second at 1 GB/s, then 1.5
    assert lanes.move("update", 4e9, End(0.0)).at_s == pytest.approx(3.0)
    lanes = Lanes(replace(ALL_FAST, update_gbps=3.0, memory_gbps=2.0))
    assert lanes.move("update", 4e9, End(0.0)).at_s == pytest.approx(2.0)


def test_the_longest_operation_of_a_chain_is_the_one_that_is_waited_for() -> None:
    lanes = Lanes(replace(ALL_FAST, fetch_gbps=1.0, update_gbps=1.0))
    updated = lanes.move("update", 2e9, End(0.0))
    assert lanes.move("fetch", 1e9, updated).lane == "update"
    assert lanes.move("fetch", 3e9, updated).lane == "fetch"


def test_work_of_another_number_of_layers_is_refused() -> None:
    with pytest.raises(StateError, match="0 layers"):
        estimate(LAYOUT, plan_of(), Workload(layers=()), ALL_FAST)
