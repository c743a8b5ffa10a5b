"""The plan: where each layer's bytes live and how many slots there are.

Pure: no tensors, no threads. Made once, from sizes and budgets; printed with its reasons. The byte counts are the
formula that `memory.window` and `memory.host` must meet exactly (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import LayerLayout, ModelLayout

MAX_GRADIENT_SLOTS = 2  # one gathers while the other drains
RING_ENTRIES = 3  # one drains, one waits for its update, one is updated
DEFAULT_WINDOW = 4  # without a budget: one computes, one drains behind, two are on their way
MIB = float(1 << 20)


class Gradients(Enum):
    """Where gradients wait on the host between their drain and the update."""

    RING = "ring"  # updated as they come
    HELD = "held"  # every layer's, until the gate opens: the norm or an overflow decides over all of them
    ACCUMULATED = "accumulated"  # fp32 sums over micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the planner is asked: element sizes in bytes, budgets in bytes, and what the user pinned (None: derive)."""

    weight_bytes: int
    low_bytes: int
    gated: bool
    accumulate: bool
    training: bool = True
    gpu_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    window: int | None = None
    prefetch: int | None = None
    resident_layers: int | None = None
    activations: str | None = None
    cpu_threads: int | None = None
    num_cores: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run. `gpu_bytes` and `host_bytes` name every part of each tier's peak, activations excepted."""

    window: int
    prefetch: int
    resident: frozenset[int]
    gradient_slots: int
    gradients: Gradients
    ring_entries: int
    activations: str
    cpu_threads: int
    gpu_bytes: dict[str, int]
    host_bytes: dict[str, int]
    num_parameters: int
    reasons: tuple[str, ...]

    @property
    def gpu_total_bytes(self) -> int:
        return sum(self.gpu_bytes.values())

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())

    def __str__(self) -> str:
        def table(title: str, parts: dict[str, int]) -> list[str]:
            total = sum(parts.values())
            lines = [f"  {title:<5}{total / MIB:>12.2f} MiB = {total / max(1, self.num_parameters):.2f} bytes/parameter"]
            return lines + [f"    {name:<24}{size / MIB:>10.2f} MiB" for name, size in parts.items() if size]

        return "\n".join(
            ["stronghold plan"]
            + [f"  {reason}" for reason in self.reasons]
            + table("gpu", self.gpu_bytes)
            + table("host", self.host_bytes)
        )


def make_plan(layout: ModelLayout, demand: Demand) -> Plan:
    """The plan for `layout`; BudgetError, before anything is allocated, when it cannot fit."""
    blocks = [layer for layer in layout.layers if layer.streamed]
    outside = [layer for layer in layout.layers if not layer.streamed]
    reasons: list[str] = []
    kept = _kept_blocks(blocks, demand, reasons)
    streamed = [layer for layer in blocks if layer.index not in kept]
    window, gradient_slots = _slots(blocks, streamed, outside, kept, demand, reasons)
    prefetch = window - 1 if demand.prefetch is None else demand.prefetch
    if prefetch >= max(window, 1):
        raise ConfigError(
            f"stronghold.prefetch: got {prefetch}, expected less than the window of {window}: of the window's slots one "
            f"holds the layer that computes; set prefetch to at most {window - 1} or window to {prefetch + 1}"
        )
    gradients = _gradients(demand)
    threads = demand.cpu_threads or max(1, demand.num_cores)
    reasons.append(f"activations: {demand.activations or 'keep'}; {threads} update threads; gradients: {gradients.value}")
    plan = Plan(
        window=window,
        prefetch=prefetch,
        resident=frozenset(layer.index for layer in outside) | kept,
        gradient_slots=gradient_slots,
        gradients=gradients,
        ring_entries=0 if gradients is Gradients.HELD or not demand.training else RING_ENTRIES,
        activations=demand.activations or "keep",
        cpu_threads=threads,
        gpu_bytes=_gpu_bytes(blocks, streamed, outside, kept, window, gradient_slots, demand),
        host_bytes=_host_bytes(layout, gradients, demand),
        num_parameters=layout.num_parameters,
        reasons=tuple(reasons),
    )
    _check_host(plan, demand)
    return plan


def _kept_blocks(blocks: list[LayerLayout], demand: Demand, reasons: list[str]) -> frozenset[int]:
    wanted = demand.resident_layers or 0
    if wanted > len(blocks):
        raise ConfigError(
            f'stronghold.resident_layers: got {wanted}, but the model has {len(blocks)} blocks; "all" keeps every one'
        )
    if wanted:
        reasons.append(f"{wanted} of {len(blocks)} blocks stay on the gpu (stronghold.resident_layers)")
    return frozenset(layer.index for layer in blocks[len(blocks) - wanted :])


def _gradients(demand: Demand) -> Gradients:
    if demand.accumulate:
        return Gradients.ACCUMULATED
    return Gradients.HELD if demand.gated else Gradients.RING


