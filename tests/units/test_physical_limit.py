"""Laws of the physical limit: the published formula, term by term."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from stronghold.model.costs import DTYPES
from stronghold.optim.states import States
from stronghold.plan.cost import (
    COMPUTE,
    DISK,
    DUPLEX,
    FETCH,
    MEMORY,
    OFFLOAD,
    Limits,
    Traffic,
    physical_limit,
)
from stronghold.plan.machine import MachineProfile
from tests.support.states import adam_states

BF16 = adam_states(torch.bfloat16)
MACHINE = MachineProfile(
    name="round",
    measured="",
    sources=(),
    gpu_memory_bytes=24 << 30,
    host_memory_bytes=128 << 30,
    num_cores=16,
    fetch_gbps=20.0,
    offload_gbps=25.0,
    duplex_gbps=40.0,
    memory_gbps=60.0,
    adam_gbps=50.0,
    adam_thread_gbps=10.0,
    flops={"bf16": 150e12, "fp16": 150e12, "fp32": 75e12},
    gpu_memory_gbps=900.0,
    nvme_read_gbps=5.0,
    nvme_write_gbps=3.0,
    nvme_mixed_gbps=6.0,
)
PARAMETERS = 8 * 10**9
TOKENS = 4096


def limit(machine: MachineProfile = MACHINE, dtype: str = "bf16", **changes: Any) -> Limits:
    parameters = {"streamed": PARAMETERS, "trained": PARAMETERS}
    flops = {"forward_flops": 2.0 * PARAMETERS * TOKENS}
    for name, value in changes.items():
        (flops if name.endswith("flops") else parameters)[name] = value
    further = {name: parameters.pop(name) for name in list(parameters) if name.endswith("_bytes")}
    moved = traffic(adam_states(DTYPES[dtype]), **parameters)
    moved = dataclasses.replace(moved, **further)
    return physical_limit(moved, machine, dtype, **flops)


def traffic(
    states: States,
    *,
    streamed: int = 0,
    trained: int = 0,
    refreshed: int = 0,
    window: int = 0,
    layer: int = 0,
    micro_batches: int = 1,
) -> Traffic:
    """The traffic of a model from numbers of parameters. `trained` of the `streamed` ones have
    gradients; `refreshed` ones stay on the device and are updated on the host."""
    weight_bytes = states.weight_bytes
    return Traffic(
        micro_batches=micro_batches,
        streamed_bytes=weight_bytes * streamed,
        window_bytes=weight_bytes * window,
        refreshed_bytes=weight_bytes * refreshed,
        layer_bytes=weight_bytes * layer,
        trained_bytes=weight_bytes * trained,
        trained_parameters=trained,
        update_bytes=int(states.update_bytes(states.dtype) * (trained + refreshed)),
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_compute_is_six_or_eight_flops_per_parameter_and_token(recompute: bool) -> None:
    forward = 2.0 * PARAMETERS * TOKENS
    parts = limit(recomputed_flops=forward if recompute else 0.0).parts
    factor = 8 if recompute else 6
    assert parts[COMPUTE] == pytest.approx(factor * PARAMETERS * TOKENS / 150e12)


def test_weights_cross_twice_and_gradients_once() -> None:
    parts = limit().parts
    assert parts[FETCH] == pytest.approx(2 * 2 * PARAMETERS / 20e9)
    assert parts[OFFLOAD] == pytest.approx(2 * PARAMETERS / 25e9)
    assert parts[DUPLEX] == pytest.approx(6 * PARAMETERS / 40e9)


def test_offloaded_activations_cross_both_ways_and_touch_memory_twice() -> None:
    plain, offloaded = (limit(offloaded_bytes=nbytes).parts for nbytes in (0, 10**10))
    assert offloaded[FETCH] - plain[FETCH] == pytest.approx(10 / 20)
    assert offloaded[OFFLOAD] - plain[OFFLOAD] == pytest.approx(10 / 25)
    assert offloaded[MEMORY] - plain[MEMORY] == pytest.approx(20 / 60)


def test_every_micro_batch_moves_the_weights_and_adds_its_gradients() -> None:
    """Two: 6 bytes of transfers more, one sum of 2 read and 4 written, which Adam reads."""
    moved = {
        count: traffic(BF16, streamed=1, trained=1, micro_batches=count).memory_bytes
        for count in (1, 2, 4, 5)
    }
    assert moved[1] == 32  # bytes of host memory per parameter, 26 of them the optimizer's
    assert moved[2] - moved[1] == 6 + (2 + 4) + 4
    assert moved[5] - moved[4] == 6 + (2 + 4 + 4)
    one, four = (limit(micro_batches=n).parts for n in (1, 4))
    for name in (COMPUTE, FETCH, OFFLOAD, DUPLEX):
        assert four[name] == pytest.approx(4 * one[name])
    assert one[MEMORY] < four[MEMORY] < 4 * one[MEMORY]


def test_what_is_still_in_the_window_when_the_direction_turns_is_not_loaded_again() -> None:
    """Two micro-batches turn three times before the update, after which everything is stale."""
    saved = 3 * 2 * 10**9 / 20e9
    plain, window = (limit(micro_batches=2, window=size).parts for size in (0, 10**9))
    assert plain[FETCH] - window[FETCH] == pytest.approx(saved)
    assert plain[MEMORY] - window[MEMORY] == pytest.approx(saved * 20 / 60)
    assert plain[OFFLOAD] == window[OFFLOAD]


def test_what_stays_and_is_updated_on_the_host_crosses_once_each_way() -> None:
    parts = limit(streamed=0, trained=0, refreshed=10**9).parts
    assert parts[FETCH] == pytest.approx(2 / 20)
    assert parts[OFFLOAD] == pytest.approx(2 / 25)
    assert parts[MEMORY] == pytest.approx((26 + 2 + 2) / 60)


@pytest.mark.parametrize(
    ("reads", "writes", "seconds"), [(50, 0, 10.0), (0, 30, 10.0), (30, 30, 10.0), (0, 0, 0.0)]
)
def test_the_disk_takes_its_slowest_rate(reads: int, writes: int, seconds: float) -> None:
    parts = limit(nvme_read_bytes=reads * 10**9, nvme_written_bytes=writes * 10**9).parts
    assert parts[DISK] == pytest.approx(seconds)
    without = limit().parts[MEMORY]
    assert parts[MEMORY] - without == pytest.approx((reads + writes) / 60)


def test_a_disk_that_is_not_there_is_never_done() -> None:
    machine = dataclasses.replace(
        MACHINE, nvme_read_gbps=None, nvme_write_gbps=None, nvme_mixed_gbps=None
    )
    assert math.isinf(limit(machine, nvme_read_bytes=1).seconds)


def test_the_limit_is_its_largest_part_and_a_layers_way_in_and_out() -> None:
    limits = limit(layer=10**9)
    assert limits.fill_s == pytest.approx(2 / 20 + 2 / 25)
    assert limits.seconds == max(limits.parts.values()) + limits.fill_s
    assert limits.parts[limits.bound] == max(limits.parts.values())
