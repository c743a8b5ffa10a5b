"""Laws of a layer's seconds: from its costs and the machine's rates, term by term."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stronghold.model.costs import LayerCost, ModelCosts
from stronghold.model.operators import Counts
from stronghold.plan.cost import LayerWork, workload_of
from stronghold.plan.machine import MachineProfile
from tests.units.test_profile import ATTENTION
from tests.units.test_profile import of as machine_of

MACHINE = machine_of(flops={"bf16": 100e12, "fp16": 100e12, "fp32": 20e12}, gpu_memory_gbps=1000.0)


def load_of(dtype: str = "bf16", machine: MachineProfile = MACHINE, **cost: Any) -> LayerWork:
    forward = Counts(**cost)
    backward = Counts(2 * forward.product_flops, 2 * forward.moved_bytes)
    block = LayerCost(forward=forward, backward=backward, saved_bytes=0, boundary_bytes=8)
    return workload_of(ModelCosts(layers=(block,), dtype=dtype), machine).layers[0]


@pytest.mark.parametrize(("dtype", "seconds"), [("bf16", 3.0), ("fp32", 15.0)])
def test_products_take_their_flops_at_the_rate_of_their_dtype(dtype: str, seconds: float) -> None:
    load = load_of(dtype, product_flops=300e12)
    assert (load.forward_s, load.backward_s) == (seconds, 2 * seconds)


def test_other_operators_take_their_bytes_at_the_rate_of_device_memory() -> None:
    load = load_of(moved_bytes=500e9)
    assert (load.forward_s, load.backward_s) == (0.5, 1.0)


def test_one_kernel_runs_after_the_other() -> None:
    both = load_of(product_flops=300e12, moved_bytes=500e9)
    assert both.forward_s == 3.0 + 0.5


def test_what_is_computed_again_without_attention_moves_its_bytes_again() -> None:
    load = load_of(product_flops=200e12, attention_flops=100e12, moved_bytes=500e9)
    assert load.recompute_s("recompute") == 3.5
    assert load.recompute_s("attention") == 2.5


def test_attention_takes_its_flops_at_its_measured_rates() -> None:
    """Twice as long where no mask leaves pairs out."""
    slow = dict.fromkeys(ATTENTION, 1e14)
    machine = replace(MACHINE, attention_flops=ATTENTION, attention_backward_flops=slow)
    flops = {"product_flops": 300e12, "attention_flops": 400e12}
    causal = load_of(machine=machine, causal_flops=400e12, **flops)
    assert causal.attention_s == 2.0
    assert (causal.forward_s, causal.backward_s) == (3.0 + 2.0, 6.0 + 8.0)
    whole = load_of(machine=machine, **flops)
    assert (whole.forward_s, whole.backward_s) == (3.0 + 4.0, 6.0 + 16.0)


def test_transient_bytes_come_beside_the_saved_ones() -> None:
    none = Counts()
    head = LayerCost(forward=none, backward=none, saved_bytes=5, boundary_bytes=0, passing_bytes=7)
    costs = ModelCosts(layers=(head,), dtype="bf16")
    work = workload_of(costs, MACHINE).layers[0]
    assert (work.saved_bytes, work.passing_bytes) == (5, 7)
