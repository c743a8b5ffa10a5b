"""The plan: the home of every layer's bytes, the number of slots, and the arrays that spill.

Pure: no tensors, no threads. The engine makes a plan from sizes and budgets when it is built, and
again from the measurements of its first steps (`refine`). A plan prints its reasons. `memory` must
meet its byte counts exactly; a test compares them.

[Note: what spills first]

1. Kinds of arrays spill in the order of how seldom their bytes are needed.
2. Moments come first: a step reads and writes them once. The master remainders follow.
3. Pending gradients come next, which wait for the gate. Weights come last: every pass reads them.
4. Within a kind the last layers spill first. Updates behind the gate come in forward order. So no
   file is read at the turn from one step to the next, and the disk is a few layers ahead when the
   first spilled layer is needed.

[Note: early updates]

1. An early update runs before the gradient norm is known. It reads one set of the layer's arrays
   on the host and writes a second set.
2. A layer can have a second set if all of its arrays lie in memory, all of its parameters train,
   and no other rank has a shard of it.
3. The early layers are spread evenly over the depth.
4. Backward takes B seconds and gives gradients in the order L..1. The next forward takes F seconds
   and needs weights in the order 1..L. All updates take D seconds.
5. The updates of a share e of the layers run in backward, and the others behind the gate. A step
   takes about

       max(B, e D) + max(F, (1 - e) D)

   The least is max(F + B, D), for e = B / D.
6. Layer i can be updated from B i / L before the end of backward to F i / L after it. These spans
   lie in each other. So backward takes its share of the layers above any depth, and forward the
   others: the lane of updates never waits.

[Note: the staging ring] A ring of pieces of one size in host memory.

1. An update's piece holds a range of all spilled arrays of a layer. One piece is read, one is
   updated, one is written, and one more is read ahead.
2. A fetch's piece holds a range of weights. One piece is read, one waits for its slot, one is
   copied.
3. Updates and fetches have separate entries, because an update must not wait for a slot.
4. One further entry serves checkpoints.

[Note: no blocks]

1. A model without repeated blocks has no layer that could leave the device to make room.
2. If its state fits on the device too, and the demand leaves that open, the model is whole there.
3. Else its state is on the host, and its weights alone stay on the device.
4. There is no block to call in chunks.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from stronghold.errors import BudgetError, ConfigError, format_size
from stronghold.model.arrays import array_bytes, moment_arrays
from stronghold.model.layout import LayerLayout, ModelLayout, Range
from stronghold.optim.states import (
    EXACT,
    LEAN,
    PAGE_BYTES,
    Formats,
    group_size,
    states_of,
)
from stronghold.plan.cost import AGAIN, Demand, Traffic, traffic_of
from stronghold.plan.homes import Homes, make_homes
from stronghold.plan.schedule import Position

DEFAULT_WINDOW = 4  # without a budget: one computes, one is still in use, two are prefetched
MAX_GRADIENT_SLOTS = 2  # one gathers while the other drains
RING_ENTRIES = 3  # one drains, one waits for its update, one is updated
UPDATE_ENTRIES, FETCH_ENTRIES, OTHER_ENTRIES = 4, 3, 1  # [Note: the staging ring]
# A piece of this size takes a disk milliseconds. A hand-over between lanes takes tenths of these.
PIECE_BYTES = 32 << 20
MIB = float(1 << 20)
SECOND_ARRAYS = "second arrays of early updates"

# Number of kinds of `kinds_of` that spill, for each word of stronghold.nvme.spill.
DEPTHS = {"moments": 1, "masters": 2, "weights": 5}

Spilled = tuple[frozenset[str], ...]
"""By layer: the names of its arrays whose home is a file."""
Ranges = tuple[Range, ...]
"""The ranges of one layer."""


def kinds_of(formats: Formats) -> dict[str, tuple[str, ...]]:
    """Names of the arrays of each kind, in the order of [Note: what spills first]."""
    return {
        "moments": moment_arrays(formats),
        "rest of the masters": ("low",),
        "held gradients": ("gradients",),
        "accumulated gradients": ("accumulated",),
        "weights": ("weights",),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The staging ring: its entries for updates and for fetches, and the bytes of an entry."""

    update_entries: int = 0
    fetch_entries: int = 0
    piece_bytes: int = PAGE_BYTES

    @property
    def entries(self) -> int:
        """Number of all entries, with that of checkpoints. 0 if the ring is not needed."""
        used = self.update_entries + self.fetch_entries
        return used + OTHER_ENTRIES if used else 0

    @property
    def nbytes(self) -> int:
        return self.entries * self.piece_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planner's decisions for one model, with their reasons.

    All bytes are those of one rank. `gpu_bytes`, `host_bytes` and `nvme_bytes` name every item of a
    tier's peak but activations.
    """

    demand: Demand  # the planner's input
    window: int  # slots for weights
    prefetch: int  # layers that are fetched ahead
    resident: frozenset[int]  # layers whose weights never leave the gpu
    homes: Homes  # `homes[layer, array]`: an array's tier between two operations
    # True: every layer is updated on the gpu. The model runs without hooks, slots and copies.
    whole: bool
    own_gradients: frozenset[int]  # layers with a gradient slot that no other layer uses
    gradient_slots: int  # slots that all other layers share
    ring_entries: int
    updates: dict[int, Position]  # the update's position in the step, of each trained layer
    activations: tuple[str, ...]  # the level of each layer; a layer that is no block has "keep"
    cpu_threads: int
    gpu_bytes: dict[str, int]
    host_bytes: dict[str, int]
    num_parameters: int
    activation_bytes: int  # on the gpu; 0 if unknown
    offloaded_bytes: int  # activations on the host; 0 if unknown
    recomputed: float  # share of the parameters whose forward runs again in backward
    reasons: tuple[str, ...]
    traffic: Traffic
    staging: Staging = field(default_factory=Staging)
    nvme_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def updated_on_gpu(self) -> frozenset[int]:
        """Layers whose arrays are all on the GPU, and whose optimizer runs there."""
        return self.homes.on_gpu

    @property
    def accumulates(self) -> bool:
        """True if gradients wait as fp32 sums over micro-batches."""
        return self.demand.accumulate

    @property
    def early(self) -> frozenset[int]:
        """Layers that are updated before the norm is known. They have their arrays twice."""
        return frozenset(
            layer for layer, position in self.updates.items() if position is Position.EARLY
        )

    @property
    def pending(self) -> frozenset[int]:
        """Layers whose gradients wait for the gate in the dtype of the weights."""
        return frozenset() if self.accumulates else frozenset(self.updates)

    @property
    def gpu_total_bytes(self) -> int:
        return sum(self.gpu_bytes.values())

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())

    @property
    def nvme_total_bytes(self) -> int:
        return sum(self.nvme_bytes.values())

    def __str__(self) -> str:
        lines = ["stronghold plan"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += self._table("gpu", self.gpu_bytes | {"activations": self.activation_bytes})
        offloaded = {"offloaded activations": self.offloaded_bytes}
        lines += self._table("host", self.host_bytes | offloaded)
        if self.nvme_bytes:
            lines += self._table("nvme", self.nvme_bytes)
            lines.append(f"  {self.wear()}")
        return "\n".join(lines)

    def _table(self, tier: str, sizes: dict[str, int]) -> list[str]:
        """Lines of a tier's total and of every item that takes bytes."""
        demand = self.demand
        ranks = ""
        if demand.num_ranks > 1:
            ranks = f" x {demand.num_ranks} ranks"
        if demand.num_nodes > 1:
            ranks += f" on {demand.num_nodes} nodes, each with the weights"
        total = sum(sizes.values())
        per_parameter = total / max(1, self.num_parameters)
        lines = [
            f"  {tier:<5}{total / MIB:>12.2f} MiB = {per_parameter:.2f} bytes/parameter{ranks}"
        ]
        for name, size in sizes.items():
            if size:
                lines.append(f"    {name:<24}{size / MIB:>10.2f} MiB")
        return lines

    def wear(self, step_s: float | None = None) -> str:
        """A line with the bytes that a step reads from NVMe and writes to it.

        `step_s`: the seconds of a step. With it the line also has the bytes written per hour.
        """
        read = self.traffic.nvme_read_bytes
        written = self.traffic.nvme_written_bytes
        line = f"nvme, per step: {read / MIB:.2f} MiB read, {written / MIB:.2f} MiB written"
        if not step_s:
            return line
        hourly = written * 3600.0 / step_s
        return f"{line}; {hourly / 1e12:.3f} TB written per hour of such steps ({step_s:.2f} s)"


def make_plan(layout: ModelLayout, demand: Demand) -> Plan:
    """Make the plan for `layout`.

    BudgetError, before anything is allocated, if no plan fits. ConfigError for settings that the
    model does not have.
    """
    if not layout.streamed:  # [Note: no blocks]
        demand = replace(demand, chunk=None, chunks=1, streams=1)
        if demand.resident_updates is None and demand.spill is None:
            with contextlib.suppress(BudgetError):
                return _make_plan(layout, replace(demand, resident_updates="gpu"))
    return _make_plan(layout, demand)


def _make_plan(layout: ModelLayout, demand: Demand) -> Plan:
    reasons: list[str] = []
    places = _Places(layout, demand, reasons)
    activations, blocks = places.activations, places.blocks
    kept_bytes = activation_bytes(layout, activations, demand)

    def gpu_total(window: int, gradient_slots: int) -> int:
        own = places.gpu_bytes(window, gradient_slots)
        return max(kept_bytes, demand.reserve_bytes) + sum(own.values())

    window, gradient_slots, reason = _slots(places, gpu_total)
    reasons.append(reason)
    prefetch = _prefetch(places, window, gpu_total)
    threads = demand.cpu_threads or max(1, demand.num_cores)
    counts = Counter(activations[block.index] for block in blocks)
    policies = ", ".join(f"{policy} {count}" for policy, count in sorted(counts.items()))
    if len(counts) < 2:
        policies = next(iter(counts), "keep")
    gradients = "accumulated" if demand.accumulate else "pending until the gate"
    reasons.append(f"activations: {policies}; {threads} update threads; gradients: {gradients}")
    if demand.states.is_lean:
        stays = [layer for layer in places.on_host if layer.index in places.resident]
        where = "; what stays on the gpu is updated on the host" if stays else ""
        reasons.append(f"states: lean, which round otherwise than exact ones{where}")
    host = _Host(places, reasons)
    reasons += _early_in_words(places, host)
    again = sum(e.num_parameters for e in layout.layers if activations[e.index] in AGAIN)
    return Plan(
        demand=demand,
        window=window,
        prefetch=prefetch,
        resident=places.resident,
        homes=make_homes(
            layout,
            demand.formats,
            on_gpu=places.updated_there,
            staged=host.spilled,
            like=demand.homes,
        ),
        whole=places.whole,
        own_gradients=frozenset(layer.index for layer in places.own_slots),
        gradient_slots=gradient_slots,
        ring_entries=host.ring_entries,
        updates=_positions(layout, host.early),
        activations=activations,
        cpu_threads=threads,
        gpu_bytes=places.gpu_bytes(window, gradient_slots),
        host_bytes=host.host_bytes,
        num_parameters=layout.num_parameters,
        activation_bytes=kept_bytes,
        offloaded_bytes=host.offloaded_bytes,
        recomputed=again / max(1, layout.num_parameters),
        reasons=tuple(reasons),
        traffic=traffic_of(
            layout,
            demand,
            resident=places.resident,
            on_gpu=places.updated_there,
            window=window,
            offloaded_bytes=sum(moved for moved, _ in places.moved.values()),
            nvme=host.traffic,
        ),
        staging=host.staging,
        nvme_bytes=host.nvme_bytes,
    )


