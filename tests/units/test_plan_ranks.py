"""Plans of several ranks: bytes of each, and a step that a wire of a known rate bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stronghold.errors import BudgetError, ConfigError
from stronghold.optim import DEFAULT
from stronghold.optim.states import EXACT, PAGE_BYTES
from stronghold.plan.cost import Demand, workload_of
from stronghold.plan.estimate import StepEstimate, estimate
from stronghold.plan.machine import MachineProfile, rates_of
from stronghold.plan.plan import Plan, make_plan
from stronghold.tools.cli import main
from stronghold.tools.estimate.model import from_sizes
from tests.support.states import adam_states

SUBJECT = from_sizes(12, 2048, 16, 32000, 1024)
LAYOUT = SUBJECT.laid_out(DEFAULT, torch.bfloat16, EXACT)
MACHINE = MachineProfile.load("a100-80gb")


def predict(
    num_ranks: int,
    *,
    num_nodes: int = 1,
    reduce_gbps: float | None = None,
    network_gbps: float | None = None,
    window: int = 4,
    **more: Any,
) -> StepEstimate:
    sharing = num_ranks // num_nodes
    rates = rates_of(
        MACHINE,
        MACHINE.num_cores // sharing,
        sharing=sharing,
        num_nodes=num_nodes,
        network_gbps=network_gbps,
    )
    return estimate(
        LAYOUT,
        plan_of(num_ranks, window, num_nodes, **more),
        workload_of(SUBJECT.costs_of(8, 1024, "bf16"), MACHINE),
        replace(rates, reduce_gbps=reduce_gbps or rates.reduce_gbps),
    )


def plan_of(
    num_ranks: int,
    window: int = 4,
    num_nodes: int = 1,
    *,
    spill: str | None = None,
    early_layers: int | None = None,
) -> Plan:
    demand = Demand(
        states=adam_states(torch.bfloat16),
        accumulate=False,
        window=window,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        nvme=spill is not None,
        spill=spill,
        early_layers=early_layers,
    )
    return make_plan(LAYOUT, demand)


def most_owned(num_ranks: int) -> int:
    """Elements of the layers of the rank that has the most: the largest first, each to the rank
    with the fewest."""
    loads = [0] * num_ranks
    for numel in sorted((layer.trained_numel for layer in LAYOUT.layers), reverse=True):
        loads[loads.index(min(loads))] += numel
    return max(loads)


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes"), [(2, 1), (4, 1), (8, 1), (2, 2), (8, 2), (32, 4)]
)
def test_ranks_share_the_bytes_of_the_host(num_ranks: int, num_nodes: int) -> None:
    """2 bytes of weights for those of a node, and 12 for a layer's owner. None is early."""
    plan = plan_of(num_ranks, 4, num_nodes)
    weights = sum(-(-layer.weight_bytes // PAGE_BYTES) * PAGE_BYTES for layer in LAYOUT.layers)
    of_node = (weights + PAGE_BYTES) // (num_ranks // num_nodes)  # a page of counters
    assert plan.host_total_bytes == of_node + 12 * most_owned(num_ranks)
    early = plan_of(num_ranks, 4, num_nodes, early_layers=6)
    assert (early.host_total_bytes, early.early) == (plan.host_total_bytes, frozenset())


def test_updates_of_several_ranks_wait_for_the_clip_barrier() -> None:
    demand = Demand(states=adam_states(torch.bfloat16), accumulate=False, early_layers=4)
    assert len(make_plan(LAYOUT, demand).early) == 4
    plan = make_plan(LAYOUT, replace(demand, num_ranks=2))
    assert not plan.early
    assert plan.trained == set(range(len(LAYOUT.layers)))


@pytest.mark.parametrize("spill", ["moments", "masters"])
def test_ranks_of_one_node_divide_its_disks(spill: str) -> None:
    """Bytes of the plan, those of the rank with the most in files, and a step at the disks'
    rates."""
    alone = predict(1, spill=spill)
    files = plan_of(1, spill=spill).nvme_total_bytes
    all_owned = most_owned(1)
    for num_ranks in (2, 8):
        plan = plan_of(num_ranks, spill=spill)
        prediction = predict(num_ranks, reduce_gbps=200.0, spill=spill)
        share = most_owned(num_ranks) / all_owned
        assert plan.nvme_total_bytes == pytest.approx(files * share, rel=1e-3)
        read, written = plan.traffic.nvme_read_bytes, plan.traffic.nvme_written_bytes
        assert read == written == pytest.approx(files * share, rel=1e-3)
        assert prediction.step_s == pytest.approx(alone.step_s * share * num_ranks, rel=0.1)
        assert prediction.bound in ("load", "spill")


def test_several_ranks_keep_their_weights_in_memory() -> None:
    with pytest.raises(ConfigError, match=r"nvme\.spill"):
        plan_of(2, spill="weights")
    demand = Demand(
        states=adam_states(torch.bfloat16),
        accumulate=False,
        nvme=True,
        host_budget_bytes=1,
        num_ranks=2,
    )
    with pytest.raises(BudgetError) as refused:
        make_plan(LAYOUT, demand)
    kept = str(refused.value).split("(")[1]
    assert kept.startswith("weights ")
    assert "moments" not in kept


def test_a_slow_wire_sets_the_step() -> None:
    """All gradients cross it once."""
    reduce_gbps, num_ranks = 0.5, 4
    prediction = predict(num_ranks, reduce_gbps=reduce_gbps, window=2)
    nbytes = 2 * sum(layer.num_trained for layer in LAYOUT.layers)
    assert prediction.bound == "reduce"
    assert prediction.step_s >= 0.9 * nbytes / (reduce_gbps * 1e9)


def test_the_exchange_takes_the_networks_time() -> None:
    """Each rank receives its part of a node's weights once, but for its own range; a network that
    is slow enough sets the step, with the gradients' way before it."""
    network_gbps, num_ranks, num_nodes = 0.25, 4, 2
    prediction = predict(num_ranks, num_nodes=num_nodes, network_gbps=network_gbps)
    numel = sum(layer.num_trained for layer in LAYOUT.layers)
    exchange_s = numel * 2 / num_nodes * (num_nodes - 1) / num_nodes / (network_gbps * 1e9)
    assert prediction.busy["exchange"] * prediction.step_s == pytest.approx(exchange_s, rel=1e-3)
    assert prediction.step_s >= 2 * exchange_s
    assert prediction.bound in ("reduce", "exchange")


def test_the_command_plans_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank's share of the host's memory, and the samples of all."""
    command = "plan --layers 4 --hidden 1024 --heads 16 --vocab 32000 --machine rtx4090 --seq 1024"
    for options, samples, share in (
        ("--gpus 4", "x 4 ranks = 4,096 tokens", "of 4.00 GiB"),
        ("--gpus 2 --nodes 2 --network 5", "x 2 ranks x 2 nodes = 4,096 tokens", "of 8.00 GiB"),
    ):
        assert main([*command.split(), "--host", "16GiB", *options.split()]) in (None, 0)
        page = capsys.readouterr().out
        assert samples in page
        assert share in page
    assert main([*command.split(), "--gpus", "0"]) not in (None, 0)
    assert "--gpus: got 0" in capsys.readouterr().err


def test_weights_that_ranks_share_never_spill_by_themselves() -> None:
    demand = Demand(states=adam_states(torch.bfloat16), accumulate=False, window=4, nvme=True)
    for num_ranks in (1, 2):
        of_ranks = replace(demand, num_ranks=num_ranks)
        least = make_plan(LAYOUT, replace(of_ranks, spill="masters")).host_total_bytes
        short = replace(of_ranks, host_budget_bytes=least - 1)
        if num_ranks == 1:
            assert any("weights" in arrays for arrays in make_plan(LAYOUT, short).in_files)
        else:
            with pytest.raises(BudgetError, match="host memory: the plan needs"):
                make_plan(LAYOUT, short)
