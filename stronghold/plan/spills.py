"""What spills: which arrays of which layers lie in files, and the memory that their bytes pass.

Pure arithmetic on sizes; any thread.

[Note: what spills first] Kinds in the order of how seldom their bytes are needed: moments (read and
written once a step), the rest of the masters, then gradients that wait for the step's end, last the
weights, which every pass reads. Within a kind the last layers spill first where updates wait for
the gate: they come in forward order, so at the turn from one step to the next nothing is read, and
the disk is a few layers ahead when the first spilled one is needed. Where updates come as gradients
do, the layers that spill are spread evenly: the disk works all through backward, not only at its
beginning, and what is deferred all through forward ([Note: deferred updates] of `deferral`).

[Note: the staging ring] Pieces of one size. An update's piece holds a range of all spilled arrays
of a layer: one is read, one is updated, one is written, one more is read ahead. A fetch's piece
holds a range of weights: one is read, one waits for its slot, one is copied. The two have entries
of their own, for an update must not wait for a slot. One further entry serves checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stronghold.model.layout import PAGE_NUMEL, LayerLayout

UPDATE_ENTRIES = 4
FETCH_ENTRIES = 3
OTHER_ENTRIES = 1
# Beside milliseconds of a disk the tenths that a hand-over between lanes takes do not count.
PIECE_BYTES = 32 << 20
PAGE_BYTES = 4096

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS: dict[str, tuple[str, ...]] = {
    "moments": MOMENTS,
    "rest of the masters": ("low",),
    "held gradients": ("gradients",),
    "accumulated gradients": ("accumulated",),
    "weights": ("weights",),
}
# How far each word of stronghold.nvme.spill goes into KINDS.
DEPTHS = {"moments": 1, "masters": 2, "weights": len(KINDS)}
WRITTEN = ("exp_avg", "exp_avg_sq", "low", "weights")  # by an update; gradients are only read by it

Spilled = tuple[frozenset[str], ...]


def nothing(layers: Sequence[LayerLayout]) -> Spilled:
    """No array of any layer."""
    return _by_index(layers, [frozenset()] * len(layers))


def everything(layers: Sequence[LayerLayout], sizes: Mapping[str, int], num_kinds: int) -> Spilled:
    """All arrays of the first `num_kinds` kinds."""
    arrays = [array for kind in list(KINDS)[:num_kinds] for array in KINDS[kind]]
    return _by_index(
        layers,
        [frozenset(a for a in arrays if sizes.get(a) and numel_of(layer, a)) for layer in layers],
    )


def _by_index(layers: Sequence[LayerLayout], arrays: Sequence[frozenset[str]]) -> Spilled:
    """`arrays` of `layers` at the layers' indices, nothing at the indices between."""
    found = {layer.index: of_layer for layer, of_layer in zip(layers, arrays, strict=True)}
    return tuple(found.get(index, frozenset()) for index in range(max(found, default=-1) + 1))


def numel_of(layer: LayerLayout, array: str) -> int:
    """Elements of a layer's array, padded."""
    return layer.numel if array == "weights" else layer.trainable_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The ring: entries for updates and for fetches, and the bytes of each."""

    update_entries: int = 0
    fetch_entries: int = 0
    piece_bytes: int = PAGE_BYTES

    @property
    def entries(self) -> int:
        """All of them, with that of checkpoints."""
        own = self.update_entries + self.fetch_entries
        return own + OTHER_ENTRIES if own else 0

    @property
    def nbytes(self) -> int:
        return self.entries * self.piece_bytes


def staging_of(
    layers: Sequence[LayerLayout],
    spilled: Spilled,
    sizes: Mapping[str, int],
    piece_bytes: int | None,
) -> Staging:
    """The ring that `spilled` needs. `sizes` are bytes of an element of each array that exists."""
    largest, smallest, updates, fetches = 0, 0, False, False
    for layer in layers:
        arrays = spilled[layer.index]
        trained = sum(sizes[array] for array in arrays) if layer.trainable_numel else 0
        updates = updates or bool(trained and len(sizes) > 1)
        fetches = fetches or "weights" in arrays
        whole = layer.numel * sizes["weights"] if "weights" in arrays else 0
        largest = max(largest, trained * layer.trainable_numel, whole)
        smallest = max(smallest, PAGE_NUMEL * max(trained, sizes["weights"]))
    if not largest:
        return Staging()
    chosen = max(smallest, min(piece_bytes or PIECE_BYTES, largest))
    return Staging(
        update_entries=UPDATE_ENTRIES if updates else 0,
        fetch_entries=FETCH_ENTRIES if fetches else 0,
        piece_bytes=-(-chosen // PAGE_BYTES) * PAGE_BYTES,
    )


def file_bytes(
    layers: Sequence[LayerLayout], spilled: Spilled, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Bytes of files by kind."""
    return {
        kind: sum(
            numel_of(layer, array) * sizes[array]
            for layer in layers
            for array in arrays
            if array in spilled[layer.index]
        )
        for kind, arrays in KINDS.items()
    }


def traffic(
    layers: Sequence[LayerLayout], spilled: Spilled, sizes: Mapping[str, int], micro_batches: int
) -> tuple[int, int]:
    """Bytes read and written per step: an update reads what is spilled and writes it back, but for
    gradients, which are written as they come; fetches read weights twice per micro-batch at most.
    """
    read = written = 0
    for layer in layers:
        for array in spilled[layer.index]:
            nbytes = layer.trainable_numel * sizes[array]
            read += nbytes
            if array in WRITTEN or array == "gradients":
                written += nbytes
            if array == "accumulated":  # the first micro-batch sets it, later ones add
                read += (micro_batches - 1) * nbytes
                written += micro_batches * nbytes
            if array == "weights":
                read += 2 * micro_batches * layer.numel * sizes[array]
    return read, written


def fewest(
    layers: Sequence[LayerLayout],
    sizes: Mapping[str, int],
    num_kinds: int,
    *,
    fits: Callable[[Spilled], bool],
    evenly: bool = False,
) -> Spilled:
    """What must spill so that `fits`, in the order of [Note: what spills first]; everything of
    `num_kinds` kinds when that does not fit either. `evenly`: not the last layers first.
    """
    spilled = nothing(layers)
    if fits(spilled):
        return spilled
    most = everything(layers, sizes, num_kinds)
    for kind in list(KINDS)[:num_kinds]:
        arrays, before = frozenset(KINDS[kind]), spilled
        spilled = tuple(had | (all_of & arrays) for had, all_of in zip(spilled, most, strict=True))
        if fits(spilled):
            # Enough, or more than that: bring the first layers back as long as it fits.
            ranks = _spread_ranks(len(spilled)) if evenly else range(len(spilled))
            few, many = 0, len(spilled)
            while few < many:
                kept = (few + many + 1) // 2
                if fits(_mixed(before, spilled, ranks, kept)):
                    few = kept
                else:
                    many = kept - 1
            return _mixed(before, spilled, ranks, few)
    return most


def _mixed(before: Spilled, after: Spilled, ranks: Sequence[int], kept: int) -> Spilled:
    """`before` for the layers whose rank is below `kept`, `after` for the others."""
    rows = zip(ranks, before, after, strict=True)
    return tuple(had if rank < kept else has for rank, had, has in rows)


def _spread_ranks(count: int) -> list[int]:
    """A rank for each of `count` layers: those below any rank, and those above, are spread evenly
    (van der Corput, 1935). The first layer's is the lowest."""
    bits = max(1, (count - 1).bit_length())
    order = sorted(range(count), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    ranks = [0] * count
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks
