"""The rules of the plan: what each one decides, and that no plan of their kind is faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import LEVELS, Demand, LayerWork, Workload, spared, workload_of
from stronghold.plan.estimate import estimate
from stronghold.plan.machine import MachineProfile, Rates, rates_of
from stronghold.plan.memory import activation_bytes, levels_of
from stronghold.plan.plan import Plan, make_plan
from stronghold.plan.rules import Choice, fastest_plan, fits, largest_micro_batch
from stronghold.tools.estimate.model import from_sizes
from tests.support.sizes import named_size
from tests.support.states import adam_states

GIB = 1 << 30
NUM_BLOCKS = 12
MACHINE = MachineProfile.load("rtx4090")


class Question(NamedTuple):
    layout: ModelLayout
    demand: Demand
    work: Workload
    rates: Rates

    def choice(self, **demanded: Any) -> Choice:
        return fastest_plan(self.layout, replace(self.demand, **demanded), *self[2:])

    def step_s(self, plan: Plan) -> float:
        return estimate(self.layout, plan, self.work, self.rates).step_s


def question(
    gpu_gib: float, *, batch: int = 8, num_blocks: int = NUM_BLOCKS, **demanded: Any
) -> Question:
    """Blocks of a GPT, sequences of 1024 tokens, a desktop's GPU with this budget. No update is
    early."""
    model = from_sizes(num_blocks, 4096, 32, 32000, 1024)
    work = workload_of(model.costs_of(batch, 1024, "bf16"), MACHINE)
    demand = Demand(
        states=adam_states(torch.bfloat16),
        accumulate=False,
        gpu_budget_bytes=int(gpu_gib * GIB),
        host_budget_bytes=128 * GIB,
        cpu_threads=MACHINE.num_cores,
        work=work.layers,
        early_layers=0,
    )
    demand = replace(demand, **demanded)
    return Question(model.layout, demand, work, rates_of(MACHINE, MACHINE.num_cores))


def gpu_bytes(plan: Plan) -> int:
    return plan.gpu_total_bytes + plan.activation_bytes


def test_what_the_user_pinned_stays() -> None:
    asked = question(8)
    pinned = {"window": 4, "activations": "recompute", "resident_layers": 1}
    plan = asked.choice(**pinned).plan
    blocks = asked.layout.streamed
    assert plan.window == 4
    assert {plan.activations[index] for index in blocks} == {"recompute"}
    assert plan.resident & set(blocks) == {blocks[0]}


@pytest.mark.parametrize("growth", [1.5, 3.0])
@pytest.mark.parametrize("gpu_gib", [16, 20, 24])
def test_a_larger_batch_that_keeps_nothing_has_room(gpu_gib: float, growth: float) -> None:
    asked = question(gpu_gib)
    plan = asked.choice(growth=growth).plan
    larger = tuple(load.grown(growth) for load in asked.work.layers)
    later = activation_bytes(
        asked.layout, spared(plan.activations), replace(asked.demand, work=larger)
    )
    assert max(plan.activation_bytes, later) + plan.gpu_total_bytes <= gpu_gib * GIB
    # where levels are pinned, the larger batch has these
    plan = asked.choice(growth=growth, activations="attention").plan
    later = activation_bytes(asked.layout, plan.activations, replace(asked.demand, work=larger))
    assert later + plan.gpu_total_bytes <= gpu_gib * GIB


def test_a_refusal_names_the_smallest_budget_that_fits() -> None:
    asked = question(8)
    with pytest.raises(BudgetError) as refused:
        asked.choice(gpu_budget_bytes=1 << 20)
    need = refused.value.need_bytes
    assert need is not None
    assert named_size(str(refused.value), "raise gpu_memory to at least") >= need
    assert gpu_bytes(asked.choice(gpu_budget_bytes=need).plan) <= need
    with pytest.raises(BudgetError):
        asked.choice(gpu_budget_bytes=need - 1)
    for budget in (need, need - 1):
        demand = replace(asked.demand, gpu_budget_bytes=budget)
        assert fits(asked.layout, demand) is (budget == need)


def test_a_refusal_names_the_host_where_the_gpu_has_room() -> None:
    """Though a plan that recomputes alone does not fit this GPU."""
    asked = question(8)
    with pytest.raises(BudgetError) as refused:
        asked.choice(gpu_budget_bytes=1 << 20)
    least = refused.value.need_bytes
    with pytest.raises(BudgetError, match="host memory: the plan needs") as short:
        asked.choice(gpu_budget_bytes=least, host_budget_bytes=8 * GIB)
    need = short.value.need_bytes
    assert need is not None
    for budget in (need, need - 1):
        demand = replace(asked.demand, gpu_budget_bytes=least, host_budget_bytes=budget)
        assert fits(asked.layout, demand) is (budget == need)


def test_a_short_host_gets_the_plan_with_the_most_blocks_on_the_gpu() -> None:
    """Also where that number is between two that are tried."""
    asked = question(16, num_blocks=40, activations="recompute", window=1)
    demands = [
        replace(asked.demand, resident_layers=count, resident_updates="gpu") for count in range(41)
    ]
    plans = [made for demand in demands if (made := made_or_none(asked.layout, demand))]
    most = len(plans) - 1
    assert 0 < most < 40
    least = replace(asked.demand, host_budget_bytes=plans[-1].host_total_bytes)
    assert fits(asked.layout, least)
    assert fastest_plan(asked.layout, least, *asked[2:]).plan.demand.resident_layers == most
    too_little = replace(least, host_budget_bytes=plans[-1].host_total_bytes - 1)
    assert not fits(asked.layout, too_little)


def made_or_none(layout: ModelLayout, demand: Demand) -> Plan | None:
    try:
        return make_plan(layout, demand)
    except BudgetError:
        return None


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    for last in (0, 1, 2, 3, 7, 8, 100):
        assert largest_micro_batch(lambda batch, last=last: batch <= last) == last
    assert largest_micro_batch(lambda batch: True, limit=64) == 64


def test_a_model_that_fits_streams_only_what_makes_it_faster() -> None:
    """The host updates the blocks that stream, while the GPU computes."""
    asked = question(200)
    stays: Any = {"resident_layers": NUM_BLOCKS, "resident_updates": "gpu", "activations": "keep"}
    choice, staying = asked.choice(), asked.choice(**stays)
    compute_s = sum(load.forward_s + load.backward_s for load in asked.work.layers)
    adam_s = 26 * asked.layout.num_parameters * 1e-9 / asked.rates.device_gbps
    assert staying.step_s == pytest.approx(compute_s + adam_s, rel=0.05)
    assert compute_s <= choice.step_s <= staying.step_s


# -- slots ----------------------------------------------------------------------------------------
def test_backward_fetches_as_far_ahead_as_forward() -> None:
    """On the emulated device, where compute does not run behind the host. A block computes as long
    as its fetch takes, in backward alone. So the fetches of backward are hidden."""
    asked = question(40)
    block = asked.layout.layers[asked.layout.streamed[0]]
    fetch_s = 1e-9 * block.weight_bytes / asked.rates.fetch_gbps
    load = LayerWork(forward_s=0.0, backward_s=fetch_s)
    idle = LayerWork(forward_s=0.0, backward_s=0.0)
    layers = tuple(load if layer.streamed else idle for layer in asked.layout.layers)
    rates = replace(asked.rates, update_gbps=1e5, memory_gbps=1e6, launch_s=0.0)
    rates = replace(rates, offload_gbps=1e4, duplex_gbps=1e4 + rates.fetch_gbps)
    demand = replace(asked.demand, window=3, resident_layers=0, resident_updates="host")
    plan = make_plan(asked.layout, replace(demand, work=layers, activations="keep"))
    step_s = estimate(asked.layout, plan, Workload(layers=layers), rates, asynchronous=False).step_s
    assert step_s < (2 * NUM_BLOCKS + 3) * fetch_s


def test_there_are_three_slots_where_they_fit() -> None:
    asked = question(8, activations="recompute", resident_layers=0, resident_updates="host")
    three = asked.choice().plan
    assert (three.window, three.gradient_slots) == (3, 2)
    budget = gpu_bytes(three)
    fewer = [(2, 2), (2, 1), (1, 1)]
    for slots in fewer:
        plan = asked.choice(gpu_budget_bytes=budget - 1).plan
        assert (plan.window, plan.gradient_slots) == slots
        budget = gpu_bytes(plan)
    with pytest.raises(BudgetError):
        asked.choice(gpu_budget_bytes=budget - 1)


# -- activations ----------------------------------------------------------------------------------
def test_the_last_blocks_keep_most_and_no_other_can_keep_more() -> None:
    asked = question(8, resident_layers=0, window=3)
    plan = asked.choice().plan
    blocks = asked.layout.streamed
    levels = [plan.activations[index] for index in blocks]
    assert len(set(levels)) > 1
    taken = [asked.work.layers[blocks[0]].waiting_bytes(level) for level in levels]
    moved = [asked.work.layers[blocks[0]].moved_bytes(level) for level in levels]
    on_gpu = [waiting - away for waiting, away in zip(taken, moved, strict=True)]
    assert on_gpu == sorted(on_gpu)
    higher = replace(plan.demand, activations=raised_once(asked.layout, levels))
    with pytest.raises(BudgetError):
        make_plan(asked.layout, higher)


def raised_once(layout: ModelLayout, levels: list[str]) -> tuple[str, ...]:
    """One more block at the last blocks' level."""
    last = levels[-1]
    below = [level for level in levels if level != last]
    counts = {level: below[:-1].count(level) for level in dict.fromkeys(below)}
    return levels_of(layout, counts | {last: len(levels) - len(below) + 1})


