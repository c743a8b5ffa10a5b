"""What a step puts on its lanes at least, whatever the order: bounds, and what they say of updates.

Pure arithmetic on sizes and seconds; any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from stronghold.model.layout import ModelLayout
from stronghold.plan.deferral import shares
from stronghold.plan.demand import Gradients
from stronghold.plan.planner import Plan

MARGINS = (1.0, 1.1)  # on the seconds of updates: hand-overs, and the way of one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Seconds of work that a step puts on its lanes, per layer or per byte: what bounds a plan from
    below. `forward_s` and `backward_s` are of one micro-batch and layer.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    weight_bytes: int
    micro_batches: int
    fetch_s_per_byte: float
    drain_s_per_byte: float
    update_s_per_parameter: float
    norm_s_per_parameter: float
    device_update_s_per_parameter: float
    load_s_per_byte: float = 0.0
    spill_s_per_byte: float = 0.0
    disk_s_per_byte: float = 0.0  # of both, when both are busy


def lower_bound(layout: ModelLayout, plan: Plan, lanes: Lanes) -> float:
    """Seconds of the busiest lane's own work in a step of `plan` ([Note: lower bounds first])."""
    blocks = [layer for layer in layout.layers if layer.streamed]
    passes = lanes.micro_batches
    forward, backward = sum(lanes.forward_s), backward_s(plan, lanes)
    away = [b for b in blocks if b.index not in plan.resident]
    offloaded = passes * sum(
        lanes.saved_bytes[b.index] for b in blocks if plan.activations[b.index] == "offload"
    )
    updated = [layer for layer in layout.layers if layer.index not in plan.updated_on_gpu]
    there = [layer for layer in layout.layers if layer.index in plan.updated_on_gpu]
    size = lanes.weight_bytes
    # At most a window of layers survives each turn between forward and backward; at a step's end
    # their weights have changed.
    least = sorted(b.numel for b in away)[: max(0, len(away) - plan.window)]
    fetched: float = size * (sum(b.numel for b in away) + (2 * passes - 1) * sum(least))
    fetched += size * sum(layer.numel for layer in updated if layer.index in plan.resident)
    drained: float = size * passes * sum(layer.num_trainable for layer in updated)
    update = sum(layer.num_trainable for layer in updated) * lanes.update_s_per_parameter
    # Each of several ranks has its part; weights are divided among those of a node.
    fetched /= plan.num_ranks // plan.num_nodes
    drained /= plan.num_ranks
    update /= plan.num_ranks
    compute = passes * (forward + backward)
    compute += sum(layer.num_trainable for layer in there) * lanes.device_update_s_per_parameter
    if plan.gradients is not Gradients.RING:
        # Updates begin when backward has ended, and the next backward needs them all.
        compute += max(0.0, update - forward)
    return max(
        compute,
        update,
        (fetched + offloaded) * lanes.fetch_s_per_byte,
        (drained + offloaded) * lanes.drain_s_per_byte,
    )


def deferrals(layout: ModelLayout, plan: Plan, lanes: Lanes) -> list[int]:
    """How many blocks may be worth deferring, the least first; always 0, and only that where the
    plan's updates wait for the end of the step anyway ([Note: deferred updates])."""
    on_host = [
        layer
        for layer in layout.layers
        if layer.streamed and layer.trainable_numel and layer.index not in plan.updated_on_gpu
    ]
    if plan.gradients is not Gradients.RING or not on_host:
        return [0]
    # Of the layers with arrays in files, for the disk's time; of all, for the longest.
    filed = sum(bool(plan.spilled[layer.index]) for layer in on_host)
    bounds = [(len(on_host), updates_s(layout, plan, lanes))]
    if 0 < filed < len(on_host):
        bounds += [(filed, _disk_s(plan, lanes)), (len(on_host), _adam_s(layout, plan, lanes))]
    wanted = {0}
    for (number, seconds), margin in product(bounds, MARGINS):
        least, most = shares(
            forward_s=sum(lanes.forward_s),
            backward_s=backward_s(plan, lanes),
            updates_s=margin * seconds,
        )
        for share in (least, (least + most) / 2, most):
            wanted |= {math.floor(share * number), math.ceil(share * number)}
    return sorted(wanted)


def backward_s(plan: Plan, lanes: Lanes) -> float:
    """Seconds of a micro-batch's backward, with what it computes again."""
    policies = zip(lanes.forward_s, plan.activations, strict=True)
    again = sum(seconds for seconds, policy in policies if policy == "recompute")
    return sum(lanes.backward_s) + again


def updates_s(layout: ModelLayout, plan: Plan, lanes: Lanes) -> float:
    """Seconds of a step's updates on the host: of the CPU's Adam or of the disk."""
    return max(_adam_s(layout, plan, lanes), _disk_s(plan, lanes))


def _adam_s(layout: ModelLayout, plan: Plan, lanes: Lanes) -> float:
    updated = [layer for layer in layout.layers if layer.index not in plan.updated_on_gpu]
    each = lanes.update_s_per_parameter + lanes.norm_s_per_parameter
    return sum(layer.num_trainable for layer in updated) / plan.num_ranks * each


def _disk_s(plan: Plan, lanes: Lanes) -> float:
    read, written = plan.nvme_read_bytes, plan.nvme_written_bytes
    return max(
        read * lanes.load_s_per_byte,
        written * lanes.spill_s_per_byte,
        (read + written) * lanes.disk_s_per_byte,
    )
