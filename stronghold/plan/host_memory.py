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
in memory as a whole, and all of its parameters train. Several ranks have none: they agree first on
which parameters have gradients.

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
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.model.packed_weight import DTYPES, STORED_BYTES
from stronghold.optim.states import EXACT, LEAN, PAGE_BYTES, page_numel, states_of
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


def kinds_of(layout: ModelLayout) -> dict[str, tuple[str, ...]]:
    """The arrays of each kind, in the order of [Note: what spills first]."""
    return {"moments": layout.moments, "master remainder": ("low",), "weights": ("weights",)}


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
    demand = places.demand
    _check_keys(places)
    spilled = _choose_spilled(places)
    read_bytes, written_bytes = _file_traffic(places, spilled)
    nvme_bytes = _nvme_bytes(places, spilled)
    host = HostMemory(
        spilled=spilled,
        early=_early_layers(places, spilled),
        staging=_staging(places, spilled),
        ring_entries=SUM_BUFFERS if _ring_bytes(places) else 0,
        host_bytes=_host_bytes(places, spilled),
        nvme_bytes=nvme_bytes,
        offloaded_bytes=sum(places.offloaded.values()),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        reasons=_spill_reasons(demand, nvme_bytes),
    )
    _check_files(demand, host)
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


# -- bytes ----------------------------------------------------------------------------------------
def _padded(nbytes: int) -> int:
    """Rounded up to whole pages, which an array in files takes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _owned(places: Places) -> list[list[LayerLayout]]:
    """The layers that each rank updates. It alone has their arrays but the weights."""
    layers, num_ranks = places.on_host, places.demand.num_ranks
    if num_ranks == 1:
        return [list(layers)]
    owner = owners([layer.gradient_bytes for layer in layers], num_ranks)
    return [[x for x, own in zip(layers, owner, strict=True) if own == k] for k in range(num_ranks)]


def _array_sums(
    layers: Sequence[LayerLayout], spilled: Spilled, arrays: Sequence[str], *, in_files: bool
) -> Counter[str]:
    """Bytes of each array of these layers, in files or in memory."""
    sums: Counter[str] = Counter()
    for layer in layers:
        for array in arrays:
            if (array in spilled[layer.index]) == in_files:
                nbytes = layer.array_bytes(array)
                sums[array] += _padded(nbytes) if in_files else nbytes
    return sums


def _host_bytes(places: Places, spilled: Spilled) -> dict[str, int]:
    """Bytes of each part of the host's peak, on the rank with the most."""
    demand, moments = places.demand, places.layout.moments
    waiting = "accumulated" if demand.accumulate else "gradients"
    arrays = ["weights"]
    if demand.training:
        arrays += ["low", *moments, waiting]
    all_sums = [_array_sums(layers, spilled, arrays, in_files=False) for layers in _owned(places)]
    sums = max(all_sums, key=lambda of_rank: of_rank.total() - of_rank["weights"])
    if demand.num_ranks > 1:
        sums["weights"] = _shared_weight_bytes(places)
    staging = _staging(places, spilled)
    early = _early_layers(places, spilled)
    return {
        "weights": sums["weights"],
        "master remainder": sums["low"],
        "moments": sum(sums[array] for array in moments),
        "held gradients": sums["gradients"],
        "accumulated gradients": sums["accumulated"],
        SECOND_ARRAYS: sum(
            layer.array_bytes(array)
            for layer in places.on_host
            for array in ("weights", "low", *moments)
            if layer.index in early
        ),
        f"gradient ring ({SUM_BUFFERS} entries)": SUM_BUFFERS * _ring_bytes(places),
        f"staging ring ({staging.entries} pieces)": staging.nbytes,
    }


def _shared_weight_bytes(places: Places) -> int:
    """One rank's part of its node's weights. Each layer has whole pages, and words show its state
    (`ranks`)."""
    on_node = places.demand.ranks_per_node
    words = 8 * (len(places.on_host) + on_node + 1)
    total = _padded(words) + sum(_padded(layer.weight_bytes) for layer in places.on_host)
    return total // on_node


def _nvme_bytes(places: Places, spilled: Spilled) -> dict[str, int]:
    """Bytes of each kind of arrays in files, on the rank with the most; empty if nothing spills."""
    if not any(spilled):
        return {}
    kinds = kinds_of(places.layout)
    arrays = [array for of_kind in kinds.values() for array in of_kind]
    all_sums = [_array_sums(layers, spilled, arrays, in_files=True) for layers in _owned(places)]
    sums = max(all_sums, key=Counter.total)
    return {kind: sum(sums[array] for array in of_kind) for kind, of_kind in kinds.items()}


def _ring_bytes(places: Places) -> int:
    """Bytes of each buffer for gradients on their way to a sum; 0 if none are summed."""
    demand = places.demand
    if not (demand.training and demand.accumulate):
        return 0
    return max((layer.gradient_bytes for layer in places.on_host), default=0)