# -- early updates --------------------------------------------------------------------------------
FEW = 6  # sequences: updates take longer than forward, and less than forward and backward


def test_backward_takes_the_updates_that_forward_would_wait_for() -> None:
    asked = question(8, batch=FEW)
    behind_gate, early = asked.choice(), asked.choice(early_layers=None)
    assert not behind_gate.plan.early
    assert early.plan.early
    assert early.step_s < 0.95 * behind_gate.step_s
    assert early.forecast.waits["update"] < behind_gate.forecast.waits["update"]


def test_backward_takes_no_more_updates_than_it_has_time_for() -> None:
    asked = question(8, batch=1)
    plan = asked.choice(early_layers=None).plan
    able = len(plan.trained - plan.updated_on_gpu)
    assert 0 < len(plan.early) < able / 2
    with_all = make_plan(asked.layout, replace(plan.demand, early_layers=able))
    assert asked.step_s(plan) < asked.step_s(with_all)


def test_no_update_is_early_where_forward_hides_all() -> None:
    asked = question(20, batch=32)
    rates = replace(asked.rates, update_gbps=1e3, memory_gbps=1e4)
    asked = asked._replace(rates=rates)
    choice = asked.choice(early_layers=None)
    assert choice.plan.window > 0
    assert not choice.plan.early


