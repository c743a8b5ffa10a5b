"""Advice beside an estimate: warnings, and the gain of more memory or more tokens.

Owns the changes that are tried, and the words of the warnings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stronghold.optim.states import EXACT, LEAN
from stronghold.plan.machine import NETWORK_GBPS
from stronghold.tools.estimate.estimate import Estimate, estimate
from stronghold.tools.estimate.question import Question

GIB = 1 << 30
OF_TIERS = {"gpu": "on the gpu", "host": "of host memory", "nvme": "of nvme"}
FULL = 0.9  # share of a tier
SMALLEST = "nf4"  # format of frozen weights


def with_advice(bare: Estimate) -> Estimate:
    """Return the estimate with its notes and gains."""
    return replace(bare, notes=tuple(_notes(bare.question)), gains=tuple(_gains(bare)))


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
        others = "its node" if question.nodes > 1 else "the others"
        link = question.machine.fetch_gbps
        received.append(f"{link:g} GB/s from {others} (assumed: as over its link)")
    if question.nodes > 1:
        network = question.network_gbps or NETWORK_GBPS
        assumed = "" if question.network_gbps else ", assumed"
        received.append(f"{network:g} GB/s from other nodes (--network{assumed})")
    return (
        f"{question.ranks} ranks {where}: bytes are of each, tokens of all; each receives "
        f"{' and '.join(received)}"
    )


# -- gains ----------------------------------------------------------------------------------------
def _gains(bare: Estimate) -> Iterator[tuple[str, Estimate | None]]:
    """The estimate after each change; if no plan fits, only changes after which one does."""
    question = bare.question
    changes: dict[str, dict[str, Any]] = {}
    for tier, of_tier in OF_TIERS.items():
        if _is_short(bare, tier):
            field = f"{tier}_bytes"
            changes[f"1 GiB more {of_tier}"] = {field: getattr(question, field) + GIB}
    changes[f"twice the tokens: batch {2 * question.batch}"] = {"batch": 2 * question.batch}
    # Lean states round otherwise, so no plan has them unasked.
    full = bare.plan is None or any(bare.plan.nvme_bytes.values())
    if full and (question.states, question.dtype) == (EXACT, "bf16"):
        changes["states: lean (they round otherwise)"] = {"states": LEAN}
    adapters = question.model.adapters
    if adapters is not None and adapters.frozen is None:
        packed = question.model.with_frozen(SMALLEST)
        changes[f"frozen: {SMALLEST} (weights are rounded)"] = {"model": packed}
    for change, values in changes.items():
        gained = estimate(replace(question, **values))
        if gained.fits:
            yield change, gained
        elif bare.fits:
            yield change, None


def _is_short(bare: Estimate, tier: str) -> bool:
    """True if more of the tier may buy something: its plan nearly fills it, or none fits."""
    if bare.plan is None:
        return tier != "nvme" or bare.question.nvme_bytes > 0
    budget, parts = bare.tiers.get(tier, (0, {}))
    return sum(parts.values()) > FULL * budget
