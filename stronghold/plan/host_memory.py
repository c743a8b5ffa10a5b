"""The host's memory and files: what lies where, which layers are early, and the rings.

Pure: no tensors, no threads. The bytes are the formula that a run must meet exactly (a test
compares them). Of several ranks they are those of the rank with the most.

[Note: what spills first] Kinds in the order of how seldom their bytes are needed: moments (read and
written once a step), the master remainder, last the weights, which every pass reads. Within a kind
the last layers spill first, because updates wait for the gate: they come in forward order, so at
the turn from one step to the next nothing is read, and the disk is a few layers ahead when the
first spilled one is needed.

[Note: early updates] A layer that is updated before the norm is known has its arrays twice on the
host: an early update reads one set and writes the other. A layer can have a second set if it lies
in memory as a whole, all of its parameters train, and no other rank has part of it.

The early layers are spread evenly over the depth. Gradients come in the order L..1 in a backward of
B seconds, and the next forward needs weights in the order 1..L within F seconds. If all updates
take D seconds, those of a share e of the layers can run in backward, and the others behind the
gate. A step takes about

    max(B, e D) + max(F, (1 - e) D)

which is max(F + B, D), the least there can be, for e = B / D. Layer i can be updated from B i / L
before the end of backward to F i / L after it. These spans lie in each other. So backward takes its
share of the layers above any depth, and forward the rest: the lane of updates never waits.

[Note: the staging ring] Pieces of one size. An update's piece holds a range of all spilled arrays
of a layer: one is read, one is updated, one is written, one more is read ahead. A fetch's piece
holds a range of weights: one is read, one waits for its slot, one is copied. The two have entries
of their own, for an update must not wait for a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stronghold.errors import BudgetError, ConfigError, ErrorPage, format_size
from stronghold.model.layout import LayerLayout, Range, array_bytes, moment_arrays
from stronghold.model.packed_weight import DTYPES, STORED_BYTES
from stronghold.optim.states import EXACT, LEAN, PAGE_BYTES, Formats, group_size, states_of
from stronghold.plan.cost import Demand, owners
from stronghold.plan.places import Places

SUM_BUFFERS = 2  # for gradients on their way to a sum: one is filled while the other is added
UPDATE_ENTRIES, FETCH_ENTRIES = 4, 3  # [Note: the staging ring]
# Beside milliseconds of a disk the tenths that a hand-over between lanes takes do not count.
PIECE_BYTES = 32 << 20
SECOND_ARRAYS = "second arrays of early updates"
# How many of `kinds_of` spill, for each word of stronghold.nvme.spill.
DEPTHS = {"moments": 1, "masters": 2, "weights": 3}

Spilled = tuple[frozenset[str], ...]  # by layer, its arrays that are to lie in files
Ranges = tuple[Range, ...]  # of one layer
Alike = Counter[tuple[Ranges, frozenset[str], int]]  # numbers of layers, by their bytes and owner


def kinds_of(formats: Formats) -> dict[str, tuple[str, ...]]:
    """The arrays of each kind, in the order of [Note: what spills first]."""
    return {
        "moments": moment_arrays(formats),
        "master remainder": ("low",),
        "weights": ("weights",),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The ring: entries for updates and for fetches, and the bytes of each."""

    update_entries: int = 0
    fetch_entries: int = 0
    piece_bytes: int = PAGE_BYTES

    @property
    def entries(self) -> int:
        return self.update_entries + self.fetch_entries

    @property
    def nbytes(self) -> int:
        return self.entries * self.piece_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The arrays and buffers on the host and in files.

    `spilled` has the arrays of each layer that lie in files, `early` the layers that are updated
    before the gate. `host_bytes` and `nvme_bytes` name the items of each tier. A step reads
    `read_bytes` from files and writes `written_bytes` to them.
    """

    spilled: Spilled
    early: frozenset[int]
    staging: Staging
    ring_entries: int
    host_bytes: dict[str, int]
    nvme_bytes: dict[str, int]
    offloaded_bytes: int
    read_bytes: int
    written_bytes: int
    reasons: tuple[str, ...]


def plan_host(places: Places) -> HostMemory:
    """Plan the host's memory and the files, for the layers that are updated on the host.

    BudgetError, before anything is allocated, if they cannot fit. ConfigError for settings that
    cannot hold together.
    """
    _check_keys(places)
    sizes = _host_sizes(places)
    spilled = _choose_spilled(sizes)
    read_bytes, written_bytes = _file_traffic(sizes, spilled)
    nvme_bytes = _nvme_bytes(sizes, spilled)
    host = HostMemory(
        spilled=spilled,
        early=_early_layers(sizes, spilled),
        staging=_staging(sizes, spilled),
        ring_entries=_ring_entries(sizes),
        host_bytes=_host_bytes(sizes, spilled),
        nvme_bytes=nvme_bytes,
        offloaded_bytes=_offloaded_bytes(sizes),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        reasons=_spill_reasons(places.demand, nvme_bytes),
    )
    _check_files(places.demand, host)
    _check_memory(places, host)
    return host


def _check_keys(places: Places) -> None:
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


# -- sizes ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _RangeSizes:
    """Bytes of one layer on this rank. `trained[array]` covers the parameters that train; its
    "trained weights" are part of the weights, and as many bytes as the gradients. `weights` covers
    all parameters."""

    trained: Mapping[str, int]
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostSizes:
    """Bytes of the layers that are updated on the host. Layers with equal ranges have equal bytes:
    `ranges` has those of each layer, `of_ranges` the bytes. `owners` has the rank that updates each
    layer, and alone has its arrays but the weights."""

    places: Places
    kinds: Mapping[str, tuple[str, ...]]
    ranges: Mapping[int, Ranges]
    of_ranges: Mapping[Ranges, _RangeSizes]
    owners: Mapping[int, int]

    @property
    def demand(self) -> Demand:
        return self.places.demand

    @property
    def largest_gradients(self) -> int:
        """Bytes of the gradients of the largest layer."""
        return max((e.trained["trained weights"] for e in self.of_ranges.values()), default=0)

    def of_layer(self, index: int) -> _RangeSizes:
        return self.of_ranges[self.ranges[index]]


def _host_sizes(places: Places) -> _HostSizes:
    demand = places.demand
    kinds = kinds_of(demand.formats)
    of_ranges: dict[Ranges, _RangeSizes] = {}
    for layer in places.on_host:
        if layer.ranges not in of_ranges:
            of_ranges[layer.ranges] = _RangeSizes(
                trained=_trained_bytes(layer, demand, kinds["moments"]),
                weights=array_bytes(layer, demand.formats, "weights"),
            )
    ranges = {layer.index: layer.ranges for layer in places.on_host}
    trained = [of_ranges[own].trained["trained weights"] for own in ranges.values()]
    return _HostSizes(
        places=places,
        kinds=kinds,
        ranges=ranges,
        of_ranges=of_ranges,
        owners=dict(zip(ranges, owners(trained, demand.num_ranks), strict=True)),
    )


def _trained_bytes(layer: LayerLayout, demand: Demand, moments: Sequence[str]) -> dict[str, int]:
    """Bytes on this rank of each array of what trains of a layer, if it has any."""
    arrays = ["trained weights"]
    if demand.training:
        arrays += ["low", *moments]
        arrays.append("accumulated" if demand.accumulate else "gradients")
    sizes: dict[str, int] = {}
    for array in arrays:
        nbytes = array_bytes(layer, demand.formats, array)
        if nbytes or array == "trained weights":
            sizes[array] = nbytes
    return sizes


def _equal_layers(sizes: _HostSizes, spilled: Spilled) -> Alike:
    """Groups of layers that have equal ranges, the same arrays in files, and one owner, with the
    number of layers in each."""
    return Counter(
        (ranges, spilled[index], sizes.owners[index]) for index, ranges in sizes.ranges.items()
    )


def _padded(nbytes: int) -> int:
    """Rounded up to whole pages, which an array in files takes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _array_sums(sizes: _HostSizes, alike: Alike, owner: int, *, in_files: bool) -> Counter[str]:
    """Bytes of each array on one rank, of all layers, that lie in files or in memory."""
    sums: Counter[str] = Counter()
    for (ranges, arrays, its_owner), count in alike.items():
        layer = sizes.of_ranges[ranges]
        owned = layer.trained if its_owner == owner else {}
        for array, nbytes in {**owned, "weights": layer.weights}.items():
            if array != "trained weights" and (array in arrays) == in_files:
                sums[array] += count * (_padded(nbytes) if in_files else nbytes)
    return sums