def test_early_updates_take_only_room_that_nothing_else_needs() -> None:
    asked = question(8, batch=FEW)
    behind_gate = asked.choice().plan
    least = behind_gate.host_total_bytes + behind_gate.offloaded_bytes
    plan = asked.choice(early_layers=None, host_budget_bytes=least + 3 * GIB).plan
    assert 0 < len(plan.early) < len(asked.choice(early_layers=None).plan.early)
    tight = {"early_layers": None, "host_budget_bytes": least, "nvme": True}
    assert not asked.choice(**tight).plan.early
    spilled = asked.choice(**tight | {"host_budget_bytes": least // 2}).plan
    assert any(spilled.nvme_bytes.values())
    assert not spilled.early


def test_several_ranks_update_nothing_early() -> None:
    plan = question(8, batch=FEW, num_ranks=2).choice(early_layers=None).plan
    assert plan.demand.early_layers == 0


# -- the choice -----------------------------------------------------------------------------------
def plans_of_any_kind(asked: Question) -> Iterator[Plan]:
    """Plans with every number of resident blocks, place of updates and window, and with two levels
    of activations, in steps of a quarter of the blocks."""
    levels = [
        levels_of(asked.layout, {below: NUM_BLOCKS - count, level: count})
        for below, level in product(LEVELS, LEVELS)
        if below != level
        for count in range(0, NUM_BLOCKS + 1, 3)
    ]
    for kept in range(0, NUM_BLOCKS + 1, 2):
        for window, updates, activations in product((1, 2, 3, 4, 6), ("host", "gpu"), levels):
            demanded = {"resident_layers": kept, "resident_updates": updates, "window": window}
            try:
                yield make_plan(
                    asked.layout, replace(asked.demand, activations=activations, **demanded)
                )
            except (BudgetError, ConfigError):
                continue


@pytest.mark.parametrize(("gpu_gib", "batch"), [(6, 1), (12, 4), (16, 16), (40, 8)])
@pytest.mark.slow
def test_no_plan_is_much_faster(gpu_gib: int, batch: int) -> None:
    asked = question(gpu_gib, batch=batch)
    chosen_s = asked.choice().step_s
    faster = min(asked.step_s(plan) for plan in plans_of_any_kind(asked))
    assert chosen_s <= 1.02 * faster