def _positions(layout: ModelLayout, early: frozenset[int]) -> dict[int, Position]:
    trained = [layer.index for layer in layout.layers if layer.trainable_numel]
    return {i: Position.EARLY if i in early else Position.GATE for i in trained}


def _early_in_words(places: _Places, host: _Host) -> list[str]:
    demand = places.demand
    if not (demand.early_layers and demand.training):
        return []
    if not host.early:
        start = f"no layer is updated before the norm is known ({demand.why('early_layers')}): "
        return [start + why for why in _why_none_is_early(places, host)]
    return [
        f"{len(host.early)} layers are updated before the norm is known, into a second set of "
        f"arrays: {host.host_bytes[SECOND_ARRAYS] / MIB:.2f} MiB ({demand.why('early_layers')})"
    ]


def _why_none_is_early(places: _Places, host: _Host) -> Iterator[str]:
    """Each kind of layers that cannot be early, where all layers are of such a kind."""
    if places.demand.meets_others:
        yield "several ranks share the layers, and agree first on which parameters have gradients"
        return
    layers = [layer for layer in places.on_host if layer.numel]
    frozen = sum(layer.trainable_numel < layer.numel for layer in layers)
    in_files = sum(
        layer.trainable_numel == layer.numel and bool(host.spilled[layer.index]) for layer in layers
    )
    if places.on_gpu:
        yield f"{len(places.on_gpu)} layers are updated on the gpu"
    if frozen:
        yield f"{frozen} layers have frozen parameters"
    if in_files:
        yield f"{in_files} layers have arrays in files"


# -- activations ----------------------------------------------------------------------------------
def activation_bytes(layout: ModelLayout, activations: Sequence[str], demand: Demand) -> int:
    """Bytes of activations on the gpu when forward has ended and backward begins: the sum of
    `activation_parts`."""
    return sum(activation_parts(layout, activations, demand).values())


