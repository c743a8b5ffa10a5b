"""Advice beside an estimate: warnings, and the gain of more memory or more tokens.

Owns the changes that are tried, and the words of the warnings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from stronghold.errors import format_size
from stronghold.model.packed_formats import FORMATS, PackedFormat
from stronghold.optim.states import EXACT, LEAN
from stronghold.plan.cost import disk_s
from stronghold.plan.estimate import estimate as estimate_step
from stronghold.plan.host_memory import SECOND_ARRAYS
from stronghold.plan.machine import NETWORK_GBPS, Rates
from stronghold.plan.plan import Plan, make_plan
from stronghold.tools.estimate.estimate import RESOURCES, Estimate, estimate, seconds
from stronghold.tools.estimate.question import Question

GIB = 1 << 30
WAITS = 0.05  # the least share of a step for a warning that the step waits


def with_advice(bare: Estimate) -> Estimate:
    """Return the estimate with its notes and gains."""
    notes = (*_notes(bare.question), *_gate(bare), *_early(bare))
    return replace(bare, notes=notes, gains=tuple(_gains(bare)))


# -- notes ----------------------------------------------------------------------------------------
def _notes(question: Question) -> Iterator[str]:
    if not question.model.num_blocks:
        without = "" if question.chunk is None else "; --chunk has no effect"
        yield f"the model has no repeated blocks: all of it stays on the gpu{without}"
    if question.ranks > 1:
        yield _wires(question)
    positions = question.model.positions
    if positions is not None and question.seq > positions:
        yield f"--seq {question.seq} is longer than the {positions} positions that the model knows"


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


def _early(bare: Estimate) -> Iterator[str]:
    """A note on early updates: their memory, their gain, and the cost of a clipped step."""
    question, choice = bare.question, bare.choice
    if choice is None or not choice.plan.early:
        return
    without = make_plan(question.layout, replace(choice.plan.demand, early_layers=0))
    behind_gate = estimate_step(
        question.layout,
        without,
        question.work,
        question.rates,
        asynchronous=not question.machine.emulated,
    )
    second_bytes = choice.plan.host_bytes[SECOND_ARRAYS]
    yield (
        f"{len(choice.plan.early)} layers are updated early, which takes "
        f"{format_size(second_bytes)} of host memory: without them, and in a step that is "
        f"clipped, a step takes {seconds(behind_gate.step_s)} instead of "
        f"{seconds(choice.step_s)}"
    )


def _gate(bare: Estimate) -> Iterator[str]:
    """A note on updates that wait for the end of backward, if the step waits for them."""
    question, plan = bare.question, bare.plan
    if plan is None or plan.early:  # `_early` has what these cost
        return
    waits = sum(bare.shares.get(RESOURCES[lane], 0.0) for lane in ("update", "load"))
    work = question.work
    forward, updates = work.forward_s, max(_updates_s(plan, question.rates))
    if waits < WAITS or updates <= forward:
        return
    ways = ""
    if question.clipping or question.overflow_check:
        rule = "clipping" if question.clipping else "the overflow check"
        why = f"{rule} decides over every gradient"
        if question.clipping and question.early_layers is None:
            ways = "; --early N begins N of them in backward: that takes RAM, and a clipped step "
            ways += "gains nothing"
    elif question.accumulation > 1:
        why = "gradients are summed over micro-batches"
    elif question.ranks > 1:
        why = "several ranks make them together"
    else:
        why = "no more layers are updated early (stronghold.early_layers)"
    others = "the other micro-batches, " if question.accumulation > 1 else ""
    backward = seconds(work.backward_s(plan.activations))
    yield (
        f"updates wait for the end of backward, since {why}, and the step waits for them: it takes "
        f"{others}backward ({backward}) and then the longer of "
        f"forward ({seconds(forward)}) and updates ({seconds(updates)}){ways}"
    )


def _updates_s(plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds of a step's updates on the host: (the CPU's updates and norms, the disk)."""
    traffic = plan.traffic
    cpu_bytes = traffic.update_bytes + traffic.norm_bytes
    files_s = disk_s(traffic, rates.load_gbps, rates.spill_gbps, rates.io_gbps)
    return cpu_bytes * 1e-9 / rates.update_gbps, files_s


# -- gains ----------------------------------------------------------------------------------------
def _gains(bare: Estimate) -> Iterator[tuple[str, Estimate | None]]:
    """The estimate after each change; if no plan fits, only changes after which one does."""
    question = bare.question
    changes: dict[str, dict[str, Any]] = {
        "1 GiB more on the gpu": {"gpu_bytes": question.gpu_bytes + GIB},
        "1 GiB more of host memory": {"host_bytes": question.host_bytes + GIB},
        "1 GiB more of nvme": {"nvme_bytes": question.nvme_bytes + GIB},
        f"twice the tokens: batch {2 * question.batch}": {"batch": 2 * question.batch},
    }
    # Lean states round otherwise, so no plan has them unasked.
    full = bare.plan is None or any(bare.plan.nvme_bytes.values())
    if full and (question.states, question.dtype) == (EXACT, "bf16"):
        changes["states: lean (they round otherwise)"] = {"states": LEAN}
    changes |= _packings(bare)
    for change, values in changes.items():
        if "nvme_bytes" in values and not question.nvme_bytes:
            continue
        asked = replace(question, **values)
        gained = estimate(asked)
        alike = (asked.tokens, asked.states) == (question.tokens, question.states)
        if gained.fits and bare.fits and alike and asked.model is question.model:
            # More memory takes nothing away: the plan without it still fits.
            gained = min(gained, bare, key=attrgetter("step_s"))
        if gained.fits:
            yield change, gained
        elif bare.fits:
            yield change, None


def _packings(bare: Estimate) -> dict[str, dict[str, Any]]:
    """Storage formats for frozen weights that lie as they came, by what they change.

    Without a plan each format counts, in the order of bytes. A plan that fits can gain from the
    smallest alone.
    """
    model = bare.question.model
    if model.adapters is None or model.adapters.frozen is not None:
        return {}
    rows = sorted(FORMATS.values(), key=_packed_size, reverse=True)
    return {
        f"frozen: {row.name} (weights are rounded)": {"model": model.with_frozen(row.name)}
        for row in (rows if bare.plan is None else rows[-1:])
    }


def _packed_size(row: PackedFormat) -> int:
    """Bytes of a large matrix in the format."""
    return row.packed_bytes((1 << 12, 1 << 12))