def _host_bytes(sizes: _HostSizes, spilled: Spilled) -> dict[str, int]:
    """Bytes of each part of the host's peak, on the rank with the most."""
    alike = _equal_layers(sizes, spilled)
    all_ranks = range(sizes.demand.num_ranks)
    of_ranks = [_host_bytes_of(sizes, spilled, alike, rank) for rank in all_ranks]
    return max(of_ranks, key=lambda parts: sum(parts.values()))


def _host_bytes_of(sizes: _HostSizes, spilled: Spilled, alike: Alike, rank: int) -> dict[str, int]:
    sums = _array_sums(sizes, alike, rank, in_files=False)
    if sizes.demand.num_ranks > 1:
        sums["weights"] = _shared_weight_bytes(sizes, alike)
    staging = _staging(sizes, spilled)
    ring_bytes = _ring_entries(sizes) * sizes.largest_gradients
    early = _early_layers(sizes, spilled)
    return {
        "weights": sums["weights"],
        "master remainder": sums["low"],
        "moments": sum(sums[array] for array in sizes.kinds["moments"]),
        "held gradients": sums["gradients"],
        "accumulated gradients": sums["accumulated"],
        SECOND_ARRAYS: sum(_second_bytes(sizes, index) for index in early),
        f"gradient ring ({SUM_BUFFERS} entries)": ring_bytes,
        f"staging ring ({staging.entries} pieces)": staging.nbytes,
    }


