"""The GPU's memory: bytes of its buffers and activations, and how many slots fit.

Pure: no tensors, no threads. The bytes are the formula that a run must meet exactly (a test
compares them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from stronghold.errors import BudgetError, ErrorPage, format_size
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.plan.cost import REASONS, Demand, spared
from stronghold.plan.places import Places

# without a budget: one computes, one is still in use, two are on their way
DEFAULT_WINDOW = 4
MAX_GRADIENT_SLOTS = 2  # one gathers while the other drains
SLOTS = ((3, 2), (2, 2), (2, 1), (1, 1))  # for weights and for gradients: the first that fit


# -- activations ----------------------------------------------------------------------------------
def activation_bytes(layout: ModelLayout, activations: Sequence[str], demand: Demand) -> int:
    """Bytes of activations on the gpu when forward has ended and backward begins: the sum of
    `activation_parts`."""
    return sum(activation_parts(layout, activations, demand).values())


def activation_parts(
    layout: ModelLayout, activations: Sequence[str], demand: Demand
) -> dict[str, int]:
    """The parts of `activation_bytes`, in bytes, by what you would call each of them.

    1. Saved tensors of blocks, or the inputs of recomputed blocks, wait for backward.
    2. Layers outside the blocks save tensors. The head and the loss make more beside them, and the
       logits go first.
    3. One block makes tensors in backward, and when it is recomputed, in the chunks that run at
       once. Two offloaded layers are on their way beside it.
    With one stream the larger of 2 and 3 counts. With several streams their sum counts, because
    torch's allocator keeps each stream's memory for this stream.
    """
    if not demand.work:
        return {}
    all_outside = [demand.work[index] for index in layout.resident]
    outside = sum(work.saved_bytes + work.passing_bytes for work in all_outside)
    # of one block that computes, and of two offloaded layers on their way
    passing = 0
    waiting = 0  # of what blocks keep until backward
    num_chunks_at_once = min(demand.streams, demand.chunks)
    for index in layout.streamed:
        work = demand.work[index]
        level = activations[index]
        moved = work.moved_bytes(level)
        made = (work.recomputed_bytes(level) + work.passing_bytes) * num_chunks_at_once
        made = -(-made // demand.chunks)
        waiting += work.waiting_bytes(level) - moved
        passing = max(passing, made + 2 * moved)
    if demand.streams == 1:  # one of the two at a time
        if outside > passing:
            passing = 0
        else:
            outside = 0
    return {
        "activations that wait for backward": waiting,
        "activations of one block": passing,
        "activations outside the blocks": outside,
    }


def later_activation_bytes(layout: ModelLayout, activations: Sequence[str], demand: Demand) -> int:
    """Bytes of activations of the largest later batch (`Demand.growth`); 0 if none is larger."""
    if demand.growth == 1.0 or not demand.work:
        return 0
    later = replace(demand, work=tuple(work.grown(demand.growth) for work in demand.work))
    levels = activations if demand.pins("activations") else spared(activations)
    return activation_bytes(layout, levels, later)


# -- buffers --------------------------------------------------------------------------------------
class GpuPeak:
    """Bytes of the GPU's peak, for any number of slots.

    A plan asks for several numbers of slots. Sums over layers are made once.

    places           where the layers are
    activations      bytes of activations, as `activation_bytes` has them
    slot             bytes of one slot for weights
    gradient_slot    bytes of one slot for gradients
    """

    def __init__(self, places: Places) -> None:
        demand = places.demand
        training = demand.training
        self.places = places
        self.activations = activation_bytes(places.layout, places.activations, demand)
        self._later_activations = later_activation_bytes(places.layout, places.activations, demand)
        self.slot = max((x.weight_bytes for x in places.streamed), default=0)
        self.gradient_slot = max((x.gradient_bytes for x in places.shared_slots), default=0)
        self._sums_in_slot, self._own_sums = _chunk_sums_bytes(places)
        trained = places.on_gpu if training else ()
        own_gradients = places.own_slots if training else ()
        accumulated = 0
        if demand.accumulate:
            accumulated = _bytes(trained, "accumulated")
        resident_blocks = _bytes(places.resident_blocks, "weights")
        self._beside_slots = {
            "resident blocks": resident_blocks,
            "outside the blocks": _bytes(places.outside, "weights"),
            "gradients of resident layers": _bytes(own_gradients, "gradients"),
            "master remainder": _bytes(trained, "low"),
            "moments": _bytes(trained, *places.layout.moments),
            "accumulated gradients": accumulated,
        }
        self._beside_slots_bytes = sum(self._beside_slots.values())

    def parts(self, window: int, gradient_slots: int) -> dict[str, int]:
        """Bytes of each part of the peak, without activations, with so many slots."""
        return {
            "weight slots": window * self.slot,
            "gradient slots": gradient_slots * self.gradient_slot,
            "fp32 sums of chunks": gradient_slots * self._sums_in_slot + self._own_sums,
            **self._beside_slots,
        }

    def total(self, window: int, gradient_slots: int) -> int:
        """Bytes of the peak with so many slots. Activations count, or the room for those of a
        larger batch, or the room reserved for them."""
        reserve_bytes = self.places.demand.reserve_bytes
        activations = max(self.activations, self._later_activations, reserve_bytes)
        return activations + self.buffers(window, gradient_slots)

    def buffers(self, window: int, gradient_slots: int) -> int:
        """Bytes of all but activations, with so many slots."""
        slots = window * self.slot + gradient_slots * (self.gradient_slot + self._sums_in_slot)
        return slots + self._own_sums + self._beside_slots_bytes


def sum_bytes(layer: LayerLayout) -> int:
    """Bytes of a layer's fp32 sums of chunks: none where its gradients are fp32."""
    if layer.states is None or layer.states.dtype is torch.float32:
        return 0
    return layer.array_bytes("accumulated")


