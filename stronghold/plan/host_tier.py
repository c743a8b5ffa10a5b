"""The host's and the disk's share of a plan: what lies in RAM, what spills, what passes between.

Pure arithmetic on sizes. The byte counts are the formula that `memory.host` and `memory.nvme` must
meet exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import LayerLayout
from stronghold.plan import spills
from stronghold.plan.deferral import spread
from stronghold.plan.demand import Demand, Gradients
from stronghold.plan.spills import Spilled, Staging

RING_ENTRIES = 3  # one drains, one waits for its update, one is updated


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """`host_bytes` and `nvme_bytes` by purpose (the latter empty when nothing spills); `spilled`
    by layer; the traffic is of a step."""

    host_bytes: dict[str, int]
    nvme_bytes: dict[str, int]
    ring_entries: int
    spilled: Spilled
    deferred: frozenset[int]
    staging: Staging
    nvme_read_bytes: int
    nvme_written_bytes: int


def plan_host(
    layers: Sequence[LayerLayout],
    gradients: Gradients,
    demand: Demand,
    reasons: list[str],
    *,
    offloaded_bytes: int = 0,
    deferrable: Sequence[LayerLayout] = (),
) -> HostTier:
    """The share for `layers`, those that are updated on the host, beside `offloaded_bytes` of
    activations; BudgetError, before anything is allocated, when it cannot fit. Of `deferrable`
    layers the demand's number hold their gradients for the next forward. Of several ranks it is
    one's: of every array it has an equal part, and of the node's weights such a part counts.
    """
    shared = demand.shares_weights or demand.num_ranks > 1
    if shared and demand.nvme and demand.spill == "weights":
        raise ConfigError(
            'stronghold.nvme.spill: got "weights" (or DeepSpeed\'s offload_param on nvme), but '
            "several ranks have the weights once for all of them, in memory; set it to "
            '"masters", or leave it out'
        )
    layers = [_part(layer, demand) for layer in layers]
    sizes = _sizes(gradients, demand)
    early = gradients is Gradients.RING
    num_kinds = len(spills.KINDS) - shared  # all but weights

    def of(spilled: Spilled) -> HostTier:
        deferred = _deferred(deferrable, demand.deferred_layers or 0, spilled)
        return _tier(layers, gradients, demand, sizes, spilled, deferred)

    def fits(spilled: Spilled) -> bool:
        budget = demand.host_budget_bytes
        needed = offloaded_bytes + sum(of(spilled).host_bytes.values())
        return budget is None or needed <= budget

    if not demand.nvme:
        spilled = spills.nothing(layers)
    elif demand.spilled is not None:
        spilled = demand.spilled
    elif demand.spill is not None:
        spilled = spills.everything(layers, sizes, spills.DEPTHS[demand.spill])
        reasons.append(f"nvme: {demand.spill} spill, and all that goes first (stronghold.nvme)")
    else:
        spilled = spills.fewest(layers, sizes, num_kinds, fits=fits, evenly=early)
    tier = of(spilled)
    if demand.nvme and demand.spill is None:
        kinds = [kind for kind, size in tier.nvme_bytes.items() if size]
        which = "of layers spread evenly" if early else "the last layers first"
        what = f"{', '.join(kinds)} spill, {which}" if kinds else "nothing spills"
        reasons.append(f"nvme: {what}; host memory holds the rest")
    _check(tier, demand, offloaded_bytes)
    return tier


def _deferred(deferrable: Sequence[LayerLayout], count: int, spilled: Spilled) -> frozenset[int]:
    """Layers with arrays in files as far as there are so many, since the disk is slowest."""
    filed = [layer for layer in deferrable if spilled[layer.index]]
    return spread(filed if count <= len(filed) else deferrable, count)


def _part(layer: LayerLayout, demand: Demand) -> LayerLayout:
    """The layer as one of the ranks has it: sizes alone."""
    return replace(
        layer,
        numel=layer.numel // demand.sharers("weights"),
        trainable_numel=layer.trainable_numel // demand.num_ranks,
    )


def _sizes(gradients: Gradients, demand: Demand) -> dict[str, int]:
    """Bytes of an element of every array that a layer has on the host."""
    if not demand.training:
        return {"weights": demand.weight_bytes}
    sizes = {"weights": demand.weight_bytes, "exp_avg": 4, "exp_avg_sq": 4}
    if demand.low_bytes:
        sizes["low"] = demand.low_bytes
    if gradients is Gradients.HELD:
        sizes["gradients"] = demand.weight_bytes
    if gradients is Gradients.ACCUMULATED:
        sizes["accumulated"] = 4
    return sizes


def _tier(
    layers: Sequence[LayerLayout],
    gradients: Gradients,
    demand: Demand,
    sizes: dict[str, int],
    spilled: Spilled,
    deferred: frozenset[int],
) -> HostTier:
    def slabs(*arrays: str) -> int:
        return sum(
            spills.numel_of(layer, array) * sizes.get(array, 0)
            for layer in layers
            for array in arrays
            if array not in spilled[layer.index]
        )

    staging = spills.staging_of(layers, spilled, sizes, demand.piece_bytes)
    # Gradients that are held in host memory need no ring; those that spill pass it.
    passing = gradients is not Gradients.HELD or any("gradients" in found for found in spilled)
    largest = max((layer.trainable_numel for layer in layers), default=0)
    ring_entries = RING_ENTRIES if passing and largest and demand.training else 0
    read, written = spills.traffic(layers, spilled, sizes, demand.micro_batches)
    return HostTier(
        host_bytes={
            "weights": slabs("weights"),
            "rest of the masters": slabs("low"),
            "moments": slabs(*spills.MOMENTS),
            "held gradients": slabs("gradients"),
            "deferred gradients": sum(
                layer.trainable_numel * demand.weight_bytes
                for layer in layers
                if layer.index in deferred
            ),
            "accumulated gradients": slabs("accumulated"),
            f"gradient ring ({RING_ENTRIES} entries)": ring_entries * largest * demand.weight_bytes,
            f"staging ring ({staging.entries} pieces)": staging.nbytes,
        },
        nvme_bytes=spills.file_bytes(layers, spilled, sizes) if any(spilled) else {},
        ring_entries=ring_entries,
        spilled=spilled,
        deferred=deferred,
        staging=staging,
        nvme_read_bytes=read,
        nvme_written_bytes=written,
    )


def _check(tier: HostTier, demand: Demand, offloaded_bytes: int) -> None:
    on_disk, capacity = sum(tier.nvme_bytes.values()), demand.nvme_capacity_bytes
    if capacity is not None and on_disk > capacity:
        each = f" on each of {demand.num_ranks} ranks" if demand.num_ranks > 1 else ""
        raise BudgetError(
            f"stronghold.nvme.capacity: what spills needs {on_disk} bytes{each}, {capacity} are "
            "allowed; raise it, or give more to stronghold.host_memory so that less spills"
        )
    wanted = tier.host_bytes | {"offloaded activations": offloaded_bytes}
    need, budget = sum(wanted.values()), demand.host_budget_bytes
    if budget is None or need <= budget:
        return
    parts = ", ".join(f"{name} {size}" for name, size in wanted.items() if size)
    held = tier.host_bytes["held gradients"]
    advice = (
        f"raise stronghold.host_memory or add RAM to at least {need} bytes, or train fewer "
        "parameters"
    )
    if held:
        advice += (
            "; without gradient_clipping and bf16.check_grad_overflow gradients need not be held, "
            f"which saves about {held}"
        )
    if not demand.nvme:
        advice += f"; or name a directory on an NVMe disk in stronghold.nvme.path: {need - budget} "
        advice += "bytes and more can lie there"
    elif demand.spill not in (None, "weights"):
        advice += f'; or leave stronghold.nvme.spill ("{demand.spill}") out: more can spill'
    raise BudgetError(
        f"host memory: the plan needs {need} bytes ({parts}), {budget} are available; {advice}"
    )