def _shared_weight_bytes(sizes: _HostSizes, alike: Alike) -> int:
    """One rank's part of its node's weights. Each layer has whole pages, and words show its state
    (`ranks`)."""
    on_node = sizes.demand.ranks_per_node
    total = _padded(8 * (len(sizes.ranges) + on_node + 1))
    for (ranges, _, _), count in alike.items():
        total += count * _padded(sizes.of_ranges[ranges].weights)
    return total // on_node


def _nvme_bytes(sizes: _HostSizes, spilled: Spilled) -> dict[str, int]:
    """Bytes of each kind of arrays in files, on the rank with the most; empty if nothing spills."""
    if not any(spilled):
        return {}
    alike = _equal_layers(sizes, spilled)
    all_sums = [
        _array_sums(sizes, alike, rank, in_files=True) for rank in range(sizes.demand.num_ranks)
    ]
    sums = max(all_sums, key=lambda of_rank: of_rank.total())
    return {kind: sum(sums[array] for array in arrays) for kind, arrays in sizes.kinds.items()}


def _offloaded_bytes(sizes: _HostSizes) -> int:
    """Bytes of activations that wait on the host."""
    return sum(sizes.places.offloaded.values())


# -- what spills ----------------------------------------------------------------------------------
def _choose_spilled(sizes: _HostSizes) -> Spilled:
    """The arrays that lie in files: where they lie already; the kinds that the config names; or as
    few as possible. None without NVMe."""
    demand = sizes.demand
    if not demand.nvme:
        return _arrays_of_kinds(sizes, 0)
    if demand.in_files is not None:
        return tuple(map(frozenset, demand.in_files))
    if demand.spill is not None:
        return _arrays_of_kinds(sizes, DEPTHS[demand.spill])
    return _fewest_that_fit(sizes)