def _bytes(layers: Iterable[LayerLayout], *arrays: str) -> int:
    """Bytes of these arrays of these layers."""
    return sum(layer.array_bytes(array) for layer in layers for array in arrays)


def _chunk_sums_bytes(places: Places) -> tuple[int, int]:
    """Bytes of the fp32 sums of chunks of blocks: beside each gradient slot, and beside the
    gradients that have no slot."""
    if not places.demand.training or places.demand.chunk is None:
        return 0, 0
    unshared = (x for x in places.own_slots if x.streamed or x.in_block)
    return max(map(sum_bytes, places.shared_slots), default=0), sum(map(sum_bytes, unshared))


# -- slots ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """How many slots for weights and for gradients there are."""

    window: int
    gradient_slots: int
    reason: str


def choose_slots(peak: GpuPeak) -> Slots:
    """The slots that the budget holds, or that the config asks for. BudgetError if they do not
    fit."""
    demand = peak.places.demand
    if demand.gpu_budget_bytes is None:
        return _slots_without_budget(peak)
    if demand.window is not None:
        return _slots_for_window(peak, demand.window, demand.gpu_budget_bytes)
    return _slots_within(peak, demand.gpu_budget_bytes)


def most_gradient_slots(places: Places) -> int:
    """How many shared slots are of use: none when no block that shares them trains."""
    trainable = [layer.index for layer in places.shared_slots if layer.states]
    if not places.demand.training or not trainable:
        return 0
    # Gradients that are used on the gpu are never offloaded: there is nothing to overlap.
    return 1 if places.updated_on_gpu >= set(trainable) else MAX_GRADIENT_SLOTS


def _slots_without_budget(peak: GpuPeak) -> Slots:
    places, demand = peak.places, peak.places.demand
    window = min(demand.window or DEFAULT_WINDOW, len(places.streamed))
    why = demand.why("window") if demand.window else "no gpu budget"
    return Slots(
        window=window,
        gradient_slots=most_gradient_slots(places),
        reason=f"window: {window} slots ({why})",
    )


def _slots_for_window(peak: GpuPeak, wanted: int, budget: int) -> Slots:
    """The config's window, and the most gradient slots that fit beside it."""
    places = peak.places
    window = min(wanted, len(places.streamed))
    gradient_slots = most_gradient_slots(places)
    while gradient_slots > 1 and peak.total(window, gradient_slots) > budget:
        gradient_slots -= 1
    need = peak.total(window, gradient_slots)
    if need > budget:
        raise _gpu_refusal(peak, need, window, gradient_slots)
    return Slots(
        window=window,
        gradient_slots=gradient_slots,
        reason=f"window: {window} slots ({places.demand.why('window')})",
    )


