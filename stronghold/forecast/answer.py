"""The answer to a question: plan, simulate, and set it beside the physical limit.

Owns the order of these, and nothing of how each works. Allocates nothing that is of the model's
size. One thread enters.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stronghold.device.contention import Rates
from stronghold.errors import BudgetError, ConfigError
from stronghold.forecast.forecast import Asked, Forecast, Gain, Tier, Timing
from stronghold.forecast.page import seconds
from stronghold.forecast.question import Question
from stronghold.memory.tiers import LOW_DTYPE
from stronghold.model.costs import DTYPES, LayerCost, ModelCosts
from stronghold.plan import search
from stronghold.plan.bounds import backward_s, updates_s
from stronghold.plan.limits import DISK, Limits, StepLoad, break_even, physical_limit
from stronghold.plan.planner import Demand, Gradients, Plan
from stronghold.plan.profile import NETWORK_GBPS, MachineProfile
from stronghold.plan.search import Choice
from stronghold.simulate import (
    Prediction,
    Workload,
    fastest_plan,
    lanes_of,
    rates_of,
    workload_of,
)

GIB = 1 << 30
WAITS = 0.05  # share of a step from which on what it waits for is named
# A lane of the simulator by the resource that it waits for.
RESOURCES = {
    "compute": "compute",
    "fetch": "link host to device",
    "drain": "link device to host",
    "update": "host memory bandwidth",
    "load": "nvme",
    "stage": "nvme",
    "spill": "nvme",
    "io": "nvme",
    "gather": "wire between ranks",
    "reduce": "wire between ranks",
    "exchange": "network between nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What one question comes to, without what a change would buy: a plan and its timing, or why
    there is none."""

    choice: Choice | None
    timing: Timing | None
    refusal: str | None
    limits: Limits


def answer(question: Question) -> Forecast:
    """The whole forecast; ConfigError for what no planner could be asked."""
    found = outlook(question)
    sizes = question.subject.layout
    plan = None if found.choice is None else found.choice.plan
    return Forecast(
        asked=Asked(
            model=question.subject.name,
            num_parameters=sizes.num_parameters,
            num_blocks=question.subject.num_blocks,
            machine=question.machine.name,
            dtype=question.dtype,
            batch=question.batch,
            seq=question.seq,
            accumulation=question.accumulation,
            clipping=question.clipping,
            gpus=question.gpus,
            nodes=question.nodes,
        ),
        refusal=found.refusal,
        notes=(*_notes(question), *_gate(question, found)),
        tiers=() if plan is None else _tiers(question, plan),
        reasons=() if plan is None else plan.reasons,
        timing=found.timing,
        limits=found.limits,
        break_even=break_even(
            question.machine, question.dtype, recompute=plan is None or plan.recomputed > 0.5
        ),
        gains=tuple(_gains(question, found)),
        config=None if plan is None else config_of(question, plan),
    )


def outlook(question: Question) -> Outlook:
    """The fastest plan, or why none fits."""
    costs = question.subject.costs_of(question.batch, question.seq, question.dtype)
    try:
        choice = _fastest(question, _demand(question, costs))
    except BudgetError as error:
        limits = physical_limit(_load(question, costs, None), _share(question))
        return Outlook(choice=None, timing=None, refusal=str(error), limits=limits)
    limits = physical_limit(_load(question, costs, choice.plan), _share(question))
    return Outlook(
        choice=choice, timing=_timing(question, choice, limits), refusal=None, limits=limits
    )


def fits(question: Question) -> bool:
    """Whether anything fits."""
    costs = question.subject.costs_of(question.batch, question.seq, question.dtype)
    return search.fits(question.layout, _demand(question, costs))


def with_largest_batch(question: Question) -> Question:
    """The question with the largest micro-batch that fits, or as it is when not even one does."""
    largest = search.largest_micro_batch(lambda batch: fits(replace(question, batch=batch)))
    return replace(question, batch=max(1, largest))


def _fastest(question: Question, demand: Demand) -> Choice:
    work, rates = _work_and_rates(question, demand)
    return fastest_plan(question.layout, demand, work, rates, dtype=DTYPES[question.dtype])