def _arrays_of_kinds(sizes: _HostSizes, num_kinds: int) -> Spilled:
    """All arrays of the first `num_kinds` kinds, at their layers' indices."""
    kinds = list(sizes.kinds.values())[:num_kinds]
    arrays = [array for kind in kinds for array in kind]
    rows: list[frozenset[str]] = []
    for index in range(max(sizes.ranges, default=-1) + 1):
        if index in sizes.ranges:
            layer = sizes.of_layer(index)
            nbytes = {**layer.trained, "weights": layer.weights}
            rows.append(frozenset(array for array in arrays if nbytes.get(array)))
        else:
            rows.append(frozenset())
    return tuple(rows)


def _fewest_that_fit(sizes: _HostSizes) -> Spilled:
    """The fewest arrays that must spill so that the others fit, in the order of [Note: what spills
    first]. All that may spill if that is not enough."""
    num_kinds = len(sizes.kinds) - (sizes.demand.num_ranks > 1)  # all but weights
    spilled = _arrays_of_kinds(sizes, 0)
    if _fits(sizes, spilled):
        return spilled
    most = _arrays_of_kinds(sizes, num_kinds)
    for kind in list(sizes.kinds.values())[:num_kinds]:
        before = spilled
        rows = zip(before, most, strict=True)
        spilled = tuple(fewer | (more & frozenset(kind)) for fewer, more in rows)
        if _fits(sizes, spilled):
            return _bring_back(sizes, before, spilled)
    return most


def _bring_back(sizes: _HostSizes, before: Spilled, after: Spilled) -> Spilled:
    """`before` for as many of the first layers as fit, `after` for the others. `after` fits."""
    least, most = 0, len(after)  # so many layers can be as before: `least` fit
    while least < most:
        count = least + 1 + (most - least) // 2
        if _fits(sizes, (*before[:count], *after[count:])):
            least = count
        else:
            most = count - 1
    return (*before[:least], *after[least:])


def _fits(sizes: _HostSizes, spilled: Spilled) -> bool:
    budget = sizes.demand.host_budget_bytes
    if budget is None:
        return True
    return _offloaded_bytes(sizes) + sum(_host_bytes(sizes, spilled).values()) <= budget


def _spill_reasons(demand: Demand, nvme_bytes: Mapping[str, int]) -> tuple[str, ...]:
    if not demand.nvme:
        return ()
    if demand.spill is None:
        kinds = [kind for kind, nbytes in nvme_bytes.items() if nbytes]
        what = f"{', '.join(kinds)} spill, the last layers first" if kinds else "nothing spills"
        return (f"nvme: {what}; host memory holds the rest",)
    if demand.in_files is None:
        return (f"nvme: {demand.spill} spill, and all that goes first (stronghold.nvme)",)
    return ()


# -- early updates --------------------------------------------------------------------------------
def _early_layers(sizes: _HostSizes, spilled: Spilled) -> frozenset[int]:
    """The layers that are updated before the gate ([Note: early updates])."""
    demand = sizes.demand
    if not demand.early_layers or not demand.training or demand.num_ranks > 1:
        return frozenset()
    able = [
        layer
        for layer in sizes.places.on_host
        if layer.trainable_numel == layer.numel > 0 and not spilled[layer.index]
    ]
    return spread(able, demand.early_layers)


def spread(layers: Sequence[LayerLayout], count: int) -> frozenset[int]:
    """The indices of `count` of `layers` (all where there are fewer), evenly over their bytes."""
    count = min(count, len(layers))
    total = sum(layer.trainable_numel for layer in layers)
    chosen: list[int] = []
    below = 0
    for position, layer in enumerate(layers):
        below += layer.trainable_numel
        # The middle of each of `count` equal parts; as many as are left, where layers are uneven.
        is_due = count * below >= (len(chosen) + 0.5) * total
        if len(chosen) < count and (is_due or len(layers) - position == count - len(chosen)):
            chosen.append(layer.index)
    return frozenset(chosen)


def _second_bytes(sizes: _HostSizes, index: int) -> int:
    """Bytes of a layer's second set of arrays."""
    layer = sizes.of_layer(index)
    states = ("low", *sizes.kinds["moments"])
    state_bytes = sum(layer.trained.get(array, 0) for array in states)
    return layer.weights + state_bytes


