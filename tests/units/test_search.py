"""The search keeps what is pinned, and names the budget that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stronghold.errors import BudgetError
from stronghold.model.costs import ModelCosts
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import Demand, workload_of
from stronghold.plan.machine import MachineProfile, rates_of
from stronghold.plan.plan import Plan
from stronghold.plan.search import fastest_plan, largest_micro_batch
from stronghold.tools.estimate.model import from_sizes
from tests.support.sizes import named_size
from tests.support.states import adam_states

GIB = 1 << 30


def demand_of(gpu_gib: int) -> tuple[ModelLayout, ModelCosts, MachineProfile, Demand]:
    """12 blocks of a GPT, 8 sequences of 1024 tokens, a desktop's GPU with this budget."""
    machine = MachineProfile.load("rtx4090")
    model = from_sizes(12, 4096, 32, 32000, 1024)
    layout, costs = model.layout, model.costs_of(8, 1024, "bf16")
    demand = Demand(
        states=adam_states(torch.bfloat16),
        accumulate=False,
        gpu_budget_bytes=gpu_gib * GIB,
        cpu_threads=machine.num_cores,
        work=workload_of(costs, machine).layers,
    )
    return layout, costs, machine, demand


def test_what_the_user_pinned_stays() -> None:
    layout, costs, machine, demand = demand_of(8)
    pinned = replace(demand, window=4, prefetch=2, activations="recompute", resident_layers=1)
    rates = rates_of(machine, machine.num_cores)
    plan = fastest_plan(layout, pinned, workload_of(costs, machine), rates).plan
    blocks = layout.streamed
    assert (plan.window, plan.prefetch) == (4, 2)
    assert {plan.activations[index] for index in blocks} == {"recompute"}
    assert plan.resident & set(blocks) == {blocks[0]}


def test_a_refusal_names_the_smallest_budget_that_fits() -> None:
    layout, costs, machine, demand = demand_of(8)
    workload, rates = workload_of(costs, machine), rates_of(machine, machine.num_cores)

    def plan_with(budget: int) -> Plan:
        wish = replace(demand, gpu_budget_bytes=budget)
        return fastest_plan(layout, wish, workload, rates).plan

    with pytest.raises(BudgetError) as refused:
        plan_with(1 << 20)
    need = refused.value.need_bytes
    assert need is not None
    assert named_size(str(refused.value), "raise gpu_memory to at least") >= need
    plan = plan_with(need)
    assert plan.gpu_total_bytes + plan.activation_bytes <= need
    with pytest.raises(BudgetError):
        plan_with(need - 1)


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    for last in (0, 1, 2, 3, 7, 8, 100):
        assert largest_micro_batch(lambda batch, last=last: batch <= last) == last
    assert largest_micro_batch(lambda batch: True, limit=64) == 64


def test_a_model_that_fits_whole_stays_whole() -> None:
    layout, costs, machine, demand = demand_of(200)
    workload, rates = workload_of(costs, machine), rates_of(machine, machine.num_cores)
    choice = fastest_plan(layout, demand, workload, rates)
    assert choice.plan.whole
    compute_s = sum(load.forward_s + load.backward_s for load in workload.layers)
    adam_s = 26 * layout.num_parameters * 1e-9 / rates.device_gbps
    assert choice.forecast.step_s == pytest.approx(compute_s + adam_s, rel=0.05)
