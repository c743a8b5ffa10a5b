"""The search's choice is the best, or nearly, of all that fit; and what cannot fit is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from typing import NamedTuple

import pytest
import torch

from stronghold.errors import BudgetError
from stronghold.model.costs import ModelCosts
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import LEVELS, Demand, workload_of
from stronghold.plan.machine import MachineProfile, rates_of
from stronghold.plan.places import levels_of
from stronghold.plan.plan import Plan, make_plan
from stronghold.plan.search import largest_micro_batch, lower_bound
from stronghold.predict.simulate import fastest_plan, simulate
from stronghold.tools.estimate.model import from_sizes
from tests.support.sizes import named_size
from tests.support.states import adam_states

GIB = 1 << 30
NEAR = 1.02
# The first blocks with what takes the GPU least: their activations wait the longest.
BY_ROOM = ["recompute_offload", "attention_offload", "offload", "recompute", "attention", "keep"]


class Pair(NamedTuple):
    """A machine, a model (layers, hidden, heads, vocabulary), its tokens, and the GPU's budget."""

    machine: str
    shape: tuple[int, int, int, int]
    batch: int
    seq: int
    gpu_gib: float


# Large layers, few of them: an exhaustive sweep takes seconds.
PAIRS = [
    Pair("rtx4090", (12, 4096, 32, 32000), 8, 1024, 8),
    Pair("rtx4090", (12, 4096, 32, 32000), 1, 512, 8),
    Pair("rtx3090", (10, 5120, 40, 32000), 16, 1024, 14),
    Pair("v100-32gb", (12, 2048, 16, 50304), 4, 1024, 5),
    Pair("a100-80gb", (8, 8192, 64, 32000), 4, 4096, 30),
    Pair("a100-80gb", (12, 4096, 32, 128256), 2, 1024, 20),
    Pair("h100-80gb", (10, 8192, 64, 128256), 8, 4096, 60),
    Pair("h100-80gb", (12, 5120, 40, 32000), 1, 2048, 16),
    Pair("h200", (8, 8192, 64, 32000), 1, 1024, 40),
    Pair("h200", (10, 8192, 64, 128256), 16, 2048, 100),
]


def demand_of(pair: Pair) -> tuple[ModelLayout, ModelCosts, MachineProfile, Demand]:
    machine = MachineProfile.load(pair.machine)
    model = from_sizes(*pair.shape, pair.seq)
    layout, costs = model.layout, model.costs_of(pair.batch, pair.seq, "bf16")
    demand = Demand(
        states=adam_states(torch.bfloat16),
        accumulate=False,
        gpu_budget_bytes=int(pair.gpu_gib * GIB),
        cpu_threads=machine.num_cores,
        work=workload_of(costs, machine).layers,
    )
    return layout, costs, machine, demand


def mixes(num_blocks: int, steps: int) -> Iterator[dict[str, int]]:
    """Every division of the blocks among all levels, in so many equal shares."""
    for bars in combinations_with_replacement(range(steps + 1), len(LEVELS) - 1):
        edges = [round(num_blocks * edge / steps) for edge in (0, *bars, steps)]
        shares = [high - low for low, high in pairwise(edges)]
        yield {level: share for level, share in zip(BY_ROOM, shares, strict=True) if share}


def sweep(
    pair: Pair, *, residents: list[int], windows: list[int], steps: int
) -> tuple[float, float, int]:
    """Seconds of a step: the search's choice, and the best of all levels, and of these windows and
    shares of resident blocks, that fit; and how many could have been better by their bound."""
    layout, costs, machine, demand = demand_of(pair)
    workload = workload_of(costs, machine)
    rates = rates_of(machine, demand.cpu_threads or 1)
    chosen_s = fastest_plan(layout, demand, workload, rates).forecast.step_s
    best, count, num_blocks = float("inf"), 0, len(layout.streamed)
    every = [levels_of(layout, mix) for mix in mixes(num_blocks, steps)]
    for resident, updates, window, levels in product(residents, ("host", "gpu"), windows, every):
        if window > max(1, num_blocks - resident):
            continue
        wish = replace(
            demand,
            resident_layers=resident,
            resident_updates=updates,
            window=window,
            activations=levels,
        )
        try:
            plan = make_plan(layout, wish)
        except BudgetError:
            continue
        count += 1
        bound_s = lower_bound(layout, plan, workload, rates)
        if bound_s >= min(best, chosen_s):
            best = min(best, bound_s)  # it cannot be better
            continue
        step_s = simulate(layout, plan, workload, rates).step_s
        assert step_s >= bound_s * (1 - 1e-9)
        best = min(best, step_s)
    return chosen_s, best, count


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_no_step_is_shorter_than_its_bound(pair: Pair) -> None:
    layout, costs, machine, demand = demand_of(pair)
    workload, rates = workload_of(costs, machine), rates_of(machine, machine.num_cores)
    num_blocks, count = len(layout.streamed), 0
    for updates, window, mix in product(("host", "gpu"), (2, num_blocks), mixes(num_blocks, 2)):
        levels = levels_of(layout, mix)
        wish = replace(
            demand, resident_layers=0, resident_updates=updates, window=window, activations=levels
        )
        try:
            plan = make_plan(layout, wish)
        except BudgetError:
            continue
        count += 1
        if count % 8 == 1:
            step_s = simulate(layout, plan, workload, rates).step_s
            assert step_s >= (1 - 1e-9) * lower_bound(layout, plan, workload, rates)
    assert count > 0