def early_reasons(places: Places, host: HostMemory) -> tuple[str, ...]:
    """How many layers are early, or why none is; empty if the config asks for none."""
    demand = places.demand
    if not (demand.early_layers and demand.training):
        return ()
    why = demand.why("early_layers")
    if host.early:
        second = format_size(host.host_bytes[SECOND_ARRAYS])
        return (
            f"{len(host.early)} layers are updated before the norm is known, into a second set of "
            f"arrays: {second} ({why})",
        )
    start = f"no layer is updated before the norm is known ({why}): "
    return tuple(start + reason for reason in _why_none_is_early(places, host))


def _why_none_is_early(places: Places, host: HostMemory) -> Iterator[str]:
    """Each kind of layers that cannot be early, where all layers are of such a kind."""
    if places.demand.num_ranks > 1:
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


# -- rings ----------------------------------------------------------------------------------------
def _ring_entries(sizes: _HostSizes) -> int:
    """Buffers for gradients on their way to a sum."""
    demand = sizes.demand
    adds = demand.training and demand.accumulate and sizes.largest_gradients > 0
    return SUM_BUFFERS if adds else 0


def _staging(sizes: _HostSizes, spilled: Spilled) -> Staging:
    """The ring that `spilled` needs ([Note: the staging ring])."""
    if not any(spilled):
        return Staging()
    demand = sizes.demand
    has_fetches = False
    has_updates = False
    # of the arrays that pass together
    element_bytes: list[float] = [demand.states.weight_bytes]
    layer_bytes: list[int] = []
    for ranges, arrays, _ in _equal_layers(sizes, spilled):
        layer = sizes.of_ranges[ranges]
        if "weights" in arrays:
            has_fetches = True
            element_bytes += [_item_bytes(demand, layer_range, "weights") for layer_range in ranges]
            layer_bytes.append(layer.weights)
        if arrays and _is_trained(sizes, ranges):
            has_updates = True
            layer_bytes.append(_update_bytes(layer, arrays))
            for layer_range in ranges:
                if layer_range.trainable:
                    item_bytes = [_item_bytes(demand, layer_range, array) for array in arrays]
                    element_bytes.append(sum(item_bytes))
    # A piece has a page of every array at least, and no more bytes than the largest layer.
    page_bytes = int(sizes.places.layout.page_numel * max(element_bytes))
    wanted_bytes = min(demand.piece_bytes or PIECE_BYTES, max(layer_bytes, default=0))
    piece_bytes = max(page_bytes, wanted_bytes)
    return Staging(
        update_entries=UPDATE_ENTRIES if has_updates else 0,
        fetch_entries=FETCH_ENTRIES if has_fetches else 0,
        piece_bytes=-(-piece_bytes // PAGE_BYTES) * PAGE_BYTES,
    )


def _is_trained(sizes: _HostSizes, ranges: Ranges) -> bool:
    return sizes.demand.training and sizes.of_ranges[ranges].trained["trained weights"] > 0


def _update_bytes(layer: _RangeSizes, arrays: frozenset[str]) -> int:
    """Bytes of the arrays in an update. Of the weights, only the trained ones count."""
    names = ["trained weights" if array == "weights" else array for array in arrays]
    return sum(layer.trained.get(name, 0) for name in names)


def _item_bytes(demand: Demand, layer_range: Range, array: str) -> float:
    """Bytes of an array for one element of a range."""
    storage_format = demand.formats[layer_range.format]
    if array == "weights":
        return storage_format.dtype.itemsize
    dtype = storage_format.trained.dtypes.get(array)
    return 0 if dtype is None else dtype.itemsize / group_size(array)


def _file_traffic(sizes: _HostSizes, spilled: Spilled) -> tuple[int, int]:
    """Bytes that a step reads from files, and bytes that it writes, on the rank with the most.

    An update reads what is spilled and writes it back. Fetches read weights twice per micro-batch
    at most.
    """
    read, written = ([0] * sizes.demand.num_ranks for _ in range(2))
    micro_batches = sizes.demand.micro_batches
    for (ranges, arrays, owner), count in _equal_layers(sizes, spilled).items():
        layer = sizes.of_ranges[ranges]
        for array in arrays:
            nbytes = layer.trained.get("trained weights" if array == "weights" else array, 0)
            read[owner] += count * nbytes
            written[owner] += count * nbytes
            if array == "weights":
                read[owner] += count * 2 * micro_batches * layer.weights
    return max(read), max(written)


# -- budgets --------------------------------------------------------------------------------------
def _check_files(demand: Demand, host: HostMemory) -> None:
    on_disk, capacity = sum(host.nvme_bytes.values()), demand.nvme_capacity_bytes
    if capacity is not None and on_disk > capacity:
        on_ranks = f" on each of {demand.num_ranks} ranks" if demand.num_ranks > 1 else ""
        raise BudgetError(
            "stronghold.nvme.capacity: what spills needs "
            f"{format_size(on_disk, round_up=True)}{on_ranks}, {format_size(capacity)} are "
            "allowed; raise it, or give more to stronghold.host_memory so that less spills",
            need_bytes=on_disk,
            page=ErrorPage.DISK,
        )


def _check_memory(places: Places, host: HostMemory) -> None:
    demand = places.demand
    wanted = host.host_bytes | {"offloaded activations": host.offloaded_bytes}
    need, budget = sum(wanted.values()), demand.host_budget_bytes
    if budget is None or need <= budget:
        return
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in wanted.items() if size)
    at_least = format_size(need, round_up=True)
    advice = (
        f"raise stronghold.host_memory or add RAM to at least {at_least}, or train fewer parameters"
    )
    second = host.host_bytes[SECOND_ARRAYS]
    if second and demand.pins("early_layers"):
        advice += f"; or lower stronghold.early_layers, which takes {format_size(second)}"
    saved = _saved_by_lean_states(demand, host)
    if saved:
        advice += (
            '; or set stronghold.states to "lean", which rounds otherwise (24-bit masters, '
            f"8-bit moments) and saves about {format_size(saved)}"
        )
    advice += _packing_advice(places)
    if not demand.nvme:
        advice += "; or name a directory on an NVMe disk in stronghold.nvme.path: "
        advice += f"{format_size(need - budget)} and more can lie there"
    elif demand.spill not in (None, "weights"):
        advice += f'; or leave stronghold.nvme.spill ("{demand.spill}") out: more can spill'
    raise BudgetError(
        f"host memory: the plan needs {at_least} ({parts}), {format_size(budget)} are "
        f"available; {advice}",
        need_bytes=need,
        page=ErrorPage.HOST_MEMORY,
    )


