"""Memory: where each layer lies, and the bytes of every tier.

Pure: no tensors, no threads. The bytes are the formula that a run must meet exactly (a test
compares them). Of several ranks they are those of the rank with the most.

[Note: what spills first] Kinds in the order of how seldom their bytes are needed: moments (read and
written once a step), the master remainder, last the weights, which every pass reads. Within a kind
the last layers spill first. Updates wait for the clip barrier, and come in forward order. So the
disk is idle at the turn from one step to the next, and a few layers ahead when the first spilled
one is needed.

[Note: early updates] A layer that is updated before the norm is known has its arrays twice on the
host: an early update reads one set and writes the other. A layer can have a second set if it lies
in memory as a whole, and all of its parameters train. Several ranks have none: they agree first on
which parameters have gradients.

The early layers are spread evenly over the depth. Gradients come in the order L..1 in a backward of
B seconds, and the next forward needs weights in the order 1..L within F seconds. If all updates
take D seconds, those of a share e of the layers can run in backward, and the others behind the
clip barrier. A step takes about

    max(B, e D) + max(F, (1 - e) D)

which is max(F + B, D), the least there can be, for e = B / D. Layer i can be updated from B i / L
before the end of backward to F i / L after it. These spans lie in each other. So backward takes its
share of the layers above any depth, and forward the rest: the lane of updates never waits.

[Note: the staging ring] Pieces of one size in host memory. An update's piece holds elements of all
spilled arrays of a layer: one is read, one is updated, one is written, one more is read ahead. A
fetch's piece holds elements of weights: one is read, one waits for its slot, one is copied. The two
have pieces of their own, for an update must not wait for a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from stronghold.errors import BudgetError, ConfigError, ErrorPage, format_size
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.model.packed_weight import DTYPES, STORED_BYTES
from stronghold.optim.states import EXACT, LEAN, PAGE_BYTES, page_numel, states_of
from stronghold.plan.cost import REASONS, Demand, owners, spared

# Without a budget: one computes, one is still in use, two are on their way.
DEFAULT_WINDOW = 4
SLOTS = ((3, 2), (2, 2), (2, 1), (1, 1))  # for weights and for gradients: the first that fit
SUM_BUFFERS = 2  # for gradients on their way to a sum: one is filled while the other is added
UPDATE_ENTRIES, FETCH_ENTRIES = 4, 3  # [Note: the staging ring]
# Beside milliseconds of a disk the tenths that a hand-over between lanes takes do not count.
PIECE_BYTES = 32 << 20
SECOND_ARRAYS = "second arrays of early updates"
# How many kinds of [Note: what spills first] spill, for each word of stronghold.nvme.spill.
DEPTHS = {"moments": 1, "masters": 2, "weights": 3}

Layers = list[LayerLayout]
Spilled = tuple[frozenset[str], ...]  # by layer, its arrays that are to lie in files


# -- places ---------------------------------------------------------------------------------------
class Places:
    """The layers of a model by where they lie, and the GPU's bytes for any number of slots.

    activations     the level of every layer
    outside         layers that are no blocks, which stay on the GPU
    streamed, kept  blocks that pass the window, and blocks that stay on the GPU
    on_gpu, on_host layers by the device of their updates
    own_slots       layers with a gradient slot that no other uses; `shared_slots` take turns
    slot_bytes, gradient_slot_bytes  of one slot for weights, or for gradients
    activation_bytes, offloaded_bytes  of activations in backward, on the GPU and on the host

    A plan asks for several numbers of slots, so sums over layers are made once. ConfigError for
    settings that the model does not have.
    """

    def __init__(self, layout: ModelLayout, demand: Demand) -> None:
        self.layout, self.demand = layout, demand
        chosen = demand.activations or "keep"
        if isinstance(chosen, str):
            chosen = levels_of(layout, {chosen: len(layout.streamed)})
        self.activations = chosen
        self.outside = [layer for layer in layout.layers if not layer.streamed]
        self.streamed, self.kept = _streamed_and_kept(layout, demand)
        stay = [*self.outside, *self.kept]
        self.resident = frozenset(layer.index for layer in stay)
        self.on_gpu = stay if demand.resident_updates == "gpu" else []
        self.updated_on_gpu = frozenset(layer.index for layer in self.on_gpu)
        self.on_host = [x for x in layout.layers if x.index not in self.updated_on_gpu]
        # Until the clip barrier, gradients on the GPU stay where they were gathered. Those of what
        # is no block come early and late in backward.
        held = frozenset[int]() if demand.accumulate else self.updated_on_gpu
        self.own_slots = [x for x in layout.layers if not x.streamed or x.index in held]
        self.shared_slots = [x for x in layout.layers if x.streamed and x.index not in held]
        self.activation_bytes = activation_bytes(layout, chosen, demand)
        self._later_activations = later_activation_bytes(layout, chosen, demand)
        self.offloaded_bytes = 0
        if demand.work:
            self.offloaded_bytes = sum(
                demand.work[k].moved_bytes(chosen[k]) for k in layout.streamed
            )
        self.slot_bytes = max((x.weight_bytes for x in self.streamed), default=0)
        self.gradient_slot_bytes = max((x.gradient_bytes for x in self.shared_slots), default=0)
        self._sums_in_slot, self._own_sums = self._chunk_sum_bytes()
        trained = self.on_gpu if demand.training else []
        own_gradients = self.own_slots if demand.training else []
        self._beside_slots = {
            "resident blocks": _bytes(self.kept, "weights"),
            "outside the blocks": _bytes(self.outside, "weights"),
            "gradients of resident layers": _bytes(own_gradients, "gradients"),
            "master remainder": _bytes(trained, "low"),
            "moments": _bytes(trained, *layout.moments),
            "accumulated gradients": _bytes(trained, "accumulated") if demand.accumulate else 0,
        }

    @property
    def num_blocks(self) -> int:
        return len(self.streamed) + len(self.kept)

    @property
    def most_gradient_slots(self) -> int:
        """How many shared slots are of use: none when no block that shares them trains."""
        trained = {layer.index for layer in self.shared_slots if layer.states}
        if not self.demand.training or not trained:
            return 0
        # Gradients that are used on the gpu are never offloaded: there is nothing to overlap.
        return 1 if self.updated_on_gpu >= trained else 2

    def gpu_parts(self, window: int, gradient_slots: int) -> dict[str, int]:
        """Bytes of each part of the GPU's peak, without activations, with so many slots."""
        return {
            "weight slots": window * self.slot_bytes,
            "gradient slots": gradient_slots * self.gradient_slot_bytes,
            "fp32 sums of chunks": gradient_slots * self._sums_in_slot + self._own_sums,
            **self._beside_slots,
        }

    def gpu_buffers(self, window: int, gradient_slots: int) -> int:
        """The sum of `gpu_parts`."""
        return sum(self.gpu_parts(window, gradient_slots).values())

    def gpu_total(self, window: int, gradient_slots: int) -> int:
        """Bytes of the GPU's peak with so many slots. Activations count, or the room for those of a
        larger batch, or the room reserved for them."""
        activations = (self.activation_bytes, self._later_activations, self.demand.reserve_bytes)
        return max(activations) + self.gpu_buffers(window, gradient_slots)

    def wanted_slots(self) -> Iterator[tuple[int, int]]:
        """Numbers of slots for weights and for gradients, by SLOTS, as far as they are of use. A
        window of the config decides the former."""
        for window, gradient_slots in SLOTS:
            slots = min(self.demand.window or window, len(self.streamed))
            yield slots, min(gradient_slots, self.most_gradient_slots)

    def _chunk_sum_bytes(self) -> tuple[int, int]:
        """Bytes of the fp32 sums of chunks of blocks: beside each gradient slot, and beside the
        gradients that have no slot."""
        if not self.demand.training or self.demand.chunk is None:
            return 0, 0
        unshared = (x for x in self.own_slots if x.streamed or x.in_block)
        return max(map(sum_bytes, self.shared_slots), default=0), sum(map(sum_bytes, unshared))