def _slots(
    blocks: list[LayerLayout],
    streamed: list[LayerLayout],
    outside: list[LayerLayout],
    kept: frozenset[int],
    demand: Demand,
    reasons: list[str],
) -> tuple[int, int]:
    """Number of weight slots and gradient slots."""
    most_gradients = MAX_GRADIENT_SLOTS if demand.training and any(b.trainable_numel for b in blocks) else 0
    if demand.gpu_budget_bytes is None:
        window = min(demand.window or DEFAULT_WINDOW, len(streamed))
        reasons.append(f"window: {window} slots " + ("(stronghold.window)" if demand.window else "(no gpu budget)"))
        return window, most_gradients
    budget = demand.gpu_budget_bytes

    def total(window: int, gradient_slots: int) -> int:
        return sum(_gpu_bytes(blocks, streamed, outside, kept, window, gradient_slots, demand).values())

    least = min(1, len(streamed))
    smallest = total(least, min(1, most_gradients))
    if smallest > budget:
        raise BudgetError(
            f"stronghold.gpu_memory: got {budget} bytes, but the smallest window needs {smallest} bytes: one weight slot "
            f"and one gradient slot of the largest layer, beside what stays on the gpu ({total(0, 0)} bytes); "
            f"raise gpu_memory to at least {smallest}" + (", or lower resident_layers" if kept else "")
        )
    if demand.window is not None:
        window = min(demand.window, len(streamed))
        gradient_slots = next((g for g in range(most_gradients, 0, -1) if total(window, g) <= budget), 0)
        if total(window, gradient_slots) > budget or (most_gradients and not gradient_slots):
            need = total(window, min(1, most_gradients))
            raise BudgetError(
                f"stronghold.window: {window} slots need {need} bytes, stronghold.gpu_memory allows {budget}; "
                f"lower window or raise gpu_memory to {need}"
            )
        reasons.append(f"window: {window} slots (stronghold.window)")
        return window, gradient_slots
    # A second gradient slot lets a drain overlap the next backward: worth more than a third weight slot.
    gradient_slots = most_gradients
    if total(min(2, len(streamed)), most_gradients) > budget:
        gradient_slots = min(1, most_gradients)
    window = least
    while window < len(streamed) and total(window + 1, gradient_slots) <= budget:
        window += 1
    reasons.append(f"window: {window} slots, the most that {budget / MIB:.2f} MiB hold (stronghold.gpu_memory)")
    return window, gradient_slots


def _gpu_bytes(
    blocks: list[LayerLayout],
    streamed: list[LayerLayout],
    outside: list[LayerLayout],
    kept: frozenset[int],
    window: int,
    gradient_slots: int,
    demand: Demand,
) -> dict[str, int]:
    size = demand.weight_bytes
    own_gradients = sum(layer.trainable_numel for layer in outside) if demand.training else 0
    return {
        "weight slots": window * max((layer.numel for layer in streamed), default=0) * size,
        "gradient slots": gradient_slots * max((layer.trainable_numel for layer in blocks), default=0) * size,
        "resident blocks": sum(layer.numel for layer in blocks if layer.index in kept) * size,
        "outside the blocks": sum(layer.numel for layer in outside) * size,
        "their gradients": own_gradients * size,
    }


def _host_bytes(layout: ModelLayout, gradients: Gradients, demand: Demand) -> dict[str, int]:
    trainable = sum(layer.trainable_numel for layer in layout.layers) if demand.training else 0
    largest = max((layer.trainable_numel for layer in layout.layers), default=0) if demand.training else 0
    ring = 0 if gradients is Gradients.HELD else RING_ENTRIES * largest * demand.weight_bytes
    return {
        "weights": sum(layer.numel for layer in layout.layers) * demand.weight_bytes,
        "rest of the masters": trainable * demand.low_bytes,
        "moments": trainable * 8,
        "held gradients": trainable * demand.weight_bytes if gradients is Gradients.HELD else 0,
        "accumulated gradients": trainable * 4 if gradients is Gradients.ACCUMULATED else 0,
        f"gradient ring ({RING_ENTRIES} entries)": ring,
    }


def _check_host(plan: Plan, demand: Demand) -> None:
    if demand.host_budget_bytes is None or plan.host_total_bytes <= demand.host_budget_bytes:
        return
    parts = ", ".join(f"{name} {size}" for name, size in plan.host_bytes.items() if size)
    held = plan.host_bytes["held gradients"]
    advice = f"raise stronghold.host_memory or add RAM to at least {plan.host_total_bytes} bytes, or train fewer parameters"
    if held:
        advice += (
            f"; without gradient_clipping and bf16.check_grad_overflow gradients need not be held, which saves about {held}"
        )
    raise BudgetError(
        f"host memory: the plan needs {plan.host_total_bytes} bytes ({parts}), {demand.host_budget_bytes} are available; {advice}"
    )