@pytest.mark.slow
def test_the_choice_is_within_two_per_cent_of_a_sweep_of_all_levels() -> None:
    chosen, best, count = sweep(PAIRS[2], residents=[0, 4], windows=[2, 4], steps=3)
    assert count > 0
    assert chosen <= NEAR * best, f"{chosen} s against {best} s, of {count} plans"


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_choice_is_within_two_per_cent_on_every_machine(pair: Pair) -> None:
    num_blocks = pair.shape[0]
    every = list(range(num_blocks + 1))
    chosen, best, count = sweep(pair, residents=every[::2], windows=[1, 2, 3, 4, 6, 8], steps=4)
    assert count > 0
    assert chosen <= NEAR * best, f"{chosen} s against {best} s, of {count} plans"


def test_what_the_user_pinned_stays() -> None:
    layout, costs, machine, demand = demand_of(PAIRS[0])
    pinned = replace(demand, window=4, prefetch=2, activations="recompute", resident_layers=1)
    rates = rates_of(machine, machine.num_cores)
    plan = fastest_plan(layout, pinned, workload_of(costs, machine), rates).plan
    blocks = layout.streamed
    assert (plan.window, plan.prefetch) == (4, 2)
    assert {plan.activations[index] for index in blocks} == {"recompute"}
    assert plan.resident & set(blocks) == {blocks[0]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", PAIRS[:3], ids=str)
def test_a_refusal_names_the_smallest_budget_that_fits(pair: Pair) -> None:
    layout, costs, machine, demand = demand_of(pair)
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
    layout, costs, machine, demand = demand_of(PAIRS[3]._replace(gpu_gib=30))
    workload, rates = workload_of(costs, machine), rates_of(machine, machine.num_cores)
    choice = fastest_plan(layout, demand, workload, rates)
    assert choice.plan.whole
    compute_s = sum(load.forward_s + load.backward_s for load in workload.layers)
    adam_s = 26 * layout.num_parameters * 1e-9 / rates.device_gbps
    assert choice.forecast.step_s == pytest.approx(compute_s + adam_s, rel=0.05)


def test_launching_a_block_again_is_the_hosts_time() -> None:
    """Lanes are fast and compute takes nothing: a step takes what the calling thread does."""
    layout, costs, machine, demand = demand_of(PAIRS[0])
    free = workload_of(costs, machine)
    layers = tuple(replace(load, forward_s=0.0, backward_s=0.0) for load in free.layers)
    lanes = ("fetch", "offload", "duplex", "update", "memory", "device", "load", "spill", "io")
    fast = {f"{lane}_gbps": 1e9 for lane in lanes}
    rates = replace(rates_of(machine, 1), handover_s=0.0, **fast)
    assert rates.launch_s > rates.whole_launch_s > 0.0

    def step_s(**wish: object) -> float:
        wanted = replace(demand, gpu_budget_bytes=None, **wish)
        work = replace(free, layers=layers)
        plan = make_plan(layout, wanted)
        return simulate(layout, plan, work, rates).step_s

    keep, again = step_s(activations="keep"), step_s(activations="recompute")
    blocks, all_layers = len(layout.streamed), len(layout.layers)
    assert keep == pytest.approx(2 * all_layers * rates.launch_s, rel=0.01)
    assert again - keep == pytest.approx(blocks * rates.recompute_launch_s, rel=0.01)
    whole = step_s(resident_layers=blocks, resident_updates="gpu", activations="keep")
    # The norm is one launch for all layers, and so is the update.
    expected = 2 * all_layers * rates.whole_launch_s + 2 * rates.launch_s
    assert whole == pytest.approx(expected, rel=0.01)