def levels_of(layout: ModelLayout, counts: Mapping[str, int]) -> tuple[str, ...]:
    """By layer, of so many blocks with each level, the first blocks' first. ConfigError when the
    numbers are not the model's."""
    of_block = iter([level for level, count in counts.items() for _ in range(count)])
    if sum(counts.values()) != len(layout.streamed):
        raise ConfigError(
            f"stronghold.activations: got levels of {sum(counts.values())} blocks, expected "
            f"{len(layout.streamed)}, as many as the model has"
        )
    return tuple(next(of_block) if layer.streamed else "keep" for layer in layout.layers)


def _streamed_and_kept(layout: ModelLayout, demand: Demand) -> tuple[Layers, Layers]:
    """The blocks that pass the window, and those that stay on the GPU."""
    blocks = [layer for layer in layout.layers if layer.streamed]
    num_kept = demand.resident_layers or 0
    if num_kept > len(blocks):
        raise ConfigError(
            f"stronghold.resident_layers: got {num_kept}, but the model has {len(blocks)} "
            'blocks; "all" keeps every one'
        )
    # Evenly over the depth, the first block among them: behind the clip barrier the host updates
    # streamed blocks in forward order, and the compute of the residents between them hides it.
    numbers = {place * len(blocks) // num_kept for place in range(num_kept)}
    streamed = [block for number, block in enumerate(blocks) if number not in numbers]
    return streamed, [blocks[number] for number in sorted(numbers)]


def _bytes(layers: Iterable[LayerLayout], *arrays: str) -> int:
    """Bytes of these arrays of these layers."""
    return sum(layer.array_bytes(array) for layer in layers for array in arrays)


def sum_bytes(layer: LayerLayout) -> int:
    """Bytes of a layer's fp32 sums of chunks: none where its gradients are fp32."""
    if layer.states is None or layer.states.dtype is torch.float32:
        return 0
    return layer.array_bytes("accumulated")


def last_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to `high` for which `fits`, once false always false, holds; for `low`
    it does."""
    while low < high:
        middle = (low + high) // 2 + 1
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


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


# -- slots ----------------------------------------------------------------------------------------
def choose_slots(places: Places) -> tuple[int, int, str]:
    """(slots for weights, slots for gradients, the reason), as the config has them, or as they fit.

    The first of SLOTS that fit, where blocks may stay in what is left. Else the most that fit:
    layers that are still in the window are not fetched again when the direction turns. BudgetError
    if none fit.
    """
    demand, num_streamed = places.demand, len(places.streamed)
    budget = demand.gpu_budget_bytes
    if budget is None:
        window, gradient_slots = demand.window or DEFAULT_WINDOW, places.most_gradient_slots
        why = demand.why("window") if demand.window else "no gpu budget"
        return min(window, num_streamed), gradient_slots, why
    tried = list(places.wanted_slots())
    fitting = (slots for slots in tried if places.gpu_total(*slots) <= budget)
    window, gradient_slots = next(fitting, (-1, 0))
    if window < 0:
        raise _gpu_refusal(places, *tried[-1])
    if demand.window is not None:
        return window, gradient_slots, demand.why("window")
    if demand.training and demand.layers_may_move:
        return window, gradient_slots, REASONS["window"]
    room = budget - places.gpu_total(0, gradient_slots)
    window = min(num_streamed, room // places.slot_bytes) if places.slot_bytes else num_streamed
    why = f"the most that {format_size(budget)} hold (stronghold.gpu_memory)"
    return window, gradient_slots, why


def _gpu_refusal(places: Places, window: int, gradient_slots: int) -> BudgetError:
    """Why not even so many slots fit the GPU: what takes its bytes, and the ways out."""
    demand, budget = places.demand, places.demand.gpu_budget_bytes or 0
    need = places.gpu_total(window, gradient_slots)
    kept = activation_parts(places.layout, places.activations, demand)
    parts = places.gpu_parts(window, gradient_slots) | kept
    reserved = need - sum(parts.values())
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
    ways += _ways_with_fewer_buffers(places, need)
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


def _ways_with_fewer_buffers(places: Places, need: int) -> Iterator[str]:
    """Changes of the config with which weights, gradients and states take fewer bytes."""
    demand = places.demand
    smallest = places.gpu_total(min(1, len(places.streamed)), min(1, places.most_gradient_slots))
    if places.num_blocks and demand.pins("window") and smallest < need:
        fewer = format_size(smallest, round_up=True)
        yield f"leave window out, with which {fewer} suffice"
    if demand.resident_layers and demand.pins("resident_layers"):
        yield "lower stronghold.resident_layers"
    if demand.resident_updates == "gpu" and demand.pins("resident_updates"):
        yield 'set stronghold.resident_updates to "host"'
    if not places.num_blocks:
        yield "name blocks in stronghold.layers, which are streamed then"
        if demand.training:
            yield "train fewer parameters"
            if demand.states.weight_bytes == 4:
                yield "train in bf16"


def _ways_with_fewer_activations(demand: Demand, kept: dict[str, int]) -> Iterator[str]:
    """Changes of the config with which activations take fewer bytes, if the batch decides.

    `kept`: bytes of activations by kind.
    """
    if demand.pins("activations"):
        yield "leave stronghold.activations out"
    if demand.sequences > 1:
        yield "lower the micro-batch"
        if demand.chunk is None and kept["activations of one block"]:
            yield "set stronghold.chunk to 1 (blocks then take one sequence at a time)"
    yield "shorten the sequences"


# -- the host and files ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The ring: pieces for updates and for fetches, and the bytes of each."""

    update_entries: int = 0
    fetch_entries: int = 0
    piece_bytes: int = PAGE_BYTES

    @property
    def entries(self) -> int:
        return self.update_entries + self.fetch_entries

    @property
    def nbytes(self) -> int:
        return self.entries * self.piece_bytes


class HostMemory:
    """The arrays and buffers on the host and in files, for the layers that are updated there.

    spilled     by layer, its arrays that lie in files
    early       layers that are updated before the clip barrier
    host_bytes, nvme_bytes  bytes by what takes them
    file_traffic  bytes that a step reads from files, and bytes that it writes

    BudgetError, before anything is allocated, if they cannot fit. ConfigError for settings that
    cannot hold together.
    """

    def __init__(self, places: Places) -> None:
        self._places, self._demand, self._on_host = places, places.demand, places.on_host
        demand, num_layers = places.demand, len(places.layout.layers)
        if demand.num_ranks > 1 and demand.nvme and demand.spill == "weights":
            raise ConfigError(
                'stronghold.nvme.spill: got "weights" (or DeepSpeed\'s offload_param on nvme), but '
                "several ranks have the weights once for all of them, in memory; set it to "
                '"masters", or leave it out'
            )
        if (demand.early_layers or 0) > num_layers:
            raise ConfigError(
                f"stronghold.early_layers: got {demand.early_layers}, but the model has "
                f"{num_layers} layers"
            )
        self.spilled = self._choose_spilled()
        self.early = self._early_layers(self.spilled)
        self.staging = self._staging(self.spilled)
        self.host_bytes = self._host_bytes(self.spilled)
        self.nvme_bytes = self._nvme_bytes()
        self.file_traffic = max(map(self._file_traffic, self._owned()))
        self._check_files()
        self._check_memory()

    # -- bytes ------------------------------------------------------------------------------------
    def _owned(self) -> list[Layers]:
        """The layers that each rank updates. It alone has their arrays but the weights."""
        layers, num_ranks = self._on_host, self._demand.num_ranks
        if num_ranks == 1:
            return [layers]
        owner = owners([layer.gradient_bytes for layer in layers], num_ranks)
        return [
            [x for x, own in zip(layers, owner, strict=True) if own == k] for k in range(num_ranks)
        ]

    def _host_bytes(self, spilled: Spilled) -> dict[str, int]:
        """Bytes of each part of the host's peak, on the rank with the most."""
        places, demand, moments = self._places, self._demand, self._places.layout.moments
        waiting = "accumulated" if demand.accumulate else "gradients"
        arrays = ["weights", *(["low", *moments, waiting] if demand.training else [])]
        all_sums = [
            Counter(
                {a: _bytes((x for x in layers if a not in spilled[x.index]), a) for a in arrays}
            )
            for layers in self._owned()
        ]
        sums = max(all_sums, key=lambda of_rank: of_rank.total() - of_rank["weights"])
        if demand.num_ranks > 1:
            sums["weights"] = self._shared_weight_bytes()
        staging, early = self._staging(spilled), self._early_layers(spilled)
        second = (layer for layer in places.on_host if layer.index in early)
        return {
            "weights": sums["weights"],
            "master remainder": sums["low"],
            "moments": sum(sums[array] for array in moments),
            "held gradients": sums["gradients"],
            "accumulated gradients": sums["accumulated"],
            SECOND_ARRAYS: _bytes(second, "weights", "low", *moments),
            f"gradient ring ({SUM_BUFFERS} entries)": SUM_BUFFERS * self.ring_bytes,
            f"staging ring ({staging.entries} pieces)": staging.nbytes,
        }

    def _shared_weight_bytes(self) -> int:
        """One rank's part of its node's weights. Each layer has whole pages, and words show its
        state (`ranks`)."""
        layers, on_node = self._on_host, self._demand.ranks_per_node
        words = 8 * (len(layers) + on_node + 1)
        return (_padded(words) + sum(_padded(x.weight_bytes) for x in layers)) // on_node

    @property
    def ring_bytes(self) -> int:
        """Bytes of each buffer for gradients on their way to a sum; 0 if none are summed."""
        demand = self._demand
        if not (demand.training and demand.accumulate):
            return 0
        return max((layer.gradient_bytes for layer in self._on_host), default=0)

    def _nvme_bytes(self) -> dict[str, int]:
        """Bytes of each kind of arrays in files, on the rank with the most; empty if nothing
        spills."""
        if not any(self.spilled):
            return {}

        def of_rank(layers: Layers) -> dict[str, int]:
            return {
                kind: sum(
                    _padded(layer.array_bytes(array))
                    for layer in layers
                    for array in self.spilled[layer.index].intersection(arrays)
                )
                for kind, arrays in self._kinds.items()
            }

        return max(map(of_rank, self._owned()), key=lambda sizes: sum(sizes.values()))

    # -- what spills ------------------------------------------------------------------------------
    @property
    def _kinds(self) -> dict[str, tuple[str, ...]]:
        """The arrays of each kind, in the order of [Note: what spills first]."""
        moments = self._places.layout.moments
        return {"moments": moments, "master remainder": ("low",), "weights": ("weights",)}

    def _choose_spilled(self) -> Spilled:
        """The arrays that lie in files: where they lie already; the kinds that the config names; or
        as few as possible. None without NVMe."""
        demand = self._demand
        if not demand.nvme:
            return self._arrays_of_kinds(0)
        if demand.in_files is not None:
            return tuple(map(frozenset, demand.in_files))
        if demand.spill is not None:
            return self._arrays_of_kinds(DEPTHS[demand.spill])
        return self._fewest_that_fit()

    def _arrays_of_kinds(self, num_kinds: int) -> Spilled:
        """All arrays of the first `num_kinds` kinds, at their layers' indices."""
        arrays = [array for kind in list(self._kinds.values())[:num_kinds] for array in kind]
        rows = [frozenset[str]()] * len(self._places.layout.layers)
        for layer in self._on_host:
            rows[layer.index] = frozenset(array for array in arrays if layer.array_bytes(array))
        return tuple(rows)

    def _fewest_that_fit(self) -> Spilled:
        """The fewest arrays that must spill so that the others fit, in the order of [Note: what
        spills first]. All that may spill if that is not enough."""
        demand = self._demand

        def fits(spilled: Spilled) -> bool:
            need = self._places.offloaded_bytes + sum(self._host_bytes(spilled).values())
            return demand.host_budget_bytes is None or need <= demand.host_budget_bytes

        most = len(DEPTHS) - (demand.num_ranks > 1)  # ranks share the weights, in memory
        choices = [self._arrays_of_kinds(num_kinds) for num_kinds in range(most + 1)]
        number = next((number for number, all_of in enumerate(choices) if fits(all_of)), None)
        if number is None:
            return choices[-1]
        # As many of the first layers as fit need a kind less in files.
        before, after = choices[max(0, number - 1)], choices[number]
        first = last_that(lambda count: fits((*before[:count], *after[count:])), 0, len(after))
        return (*before[:first], *after[first:])

    # -- early updates ----------------------------------------------------------------------------
    def _early_layers(self, spilled: Spilled) -> frozenset[int]:
        """The layers that are updated before the clip barrier ([Note: early updates])."""
        demand = self._demand
        if not demand.early_layers or not demand.training or demand.num_ranks > 1:
            return frozenset()
        able = [
            layer
            for layer in self._on_host
            if layer.trained_numel and not layer.frozen_bytes and not spilled[layer.index]
        ]
        return spread(able, demand.early_layers)

    # -- files ------------------------------------------------------------------------------------
    def _staged_bytes(self, layer: LayerLayout, arrays: Iterable[str]) -> int:
        """Bytes of these arrays in an update. Of the weights, only the trained ones count."""
        return sum(layer.array_bytes("gradients" if a == "weights" else a) for a in arrays)

    def _staging(self, spilled: Spilled) -> Staging:
        """The ring that `spilled` needs ([Note: the staging ring])."""
        demand, on_host = self._demand, self._on_host
        fetched = [x.weight_bytes for x in on_host if "weights" in spilled[x.index]]
        updated: list[int] = []
        page_bytes = PAGE_BYTES  # a piece has a page of every array at least
        for layer in on_host:
            arrays = spilled[layer.index]
            if demand.training and layer.states is not None and arrays:
                updated.append(self._staged_bytes(layer, arrays))
                item_bytes = layer.states.item_bytes(arrays)
                numel = page_numel(layer.states.kind)
                page_bytes = max(page_bytes, _padded(int(numel * item_bytes)))
        wanted_bytes = min(demand.piece_bytes or PIECE_BYTES, max(fetched + updated, default=0))
        return Staging(
            update_entries=UPDATE_ENTRIES if updated else 0,
            fetch_entries=FETCH_ENTRIES if fetched else 0,
            piece_bytes=max(page_bytes, _padded(wanted_bytes)),
        )

    def _file_traffic(self, layers: Layers) -> tuple[int, int]:
        """Bytes that a step reads from the files of these layers, and bytes that it writes.

        An update reads what is spilled and writes it back. Fetches read weights twice per
        micro-batch at most.
        """
        staged = sum(self._staged_bytes(layer, self.spilled[layer.index]) for layer in layers)
        fetched = sum(x.weight_bytes for x in layers if "weights" in self.spilled[x.index])
        return staged + 2 * self._demand.micro_batches * fetched, staged

    # -- reasons and refusals ---------------------------------------------------------------------
    def reasons(self) -> Iterator[str]:
        """Sentences about arrays in files and early updates, for the plan's reasons."""
        demand = self._demand
        if demand.nvme and demand.spill is None:
            kinds = [kind for kind, nbytes in self.nvme_bytes.items() if nbytes]
            what = f"{', '.join(kinds)} spill, the last layers first" if kinds else "nothing spills"
            yield f"nvme: {what}; host memory holds the rest"
        elif demand.nvme and demand.in_files is None:
            yield f"nvme: {demand.spill} spill, and all that goes first (stronghold.nvme)"
        if demand.early_layers and demand.training:
            why = demand.why("early_layers")
            if self.early:
                second = format_size(self.host_bytes[SECOND_ARRAYS])
                yield (
                    f"{len(self.early)} layers are updated before the norm is known, into a second "
                    f"set of arrays: {second} ({why})"
                )
            else:
                yield (
                    f"no layer is updated before the norm is known ({why}): none is updated on the "
                    "host of one rank, with all of its arrays in memory and no frozen parameter"
                )

    def _check_files(self) -> None:
        demand, on_disk = self._demand, sum(self.nvme_bytes.values())
        capacity = demand.nvme_capacity_bytes
        if capacity is not None and on_disk > capacity:
            on_ranks = f" on each of {demand.num_ranks} ranks" if demand.num_ranks > 1 else ""
            raise BudgetError(
                "stronghold.nvme.capacity: what spills needs "
                f"{format_size(on_disk, round_up=True)}{on_ranks}, {format_size(capacity)} are "
                "allowed; raise it, or give more to stronghold.host_memory so that less spills",
                need_bytes=on_disk,
                page=ErrorPage.DISK,
            )

    def _check_memory(self) -> None:
        wanted = self.host_bytes | {"offloaded activations": self._places.offloaded_bytes}
        need, budget = sum(wanted.values()), self._demand.host_budget_bytes
        if budget is None or need <= budget:
            return
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in wanted.items() if size)
        at_least = format_size(need, round_up=True)
        raise BudgetError(
            f"host memory: the plan needs {at_least} ({parts}), {format_size(budget)} are "
            f"available; {'; or '.join(self._ways_with_less(need, budget))}",
            need_bytes=need,
            page=ErrorPage.HOST_MEMORY,
        )

    def _ways_with_less(self, need: int, budget: int) -> Iterator[str]:
        """Changes with which the plan fits the host, or takes less of it."""
        demand = self._demand
        at_least = format_size(need, round_up=True)
        yield (
            f"raise stronghold.host_memory or add RAM to at least {at_least}, or train fewer "
            "parameters"
        )
        second = self.host_bytes[SECOND_ARRAYS]
        if second and demand.pins("early_layers"):
            yield f"lower stronghold.early_layers, which takes {format_size(second)}"
        if saved := self._saved_by_lean_states():
            yield (
                'set stronghold.states to "lean", which rounds otherwise (24-bit masters, 8-bit '
                f"moments) and saves about {format_size(saved)}"
            )
        if saved := self._saved_by_packing():
            yield (
                'set stronghold.frozen to "nf4", which rounds frozen weights and saves about '
                f"{format_size(saved)}"
            )
        if not demand.nvme:
            yield (
                "name a directory on an NVMe disk in stronghold.nvme.path: "
                f"{format_size(need - budget)} and more can lie there"
            )
        elif demand.spill not in (None, "weights"):
            yield f'leave stronghold.nvme.spill ("{demand.spill}") out: more can spill'

    def _saved_by_packing(self) -> int:
        """Bytes of host memory that packed frozen weights of blocks save; 0 if some are packed."""
        blocks = (*self._places.streamed, *self._places.kept)
        if any(layer.frozen_dtypes - set(DTYPES) for layer in blocks):
            return 0
        share = 1 - STORED_BYTES / self._demand.states.weight_bytes
        return max(0, int(share * sum(layer.frozen_bytes for layer in blocks)))

    def _saved_by_lean_states(self) -> int:
        """Bytes of host memory that lean states would save; 0 if they are no choice."""
        exact = self._demand.states
        if exact.kind != EXACT or exact.low_bytes != 2:  # of bf16 weights
            return 0
        moments, remainders = self.host_bytes["moments"], self.host_bytes["master remainder"]
        lean = states_of(exact.dtype, LEAN, exact.moments)
        lean_moments = moments * lean.moment_bytes / exact.moment_bytes if exact.moments else 0
        return remainders // 2 + moments - int(lean_moments)


def _padded(nbytes: int) -> int:
    """Rounded up to whole pages, which an array in files takes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def spread(layers: Sequence[LayerLayout], count: int) -> frozenset[int]:
    """The indices of `count` of `layers` (all where there are fewer), evenly over their bytes."""
    count = min(count, len(layers))
    total = sum(layer.trained_numel for layer in layers)
    chosen: list[int] = []
    below = 0
    for position, layer in enumerate(layers):
        below += layer.trained_numel
        # The middle of each of `count` equal parts; as many as are left, where layers are uneven.
        is_due = count * below >= (len(chosen) + 0.5) * total
        if len(chosen) < count and (is_due or len(layers) - position == count - len(chosen)):
            chosen.append(layer.index)
    return frozenset(chosen)