# -- what spills ----------------------------------------------------------------------------------
def _choose_spilled(places: Places) -> Spilled:
    """The arrays that lie in files: where they lie already; the kinds that the config names; or as
    few as possible. None without NVMe."""
    demand = places.demand
    if not demand.nvme:
        return _arrays_of_kinds(places, 0)
    if demand.in_files is not None:
        return tuple(map(frozenset, demand.in_files))
    if demand.spill is not None:
        return _arrays_of_kinds(places, DEPTHS[demand.spill])
    return _fewest_that_fit(places)


def _arrays_of_kinds(places: Places, num_kinds: int) -> Spilled:
    """All arrays of the first `num_kinds` kinds, at their layers' indices."""
    kinds = list(kinds_of(places.layout).values())[:num_kinds]
    arrays = [array for kind in kinds for array in kind]
    rows = [frozenset[str]()] * len(places.layout.layers)
    for layer in places.on_host:
        rows[layer.index] = frozenset(array for array in arrays if layer.array_bytes(array))
    return tuple(rows)


def _fewest_that_fit(places: Places) -> Spilled:
    """The fewest arrays that must spill so that the others fit, in the order of [Note: what spills
    first]. All that may spill if that is not enough."""
    num_kinds = len(DEPTHS) - (places.demand.num_ranks > 1)  # all but weights
    after = _arrays_of_kinds(places, 0)
    for depth in range(num_kinds + 1):
        before, after = after, _arrays_of_kinds(places, depth)
        if _fits(places, after):
            return _bring_back(places, before, after)
    return after


def _bring_back(places: Places, before: Spilled, after: Spilled) -> Spilled:
    """`before` for as many of the first layers as fit, `after` for the others. `after` fits."""
    least, most = 0, len(after)  # so many layers can be as before: `least` fit
    while least < most:
        count = least + 1 + (most - least) // 2
        if _fits(places, (*before[:count], *after[count:])):
            least = count
        else:
            most = count - 1
    return (*before[:least], *after[least:])


def _fits(places: Places, spilled: Spilled) -> bool:
    budget = places.demand.host_budget_bytes
    if budget is None:
        return True
    return sum(places.offloaded.values()) + sum(_host_bytes(places, spilled).values()) <= budget


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
def _early_layers(places: Places, spilled: Spilled) -> frozenset[int]:
    """The layers that are updated before the gate ([Note: early updates])."""
    demand = places.demand
    if not demand.early_layers or not demand.training or demand.num_ranks > 1:
        return frozenset()
    able = [
        layer
        for layer in places.on_host
        if layer.trained_numel and not layer.frozen_bytes and not spilled[layer.index]
    ]
    return spread(able, demand.early_layers)


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
    layers = [layer for layer in places.on_host if layer.weight_bytes]
    frozen = sum(layer.frozen_bytes > 0 for layer in layers)
    in_files = sum(not x.frozen_bytes and bool(host.spilled[x.index]) for x in layers)
    if places.on_gpu:
        yield f"{len(places.on_gpu)} layers are updated on the gpu"
    if frozen:
        yield f"{frozen} layers have frozen parameters"
    if in_files:
        yield f"{in_files} layers have arrays in files"


# -- files ----------------------------------------------------------------------------------------
def _staged_bytes(layer: LayerLayout, arrays: frozenset[str]) -> int:
    """Bytes of these arrays in an update. Of the weights, only the trained ones count."""
    return sum(layer.array_bytes("gradients" if a == "weights" else a) for a in arrays)


def _staging(places: Places, spilled: Spilled) -> Staging:
    """The ring that `spilled` needs ([Note: the staging ring])."""
    fetched = [x.weight_bytes for x in places.on_host if "weights" in spilled[x.index]]
    updated: list[int] = []
    page_bytes = PAGE_BYTES  # a piece has a page of every array at least
    for layer in places.on_host:
        if places.demand.training and layer.states is not None and spilled[layer.index]:
            updated.append(_staged_bytes(layer, spilled[layer.index]))
            item_bytes = layer.states.item_bytes(spilled[layer.index])
            page_bytes = max(page_bytes, _padded(int(page_numel(layer.states.kind) * item_bytes)))
    wanted_bytes = min(places.demand.piece_bytes or PIECE_BYTES, max(fetched + updated, default=0))
    return Staging(
        update_entries=UPDATE_ENTRIES if updated else 0,
        fetch_entries=FETCH_ENTRIES if fetched else 0,
        piece_bytes=max(page_bytes, _padded(wanted_bytes)),
    )


def _file_traffic(places: Places, spilled: Spilled) -> tuple[int, int]:
    """Bytes that a step reads from files, and bytes that it writes, on the rank with the most.

    An update reads what is spilled and writes it back. Fetches read weights twice per micro-batch
    at most.
    """
    passes = 2 * places.demand.micro_batches
    of_ranks = []
    for layers in _owned(places):
        staged = sum(_staged_bytes(layer, spilled[layer.index]) for layer in layers)
        fetched = sum(x.weight_bytes for x in layers if "weights" in spilled[x.index])
        of_ranks.append((staged + passes * fetched, staged))
    return max(of_ranks)


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
    blocks = (*places.streamed, *places.resident_blocks)
    if any(layer.frozen_dtypes - set(DTYPES) for layer in blocks):
        return ""
    share = 1 - STORED_BYTES / places.demand.states.weight_bytes
    saved = int(share * sum(layer.frozen_bytes for layer in blocks))
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