def activation_parts(
    layout: ModelLayout, activations: Sequence[str], demand: Demand
) -> dict[str, int]:
    """The parts of `activation_bytes`, in bytes, by their names for users.

    1. Waiting for backward: what blocks keep, or the inputs of recomputed blocks.
    2. Outside the blocks: what the other layers save. Backward frees the head's logits first.
    3. One block: what it allocates when it is recomputed, in the chunks that run at once, and the
       activations of two offloaded layers that are in flight.

    With one stream 2 and 3 follow each other, so the larger one counts. With several streams both
    count, because torch's allocator keeps a pool per stream.
    """
    if not demand.kept:
        return {}
    outside = sum(demand.kept[index].saved_bytes for index in layout.resident)
    waiting = 0
    one_block = 0
    chunks_at_once = min(demand.streams, demand.chunks)
    for index in layout.streamed:
        work = demand.kept[index]
        level = activations[index]
        offloaded = work.moved_bytes(level)
        recomputed = -(-work.recomputed_bytes(level) * chunks_at_once // demand.chunks)
        waiting += work.waiting_bytes(level) - offloaded
        one_block = max(one_block, recomputed + 2 * offloaded)
    if demand.streams == 1:
        if outside > one_block:
            one_block = 0
        else:
            outside = 0
    return {
        "activations that wait for backward": waiting,
        "activations of one block": one_block,
        "activations outside the blocks": outside,
    }


def levels_of(layout: ModelLayout, counts: Mapping[str, int]) -> tuple[str, ...]:
    """The activation level of each layer, from the number of blocks at each level.

    The first level in `counts` goes to the first blocks. Layers that are no blocks keep their
    activations. ConfigError if the numbers do not add up to the model's blocks.
    """
    block_levels: list[str] = []
    for level, count in counts.items():
        block_levels += [level] * count
    if sum(counts.values()) != len(layout.streamed):
        raise ConfigError(
            f"stronghold.activations: got levels of {sum(counts.values())} blocks, expected "
            f"{len(layout.streamed)}, as many as the model has"
        )
    levels = iter(block_levels)
    return tuple(next(levels) if layer.streamed else "keep" for layer in layout.layers)


# -- places ---------------------------------------------------------------------------------------
class _Places:
    """Layers by where they are: updated `on_gpu` or `on_host`, with gradients in `own_slots` or in
    `shared_slots`. ConfigError for what the model does not have."""

    def __init__(self, layout: ModelLayout, demand: Demand, reasons: list[str]) -> None:
        self.layout, self.demand = layout, demand
        chosen = demand.activations or "keep"
        if isinstance(chosen, str):
            chosen = levels_of(layout, {chosen: len(layout.streamed)})
        self.activations = chosen
        # Of each block: bytes that wait on the host while backward begins, and the inputs' part.
        self.moved: dict[int, tuple[int, int]] = {}
        for index in layout.streamed if demand.kept else ():
            load, level = demand.kept[index], self.activations[index]
            inputs = load.boundary_bytes if level in AGAIN else 0
            if moved := load.moved_bytes(level):
                self.moved[index] = moved, inputs
        self.blocks = blocks = [layer for layer in layout.layers if layer.streamed]
        self.outside = [layer for layer in layout.layers if not layer.streamed]
        wanted = demand.resident_layers or 0
        if wanted > len(blocks):
            raise ConfigError(
                f"stronghold.resident_layers: got {wanted}, but the model has {len(blocks)} "
                'blocks; "all" keeps every one'
            )
        if wanted:
            why = demand.why("resident_layers")
            reasons.append(f"{wanted} of {len(blocks)} blocks stay on the gpu ({why})")
        # The last blocks: forward needs the first ones first, and they may still be updated then.
        num_streamed = len(blocks) - wanted
        self.streamed, self.kept = blocks[:num_streamed], blocks[num_streamed:]
        on_gpu = demand.resident_updates == "gpu"
        self.on_gpu = [*self.outside, *self.kept] if on_gpu else []
        self.updated_there = there = frozenset(layer.index for layer in self.on_gpu)
        self.on_host = [layer for layer in layout.layers if layer.index not in there]
        whole = not self.on_host and {"keep"} >= set(self.activations)
        whole = whole and demand.chunk is None  # blocks are called chunk by chunk
        if demand.whole and not whole:
            raise ConfigError(
                "a model is whole on the gpu when every layer stays and is updated there, and "
                'activations are kept: set stronghold.resident_layers to "all", '
                'stronghold.resident_updates to "gpu" and stronghold.activations to "keep"'
            )
        self.whole = whole if demand.whole is None else demand.whole
        if self.whole:
            reasons.append("the model stays whole on the gpu: no hooks, no copies")
        elif on_gpu and there:
            why = demand.why("resident_updates")
            reasons.append(f"resident layers are updated on the gpu ({why})")
        # Until the gate opens, gradients on the gpu stay where they were gathered. The gradients of
        # what is no block come early and late in backward.
        held = frozenset[int]() if demand.accumulate else there
        own = [layer for layer in layout.layers if not layer.streamed or layer.index in held]
        self.own_slots = [] if self.whole else own
        shared = [layer for layer in blocks if layer.index not in held]
        self.shared_slots = [] if self.whole else shared
        self.resident = frozenset(layer.index for layer in (*self.outside, *self.kept))

    @property
    def most_gradient_slots(self) -> int:
        """How many shared slots are of use: none when no block that shares them trains."""
        trainable = [layer for layer in self.shared_slots if layer.trainable_numel]
        if not self.demand.training or not trainable:
            return 0
        # Gradients that are used on the gpu never drain: there is nothing to overlap.
        there = all(layer.index in self.updated_there for layer in trainable)
        return 1 if there else MAX_GRADIENT_SLOTS

    def gpu_bytes(self, window: int, gradient_slots: int) -> dict[str, int]:
        """Every part of the gpu's peak, activations excepted, with so many slots."""
        training, formats = self.demand.training, self.demand.formats

        def total(layers: Iterable[LayerLayout], *arrays: str) -> int:
            return sum(array_bytes(e, formats, array) for e in layers for array in arrays)

        accumulates = self.demand.accumulate
        reduces = training and self.demand.reduces_in_room
        gathered = _largest(total([layer], "gradients") for layer in self.shared_slots)
        # Gradients of several chunks are added in fp32 beside the slot, in those of blocks.
        summed = training and self.demand.chunk is not None
        own_blocks = [layer for layer in self.own_slots if layer.streamed]
        sums = gradient_slots * _largest(sum_numel(e, formats) for e in self.shared_slots)
        sums += sum(sum_numel(layer, formats) for layer in own_blocks)
        trained = self.on_gpu if training else []
        by_torch = sum(
            each.num_parameters * formats[each.format].dtype.itemsize
            for layer in trained
            for each in layer.trainable_ranges
        )
        reduced = _largest(
            (each.end - each.begin) * formats[each.format].dtype.itemsize
            for layer in (self.on_host if reduces else [])
            for each in layer.trainable_ranges
        )
        return {
            "weight slots": window * _largest(total([e], "weights") for e in self.streamed),
            "gradient slots": gradient_slots * gathered,
            "fp32 sums of chunks": sums * 4 if summed else 0,
            "resident blocks": total(self.kept, "weights"),
            "outside the blocks": total(self.outside, "weights"),
            "gradients of resident layers": total(self.own_slots, "gradients") if training else 0,
            "rest of the masters": total(trained, "low"),
            "moments": total(trained, *moment_arrays(formats)),
            "accumulated gradients": total(trained, "accumulated") if accumulates else 0,
            "gradients (kept by torch)": by_torch if self.whole else 0,
            "gradients of other ranks": reduced,
        }


def _largest(numels: Iterable[int]) -> int:
    return max(numels, default=0)


def sum_numel(layer: LayerLayout, formats: Formats) -> int:
    """Items of a layer's fp32 sums of chunks: none where all its gradients are fp32."""
    dtypes = {formats[each.format].dtype for each in layer.trainable_ranges}
    return 0 if dtypes <= {torch.float32} else layer.trainable_numel


# -- slots ----------------------------------------------------------------------------------------
def _slots(places: _Places, total: Callable[[int, int], int]) -> tuple[int, int, str]:
    """Number of weight and gradient slots, and why. `total` of them: the bytes on the gpu."""
    demand, num_streamed = places.demand, len(places.streamed)
    most_gradients = places.most_gradient_slots
    budget = demand.gpu_budget_bytes
    if budget is None:
        wanted = demand.window or max(DEFAULT_WINDOW, 1 + (demand.prefetch or 0))
        window = min(wanted, num_streamed)
        why = demand.why("window") if demand.window else "no gpu budget"
        return window, most_gradients, f"window: {window} slots ({why})"
    fewest_gradients = min(1, most_gradients)
    smallest = total(min(1, num_streamed), fewest_gradients)
    if demand.window is not None:
        window = min(demand.window, num_streamed)
        need = total(window, fewest_gradients)
        if need > budget:
            raise _gpu_refusal(places, need, window, fewest_gradients, without_window=smallest)
        fit = (count for count in range(most_gradients, 0, -1) if total(window, count) <= budget)
        return window, next(fit, 0), f"window: {window} slots ({demand.why('window')})"
    if smallest > budget:
        window = min(1, num_streamed)
        raise _gpu_refusal(places, smallest, window, fewest_gradients, without_window=smallest)
    # A second gradient slot lets a drain overlap the next backward: worth more than a third
    # weight slot.
    fits = total(min(2, num_streamed), most_gradients) <= budget
    gradient_slots = most_gradients if fits else fewest_gradients
    window = last_that(
        lambda slots: total(slots, gradient_slots) <= budget, min(1, num_streamed), num_streamed
    )
    why = f"the most that {budget / MIB:.2f} MiB hold (stronghold.gpu_memory)"
    return window, gradient_slots, f"window: {window} slots, {why}"


def _gpu_refusal(
    places: _Places, need: int, window: int, gradient_slots: int, *, without_window: int
) -> BudgetError:
    """Why a plan of `need` bytes does not fit the gpu: what takes them, and the ways out.
    `without_window`: bytes of the smallest plan."""
    demand, budget = places.demand, places.demand.gpu_budget_bytes or 0
    kept = activation_parts(places.layout, places.activations, demand)
    parts = places.gpu_bytes(window, gradient_slots) | kept
    reserved = demand.reserve_bytes - sum(kept.values())
    if reserved > 0:
        parts["reserved for activations"] = reserved
    named = ", ".join(
        f"{name} {format_size(size)}"
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
        if size
    )
    if not places.blocks:
        which = "the model has no repeated blocks, so that all of it stays on the gpu, and"
    elif demand.pins("window"):
        which = f"stronghold.window of {window} slots"
    else:
        which = "the smallest plan"
    tokens = f" with {demand.tokens:,} tokens in a micro-batch" if demand.tokens else ""
    at_least = format_size(need, round_up=True)
    ways = [f"raise gpu_memory to at least {at_least}, if the gpu has it"]
    if places.blocks and demand.pins("window") and without_window < need:
        fewer = format_size(without_window, round_up=True)
        ways.append(f"leave window out, with which {fewer} suffice")
    if demand.resident_layers and demand.pins("resident_layers"):
        ways.append("lower stronghold.resident_layers")
    if demand.resident_updates == "gpu" and demand.pins("resident_updates"):
        ways.append('set stronghold.resident_updates to "host"')
    if not places.blocks:
        ways.append("name blocks in stronghold.layers, which are streamed then")
        if demand.training:
            ways.append("train fewer parameters")
            if demand.states.weight_bytes == 4:
                ways.append("train in bf16")
    if sum(kept.values()) > need // 2:  # the batch decides
        if demand.pins("activations"):
            ways.append("leave stronghold.activations out")
        if demand.sequences > 1:
            ways.append("lower the micro-batch")
            if demand.chunk is None and kept["activations of one block"]:
                ways.append("set stronghold.chunk to 1 (blocks then take one sequence at a time)")
        ways.append("shorten the sequences")
    return BudgetError(
        f"stronghold.gpu_memory: got {format_size(budget)}, but {which}{tokens} needs {at_least}: "
        f"{named}. You can {'; or '.join(ways)}",
        need_bytes=need,
    )


def _prefetch(places: _Places, window: int, total: Callable[[int, int], int]) -> int:
    """How many layers are fetched ahead; one slot of the window holds the layer that computes."""
    demand, num_streamed = places.demand, len(places.streamed)
    most = max(0, window - 1)
    wanted = most if demand.prefetch is None else demand.prefetch
    if wanted <= most or window == num_streamed:  # there are no more layers to fetch ahead
        return min(wanted, most)
    if demand.window is not None:
        remedy = f"stronghold.window to {wanted + 1}"
    else:
        need = total(min(wanted + 1, num_streamed), places.most_gradient_slots)
        remedy = f"stronghold.gpu_memory to {format_size(need, round_up=True)}"
    raise ConfigError(
        f"stronghold.prefetch: got {wanted}, expected less than the window of {window} slots, one "
        f"of which holds the layer that computes; lower prefetch to {most} or raise {remedy}"
    )


# -- the host and its files -----------------------------------------------------------------------
class _Host:
    """What is updated on the host: what of it lies in RAM, what spills, what passes between; of
    several ranks one's share. `traffic` is what a step reads from files and writes to them.
    BudgetError, before anything is allocated, where it cannot fit."""

    def __init__(self, places: _Places, reasons: list[str]) -> None:
        self._places = places
        self._demand = demand = places.demand
        self._kinds = kinds_of(demand.formats)
        if demand.meets_others and demand.nvme and demand.spill == "weights":
            raise ConfigError(
                'stronghold.nvme.spill: got "weights" (or DeepSpeed\'s offload_param on nvme), but '
                "several ranks have the weights once for all of them, in memory; set it to "
                '"masters", or leave it out'
            )
        if (demand.early_layers or 0) > len(places.layout.layers):
            raise ConfigError(
                f"stronghold.early_layers: got {demand.early_layers}, but the model has "
                f"{len(places.layout.layers)} layers"
            )
        # By layer its ranges: layers with equal ranges have equal bytes. By these the bytes of each
        # array that the layer has here, of what trains on this rank; and those of all its weights.
        self._layers = {e.index: e.ranges for e in places.on_host}
        self._trained: dict[Ranges, dict[str, int]] = {}
        self._whole: dict[Ranges, int] = {}
        for layer in places.on_host:
            if layer.ranges not in self._trained:
                self._trained[layer.ranges] = self._bytes_of(layer)
                sharers = demand.sharers("weights")
                self._whole[layer.ranges] = array_bytes(layer, demand.formats, "weights", sharers)
        self._largest = _largest(each["trained weights"] for each in self._trained.values())
        self.spilled = self._chosen(reasons)
        self.early = self._early(self.spilled)
        self.staging = self._staging(self.spilled)
        self.ring_entries = self._ring_entries(self.spilled)
        self.traffic = self._file_traffic()
        sums = self._sums(self.spilled, in_files=True)
        kinds = self._kinds if any(self.spilled) else {}
        self.nvme_bytes = {kind: sum(sums[a] for a in arrays) for kind, arrays in kinds.items()}
        self.host_bytes = self._host_bytes(self.spilled)
        self.offloaded_bytes = self._offloaded(self.spilled)
        if demand.nvme and demand.spill is None:
            named = [kind for kind, size in self.nvme_bytes.items() if size]
            what = f"{', '.join(named)} spill, the last layers first" if named else "nothing spills"
            reasons.append(f"nvme: {what}; host memory holds the rest")
        self._check()

    def _bytes_of(self, layer: LayerLayout) -> dict[str, int]:
        """Bytes of what trains of a layer on this rank. "trained weights" are part of the weights,
        and as many as its gradients."""
        demand = self._demand
        arrays = ["trained weights"]
        if demand.training:
            arrays += ["low", *self._kinds["moments"]]
            arrays.append("accumulated" if demand.accumulate else "gradients")
        made = {a: array_bytes(layer, demand.formats, a, demand.num_ranks) for a in arrays}
        return {array: nbytes for array, nbytes in made.items() if nbytes or array == arrays[0]}

    def _chosen(self, reasons: list[str]) -> Spilled:
        demand = self._demand
        if not demand.nvme:
            return self._arrays(0)
        if demand.homes is not None:
            layers = range(len(demand.homes.rows))
            return tuple(frozenset(demand.homes.staged(layer)) for layer in layers)
        if demand.spill is not None:
            reasons.append(f"nvme: {demand.spill} spill, and all that goes first (stronghold.nvme)")
            return self._arrays(DEPTHS[demand.spill])
        return self._fewest()

    def _arrays(self, num_kinds: int) -> Spilled:
        """All arrays of the first `num_kinds` kinds, at their layers' indices."""
        arrays = [array for kind in list(self._kinds)[:num_kinds] for array in self._kinds[kind]]
        found = {
            index: frozenset(
                a for a in arrays if (self._trained[of] | {"weights": self._whole[of]}).get(a)
            )
            for index, of in self._layers.items()
        }
        return tuple(found.get(index, frozenset()) for index in range(max(found, default=-1) + 1))

    def _fewest(self) -> Spilled:
        """What must spill so that the rest fits, in the order of [Note: what spills first]; all
        that may when that does not suffice."""
        num_kinds = len(self._kinds) - self._demand.meets_others  # all but weights
        spilled, most = self._arrays(0), self._arrays(num_kinds)
        ranks = range(len(most))
        if self._fits(spilled):
            return spilled
        for kind in list(self._kinds)[:num_kinds]:
            arrays, before = frozenset(self._kinds[kind]), spilled
            spilled = tuple(had | (has & arrays) for had, has in zip(spilled, most, strict=True))
            if self._fits(spilled):
                break
        else:
            return most
        # Enough, or more than that: bring the first layers back as long as it fits.
        few = last_that(
            lambda kept: self._fits(_mixed(before, spilled, ranks, kept)), 0, len(spilled)
        )
        return _mixed(before, spilled, ranks, few)

    def _fits(self, spilled: Spilled) -> bool:
        budget = self._demand.host_budget_bytes
        needed = self._offloaded(spilled) + sum(self._host_bytes(spilled).values())
        return budget is None or needed <= budget

    def _alike(self, spilled: Spilled) -> Iterator[tuple[dict[str, int], int, frozenset[str], int]]:
        """Of layers that are alike: bytes of what trains by array, and of all weights; what lies in
        files; and how many they are."""
        rows = Counter((ranges, spilled[index]) for index, ranges in self._layers.items())
        for (ranges, arrays), count in rows.items():
            yield self._trained[ranges], self._whole[ranges], arrays, count

    def _sums(self, spilled: Spilled, *, in_files: bool) -> Counter[str]:
        """Bytes of each array, of all layers, that lie in files or in memory."""
        sums: Counter[str] = Counter()
        for trained, whole, arrays, count in self._alike(spilled):
            for array, nbytes in {**trained, "weights": whole}.items():
                if array != "trained weights" and (array in arrays) == in_files:
                    sums[array] += count * nbytes
        return sums

    def _host_bytes(self, spilled: Spilled) -> dict[str, int]:
        """Every part of the host's peak."""
        sums, staging = self._sums(spilled, in_files=False), self._staging(spilled)
        early = self._early(spilled)
        return {
            "weights": sums["weights"],
            "rest of the masters": sums["low"],
            "moments": sum(sums[array] for array in self._kinds["moments"]),
            "held gradients": sums["gradients"],
            "accumulated gradients": sums["accumulated"],
            SECOND_ARRAYS: sum(self._second_bytes(index) for index in early),
            f"gradient ring ({RING_ENTRIES} entries)": self._ring_entries(spilled) * self._largest,
            f"staging ring ({staging.entries} pieces)": staging.nbytes,
        }

    def _offloaded(self, spilled: Spilled) -> int:
        """Bytes of activations that wait on the host, but for inputs that lie where the layer's
        gradients will ([Note: lent] of `memory.host`)."""
        total = 0
        for index, (moved, inputs) in self._places.moved.items():
            trained = self._trained[self._layers[index]] if index in self._layers else {}
            if trained.get("trained weights") and "gradients" not in spilled[index]:
                room = trained.get("gradients", 0)
                chunk = -(-inputs // self._demand.chunks)
                moved -= min(inputs, room // chunk * chunk) if chunk else 0
            total += moved
        return total

    def _early(self, spilled: Spilled) -> frozenset[int]:
        """The layers that are updated before the gate ([Note: early updates])."""
        demand = self._demand
        count = demand.early_layers or 0
        if not (count and demand.training) or demand.meets_others:
            return frozenset()
        able = [
            layer
            for layer in self._places.on_host
            if layer.trainable_numel == layer.numel > 0 and not spilled[layer.index]
        ]
        return spread(able, count)

    def _second_bytes(self, index: int) -> int:
        """Bytes of a layer's second set of arrays."""
        ranges = self._layers[index]
        trained = self._trained[ranges]
        arrays = ("low", *self._kinds["moments"])
        return self._whole[ranges] + sum(trained.get(array, 0) for array in arrays)

    def _ring_entries(self, spilled: Spilled) -> int:
        # Gradients that are held in host memory need no ring; those that spill pass it.
        passing = self._demand.accumulate or any("gradients" in arrays for arrays in spilled)
        return RING_ENTRIES if passing and self._largest and self._demand.training else 0

    def _staging(self, spilled: Spilled) -> Staging:
        """The ring that `spilled` needs."""
        if not any(spilled):
            return Staging()
        page, largest, updates, fetches = self._places.layout.page_numel, 0, False, False
        smallest: float = page * self._demand.states.weight_bytes
        for ranges, arrays in {(self._layers[i], spilled[i]) for i in self._layers}:
            trained = self._trained[ranges]
            if "weights" in arrays:
                fetches = True
                largest = max(largest, self._whole[ranges])
                smallest = max(smallest, *(page * self._item(e, "weights") for e in ranges))
            if arrays and trained["trained weights"] and self._demand.training:
                updates = True
                every = {array: trained.get(array, 0) for array in arrays}
                every["weights"] = trained["trained weights"] if "weights" in arrays else 0
                largest = max(largest, sum(every.values()))
                for each in ranges:
                    if each.trainable:
                        items = sum(self._item(each, array) for array in arrays)
                        smallest = max(smallest, page * items)
        chosen = max(int(smallest), min(self._demand.piece_bytes or PIECE_BYTES, largest))
        return Staging(
            update_entries=UPDATE_ENTRIES if updates else 0,
            fetch_entries=FETCH_ENTRIES if fetches else 0,
            piece_bytes=-(-chosen // PAGE_BYTES) * PAGE_BYTES,
        )

    def _item(self, each: Range, array: str) -> float:
        """Bytes of an array for one element of a range."""
        made = self._demand.formats[each.format]
        if array in ("weights", "gradients"):
            return made.dtype.itemsize
        dtype = torch.float32 if array == "accumulated" else made.trained.dtypes.get(array)
        return 0 if dtype is None else dtype.itemsize / group_size(array)

    def _file_traffic(self) -> tuple[int, int]:
        """Bytes read and written per step: an update reads what is spilled and writes it back, but
        gradients are written as they come; sums over micro-batches are read by every one but the
        first, and written by each; fetches read weights twice per micro-batch at most."""
        read = written = 0
        micro_batches = self._demand.micro_batches
        for trained, whole, arrays, count in self._alike(self.spilled):
            for array in arrays:
                own = trained.get("trained weights" if array == "weights" else array, 0)
                nbytes = own * (micro_batches if array == "accumulated" else 1)
                read += count * nbytes
                written += count * nbytes
                if array == "weights":
                    read += count * 2 * micro_batches * whole
        return read, written

    def _check(self) -> None:
        demand = self._demand
        on_disk, capacity = sum(self.nvme_bytes.values()), demand.nvme_capacity_bytes
        if capacity is not None and on_disk > capacity:
            each = f" on each of {demand.num_ranks} ranks" if demand.num_ranks > 1 else ""
            raise BudgetError(
                "stronghold.nvme.capacity: what spills needs "
                f"{format_size(on_disk, round_up=True)}{each}, {format_size(capacity)} are "
                "allowed; raise it, or give more to stronghold.host_memory so that less spills",
                need_bytes=on_disk,
            )
        wanted = self.host_bytes | {"offloaded activations": self.offloaded_bytes}
        need, budget = sum(wanted.values()), demand.host_budget_bytes
        if budget is None or need <= budget:
            return
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in wanted.items() if size)
        at_least = format_size(need, round_up=True)
        advice = (
            f"raise stronghold.host_memory or add RAM to at least {at_least}, or train fewer "
            "parameters"
        )
        second = self.host_bytes[SECOND_ARRAYS]
        if second and demand.pins("early_layers"):
            advice += f"; or lower stronghold.early_layers, which takes {format_size(second)}"
        if demand.states.kind == EXACT and demand.states.low_bytes == 2:  # of bf16 weights
            moments, lows = self.host_bytes["moments"], self.host_bytes["rest of the masters"]
            exact = demand.states
            lean = states_of(exact.dtype, LEAN, exact.moments)
            kept = moments * lean.moment_bytes / exact.moment_bytes if exact.moments else 0
            saved = lows // 2 + moments - int(kept)
            if saved:
                advice += (
                    '; or set stronghold.states to "lean", which rounds otherwise (24-bit masters, '
                    f"8-bit moments) and saves about {format_size(saved)}"
                )
        if not demand.nvme:
            advice += "; or name a directory on an NVMe disk in stronghold.nvme.path: "
            advice += f"{format_size(need - budget)} and more can lie there"
        elif demand.spill not in (None, "weights"):
            advice += f'; or leave stronghold.nvme.spill ("{demand.spill}") out: more can spill'
        raise BudgetError(
            f"host memory: the plan needs {at_least} ({parts}), {format_size(budget)} are "
            f"available; {advice}",
            need_bytes=need,
        )


def spread(layers: Sequence[LayerLayout], count: int) -> frozenset[int]:
    """Choose `count` of `layers`, spread evenly over their bytes. Returns their indices.

    All layers if there are fewer.
    """
    count = min(count, len(layers))
    total = sum(layer.trainable_numel for layer in layers)
    chosen: list[int] = []
    below = 0
    for position, layer in enumerate(layers):
        below += layer.trainable_numel
        # The layer in the middle of each of `count` equal parts is due. If the layers are uneven,
        # the last ones are needed to reach the count.
        missing = count - len(chosen)
        is_due = count * below >= (len(chosen) + 0.5) * total
        is_needed = len(layers) - position == missing
        if missing > 0 and (is_due or is_needed):
            chosen.append(layer.index)
    return frozenset(chosen)


def last_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` for which `fits` holds.

    It must hold for `low`, and for no number above one for which it does not hold.
    """
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda count: not fits(count))


def _mixed(before: Spilled, after: Spilled, ranks: Sequence[int], kept: int) -> Spilled:
    """`before` for the layers whose rank is below `kept`, `after` for the others."""
    rows = zip(ranks, before, after, strict=True)
    return tuple(had if rank < kept else has for rank, had, has in rows)