def _slots_within(peak: GpuPeak, budget: int) -> Slots:
    """The first of SLOTS that fit, where blocks may stay in what is left. Else the most that fit:
    layers that are still in the window are not fetched again when the direction turns."""
    places, demand = peak.places, peak.places.demand
    num_streamed, most_gradients = len(places.streamed), most_gradient_slots(places)
    smallest = smallest_bytes(peak)
    if smallest > budget:
        raise _gpu_refusal(peak, smallest, min(1, num_streamed), min(1, most_gradients))
    tried = wanted_slots(places)
    window, gradient_slots = next(slots for slots in tried if peak.total(*slots) <= budget)
    why = REASONS["window"]
    if not (demand.training and demand.layers_may_move):
        room = budget - peak.total(0, gradient_slots)
        window = min(num_streamed, room // peak.slot) if peak.slot else num_streamed
        why = f"the most that {format_size(budget)} hold (stronghold.gpu_memory)"
    return Slots(
        window=window, gradient_slots=gradient_slots, reason=f"window: {window} slots ({why})"
    )


def wanted_slots(places: Places) -> Iterator[tuple[int, int]]:
    """Numbers of slots for weights and for gradients, by SLOTS, as far as they are of use. A window
    of the config decides the former."""
    for window, gradient_slots in SLOTS:
        slots = min(places.demand.window or window, len(places.streamed))
        yield slots, min(gradient_slots, most_gradient_slots(places))


def smallest_bytes(peak: GpuPeak) -> int:
    """Bytes on the GPU with one weight slot and one gradient slot, or none where none is of use."""
    window = min(1, len(peak.places.streamed))
    gradient_slots = min(1, most_gradient_slots(peak.places))
    return peak.total(window, gradient_slots)


# -- refusal --------------------------------------------------------------------------------------
def _gpu_refusal(peak: GpuPeak, need: int, window: int, gradient_slots: int) -> BudgetError:
    """Why a plan of `need` bytes does not fit the GPU: what takes them, and the ways out."""
    places, demand = peak.places, peak.places.demand
    budget = demand.gpu_budget_bytes or 0
    kept = activation_parts(places.layout, places.activations, demand)
    parts = peak.parts(window, gradient_slots) | kept
    reserved = peak.total(0, 0) - peak.buffers(0, 0) - sum(kept.values())
    if reserved:
        parts["reserved for activations"] = reserved
    descending = sorted(parts.items(), key=itemgetter(1), reverse=True)
    named = ", ".join(f"{name} {format_size(size)}" for name, size in descending if size)
    if not places.num_blocks:
        which = "the model has no repeated blocks, so that all of it stays on the gpu, and"
    elif demand.pins("window"):
        which = f"stronghold.window of {window} slots"
    else:
        which = "the smallest plan"
    tokens = f" with {demand.tokens:,} tokens in a micro-batch" if demand.tokens else ""
    at_least = format_size(need, round_up=True)
    ways = [f"raise gpu_memory to at least {at_least}, if the gpu has it"]
    ways += _ways_with_fewer_buffers(peak, need)
    if reserved and demand.growth > 1.0:
        ways.append("lower stronghold.batch_tokens")
    if sum(kept.values()) > need // 2:
        ways += _ways_with_fewer_activations(demand, kept)
    return BudgetError(
        f"stronghold.gpu_memory: got {format_size(budget)}, but {which}{tokens} needs {at_least}: "
        f"{named}. You can {'; or '.join(ways)}",
        need_bytes=need,
        page=ErrorPage.GPU_MEMORY,
    )


def _ways_with_fewer_buffers(peak: GpuPeak, need: int) -> list[str]:
    """Changes of the config with which weights, gradients and states take fewer bytes."""
    places, demand = peak.places, peak.places.demand
    ways = []
    smallest = smallest_bytes(peak)
    if places.num_blocks and demand.pins("window") and smallest < need:
        fewer = format_size(smallest, round_up=True)
        ways.append(f"leave window out, with which {fewer} suffice")
    if demand.resident_layers and demand.pins("resident_layers"):
        ways.append("lower stronghold.resident_layers")
    if demand.resident_updates == "gpu" and demand.pins("resident_updates"):
        ways.append('set stronghold.resident_updates to "host"')
    if not places.num_blocks:
        ways.append("name blocks in stronghold.layers, which are streamed then")
        if demand.training:
            ways.append("train fewer parameters")
            if demand.states.weight_bytes == 4:
                ways.append("train in bf16")
    return ways


def _ways_with_fewer_activations(demand: Demand, kept: dict[str, int]) -> list[str]:
    """Changes of the config with which activations take fewer bytes, if the batch decides.

    `kept`: bytes of activations by kind.
    """
    ways = []
    if demand.pins("activations"):
        ways.append("leave stronghold.activations out")
    if demand.sequences > 1:
        ways.append("lower the micro-batch")
        if demand.chunk is None and kept["activations of one block"]:
            ways.append("set stronghold.chunk to 1 (blocks then take one sequence at a time)")
    ways.append("shorten the sequences")
    return ways