def _packing_advice(places: Places) -> str:
    """The advice to pack frozen weights of blocks; empty if there are none, or if some are."""
    frozen = 0
    for layer in (*places.streamed, *places.resident_blocks):
        for layer_range in layer.ranges:
            dtype = places.demand.formats[layer_range.format].dtype
            if not layer_range.trainable and dtype not in DTYPES:
                return ""
            if not layer_range.trainable:
                frozen += layer_range.num_parameters
    saved = int(frozen * (places.demand.states.weight_bytes - STORED_BYTES))
    if saved <= 0:
        return ""
    return (
        '; or set stronghold.frozen to "nf4", which rounds frozen weights and saves about '
        f"{format_size(saved)}"
    )


def _saved_by_lean_states(demand: Demand, host: HostMemory) -> int:
    """Bytes of host memory that lean states would save; 0 if they are no choice."""
    exact = demand.states
    if exact.kind != EXACT or exact.low_bytes != 2:  # of bf16 weights
        return 0
    moments = host.host_bytes["moments"]
    remainders = host.host_bytes["master remainder"]
    lean = states_of(exact.dtype, LEAN, exact.moments)
    lean_moments = moments * lean.moment_bytes / exact.moment_bytes if exact.moments else 0
    return remainders // 2 + moments - int(lean_moments)