def _work_and_rates(question: Question, demand: Demand) -> tuple[Workload, Rates]:
    machine = question.machine
    costs = question.subject.costs_of(question.batch, question.seq, question.dtype)
    rates = rates_of(
        machine,
        demand.cpu_threads or demand.num_cores,
        sharing=question.gpus,
        num_nodes=question.nodes,
        wire_gbps=question.wire_gbps,
        network_gbps=question.network_gbps,
    )
    return workload_of(costs, machine, micro_batches=question.accumulation), rates


def _demand(question: Question, costs: ModelCosts) -> Demand:
    dtype = DTYPES[question.dtype]
    low = LOW_DTYPE[dtype]
    return Demand(
        weight_bytes=dtype.itemsize,
        low_bytes=low.itemsize if low is not None else 0,
        gated=question.clipping > 0.0 or question.overflow_check,
        accumulate=question.accumulation > 1,
        gpu_budget_bytes=question.gpu_bytes,
        host_budget_bytes=question.host_bytes // question.gpus,
        window=question.window,
        resident_layers=question.resident_layers,
        saved_bytes=tuple(_at_once(layer) for layer in costs.layers),
        boundary_bytes=tuple(layer.boundary_bytes for layer in costs.layers),
        # One launches the GPU's work.
        num_cores=max(1, question.machine.num_cores // question.gpus - 1),
        num_ranks=question.ranks,
        num_nodes=question.nodes,
        resident_updates="host" if question.ranks > 1 else None,
        nvme=question.nvme_bytes > 0,
        nvme_capacity_bytes=question.nvme_bytes // question.gpus or None,
        micro_batches=question.accumulation,
    )


def _share(question: Question) -> MachineProfile:
    """The machine as one of its ranks has it: a GPU and a link, and a part of the bandwidth of
    memory and disks."""
    machine, gpus = question.machine, question.gpus
    if gpus == 1:
        return machine
    disk = (machine.nvme_read_gbps, machine.nvme_write_gbps, machine.nvme_mixed_gbps)
    read, write, mixed = (rate / gpus if rate is not None else None for rate in disk)
    return replace(
        machine,
        memory_gbps={threads: rate / gpus for threads, rate in machine.memory_gbps.items()},
        nvme_read_gbps=read,
        nvme_write_gbps=write,
        nvme_mixed_gbps=mixed,
    )


def _at_once(layer: LayerCost) -> int:
    """What a layer keeps; of one outside the blocks, such as the head, also what it has in passing,
    for that is there while everything else is kept."""
    return layer.saved_bytes + (0 if layer.boundary_bytes else layer.passing_bytes)


def _timing(question: Question, choice: Choice, limits: Limits) -> Timing:
    prediction = choice.forecast
    assert isinstance(prediction, Prediction)
    shares: defaultdict[str, float] = defaultdict(float)
    for lane, critical_s in prediction.critical.items():
        shares[RESOURCES.get(lane, lane)] += critical_s / prediction.step_s
    # Loads and spills that overlap share a disk in the simulator by a rule that is a few per cent
    # generous: no step is faster than the disk.
    step_s = max(prediction.step_s, limits.parts[DISK])
    return Timing(
        step_s=step_s,
        tokens_per_s=question.tokens / step_s,
        shares=dict(sorted(shares.items(), key=lambda share: -share[1])),
        busy=dict(prediction.busy),
    )


def _load(question: Question, costs: ModelCosts, plan: Plan | None) -> StepLoad:
    """What `plan` must move and compute on each rank; without one, what the least memory would
    need: every block streamed and recomputed."""
    layers, ranks = question.subject.layout.layers, question.ranks
    blocks = [layer for layer in layers if layer.streamed]
    streamed = [layer for layer in blocks if plan is None or layer.index not in plan.resident]
    away = {layer.index for layer in streamed}
    at_home = frozenset() if plan is None else plan.updated_on_gpu
    staying = [layer for layer in layers if layer.index not in away | at_home]
    policies = ["recompute" if plan is None else plan.activations[b.index] for b in blocks]

    def of_policy(policy: str) -> list[LayerCost]:
        return [
            costs.layers[b.index] for b, of in zip(blocks, policies, strict=True) if of == policy
        ]

    of_node = question.gpus  # who divide the weights
    largest = sorted((layer.num_parameters // of_node for layer in streamed), reverse=True)
    return StepLoad(
        dtype=question.dtype,
        forward_flops=costs.forward_flops,
        recomputed_flops=sum(layer.forward_flops for layer in of_policy("recompute")),
        micro_batches=question.accumulation,
        streamed_parameters=sum(largest),
        window_parameters=0 if plan is None else sum(largest[: plan.window]),
        trained_parameters=sum(layer.num_trainable for layer in streamed) // ranks,
        refreshed_parameters=sum(layer.num_trainable for layer in staying) // ranks,
        layer_parameters=next(iter(largest), 0),
        staying_flops=sum(
            costs.layers[i].forward_flops for i in range(len(layers)) if i not in away
        ),
        offloaded_bytes=sum(layer.saved_bytes for layer in of_policy("offload")),
        nvme_read_bytes=0 if plan is None else plan.nvme_read_bytes,
        nvme_write_bytes=0 if plan is None else plan.nvme_written_bytes,
    )


def _tiers(question: Question, plan: Plan) -> tuple[Tier, ...]:
    tiers = [
        Tier(
            name="gpu",
            budget_bytes=question.gpu_bytes,
            parts=plan.gpu_bytes | {"activations": plan.activation_bytes},
        ),
        Tier(
            name="host",
            budget_bytes=question.host_bytes // question.gpus,
            parts=dict(plan.host_bytes),
        ),
    ]
    if question.nvme_bytes:
        share = question.nvme_bytes // question.gpus
        tiers.append(Tier(name="nvme", budget_bytes=share, parts=dict(plan.nvme_bytes)))
    return tuple(tiers)


def _notes(question: Question) -> list[str]:
    notes = []
    if question.ranks > 1:
        notes.append(_wires(question))
    positions = question.subject.positions
    if positions is not None and question.seq > positions:
        notes.append(
            f"--seq {question.seq} is longer than the {positions} positions that the model knows"
        )
    return notes


def _wires(question: Question) -> str:
    where = f"on {question.nodes} nodes" if question.nodes > 1 else "on one node"
    received = []
    if question.gpus > 1:
        wire = question.wire_gbps or question.machine.fetch_gbps
        assumed = "" if question.wire_gbps else ", assumed: as over its link"
        others = "its node" if question.nodes > 1 else "the others"
        received.append(f"{wire:g} GB/s from {others} (--wire{assumed})")
    if question.nodes > 1:
        network = question.network_gbps or NETWORK_GBPS
        assumed = "" if question.network_gbps else ", assumed"
        received.append(f"{network:g} GB/s from other nodes (--network{assumed})")
    return (
        f"{question.ranks} ranks {where}: bytes are of each, tokens of all; each receives "
        f"{' and '.join(received)}"
    )


def _gate(question: Question, found: Outlook) -> Iterator[str]:
    """What it costs that updates wait for the end of backward, where the step waits for them."""
    choice, timing = found.choice, found.timing
    if choice is None or timing is None or choice.plan.gradients is Gradients.RING:
        return
    waits = sum(timing.shares.get(RESOURCES[lane], 0.0) for lane in ("update", "load"))
    lanes = lanes_of(*_work_and_rates(question, choice.demand), DTYPES[question.dtype])
    forward, backward = sum(lanes.forward_s), backward_s(choice.plan, lanes)
    updates = updates_s(question.layout, choice.plan, lanes)
    if waits < WAITS or updates <= forward:
        return
    why = "clipping" if question.clipping else "the overflow check"
    others = "the other micro-batches, " if question.accumulation > 1 else ""
    yield (
        f"updates wait for the end of backward, since {why} decides over every gradient, and the "
        f"step waits for them: it takes {others}backward ({seconds(backward)}) and then the longer "
        f"of forward ({seconds(forward)}) and updates ({seconds(updates)})"
    )


# -- what a change would buy ----------------------------------------------------------------------


def _changes(question: Question) -> list[tuple[str, Question]]:
    more = [
        ("1 GiB more on the gpu", replace(question, gpu_bytes=question.gpu_bytes + GIB)),
        ("1 GiB more of host memory", replace(question, host_bytes=question.host_bytes + GIB)),
    ]
    if question.nvme_bytes:
        more.append(("1 GiB more of nvme", replace(question, nvme_bytes=question.nvme_bytes + GIB)))
    twice = f"twice the tokens: batch {2 * question.batch}"
    return [*more, (twice, replace(question, batch=2 * question.batch))]


def _gains(question: Question, found: Outlook) -> Iterator[Gain]:
    """Every change's gain; where nothing fits, of those changes alone that help."""
    for change, asked in _changes(question):
        if found.choice is None:
            timing = outlook(asked).timing
            if timing is None:
                continue
        else:
            timing = _near(asked, found.choice)
            if found.timing is not None and timing is not None and asked.tokens == question.tokens:
                # More memory takes nothing away: the plan without it still fits.
                timing = min(timing, found.timing, key=lambda timing: timing.step_s)
        yield Gain(
            change=change,
            step_s=None if timing is None else timing.step_s,
            tokens_per_s=None if timing is None else timing.tokens_per_s,
        )


def _near(question: Question, choice: Choice) -> Timing | None:
    """The fastest of the plans near `choice` under another question: its window and its number of
    resident blocks, or of either what a GiB holds more, with whatever activations then fit. None
    where not one of them fits, nor any other plan."""
    costs = question.subject.costs_of(question.batch, question.seq, question.dtype)
    demand = _demand(question, costs)
    sizes = question.layout
    blocks = set(sizes.streamed)
    kept, window = len(choice.plan.resident & blocks), choice.plan.window
    held = max(1, GIB // max(1, sizes.max_numel * demand.weight_bytes))
    near = [(kept, window), (kept + held, window), (kept, window + held), (kept - 1, window)]
    found = []
    for resident, slots in near:
        resident = min(resident, len(blocks))
        slots = max(1, min(slots, len(blocks) - resident))
        if resident < 0:
            continue
        pinned = replace(demand, resident_layers=resident, window=demand.window or slots)
        with contextlib.suppress(ConfigError):
            choice = _fastest(question, pinned)
            load = _load(question, costs, choice.plan)
            found.append(_timing(question, choice, physical_limit(load, _share(question))))
    if not found:
        return outlook(question).timing
    return min(found, key=lambda timing: timing.step_s)


# -- the config -----------------------------------------------------------------------------------


def config_of(question: Question, plan: Plan) -> dict[str, Any]:
    """A config that runs `plan`: for `stronghold.initialize`, DeepSpeed's launcher or a trainer."""
    blocks = question.subject.layout.streamed
    kept = len(plan.resident.intersection(blocks))
    section: dict[str, Any] = {
        "gpu_memory": question.gpu_bytes - plan.activation_bytes,  # which the key does not count
        "host_memory": question.host_bytes // question.gpus,
        "resident_layers": "all" if kept == len(blocks) else kept,
        "resident_updates": "gpu" if plan.updated_on_gpu else "host",
    }
    if kept < len(blocks):
        section |= {"window": plan.window, "prefetch": plan.prefetch}
    policies = [plan.activations[index] for index in blocks]
    section["activations"] = policies[0] if policies else "keep"
    if 0 < policies.count("keep") < len(policies):
        section["kept_activations"] = policies.count("keep")  # the search keeps the last blocks'
    if plan.gradients is Gradients.RING:
        section["deferred_layers"] = len(plan.deferred)
    if plan.nvme_bytes:
        section["nvme"] = {"path": question.nvme_path, "capacity": question.nvme_bytes}
    config: dict[str, Any] = {
        "_plan": f"stronghold plan: {question.subject.name}; {question.machine.name}; "
        f"{question.seq} tokens per sequence",
        "train_micro_batch_size_per_gpu": question.batch,
        "gradient_accumulation_steps": question.accumulation,
        "gradient_clipping": question.clipping,
    }
    if question.dtype != "fp32":
        checked = {} if question.overflow_check else {"check_grad_overflow": False}
        config[question.dtype] = {"enabled": True, **checked}
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    }
    return config | {"stronghold": section}
