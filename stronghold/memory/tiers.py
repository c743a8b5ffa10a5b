"""Tiers: the pieces in which arrays of staged homes pass the host.

A staged home (`plan.homes`: files, or another place that kernels cannot address) has one store.
Owns the use of the staging ring's entries and the lock of the one that serves checkpoints. Never
decides what lies where (the plan does) nor when a piece moves (`runtime` does). The training thread
makes it; `begin` is called by lanes, `staged_pieces` by the training thread and the io lane.

[Note: a piece] One entry holds elements [begin, end) of several arrays of one range of a layer, one
array after the other. Ranges are padded to the layout's `page_numel` elements and pieces are cut at
its multiples, so that every array's part begins and ends on a page, whatever its element size and
however many elements have one item together. The arrays of a piece may have different staged homes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from stronghold.device.base import Device, Fence, Lane, Record, dependences, submitted
from stronghold.memory.buffers import EntryRing, HostEntry
from stronghold.memory.layer import LayerState
from stronghold.memory.slab import map_slab
from stronghold.memory.staging import NO_RING, StagingRing
from stronghold.memory.stores import Extent, NullStore, Store, Verb
from stronghold.model.arrays import array_maps
from stronghold.model.layout import ModelLayout, Shards
from stronghold.optim.states import Formats, items
from stronghold.plan.homes import ALL_ON_HOST, FILE, Home, Homes

Mode = Literal["read", "edit", "replace"]
Views = dict[str, torch.Tensor]


Wait = Callable[[], None]
"""Of transfers under way: returns when they have ended."""

NOTHING = NullStore(())


@dataclass(slots=True, eq=False)
class _Begun:
    """One transfer, begun in its turn or by the one before it."""

    begin: Callable[[], Wait]
    after: Sequence[Fence]
    begun: Wait | None = None
    following: _Begun | None = None

    def run(self) -> None:
        wait = self.begun or self.begin()
        following, self.following = self.following, None
        if following is not None and following.may_begin:
            with contextlib.suppress(OSError):  # it tries again in its turn, and tells
                following.begun = following.begin()
        wait()

    @property
    def may_begin(self) -> bool:
        return all(fence.done and not fence.failed for fence in self.after)


class Transfers:
    """Transfers of files on one lane, without a pause between them.

    [Note: no pause] A lane that waits for a piece before it begins the next one lets the disk run
    dry at every piece's end: 3 to 6 % of its rate with pieces of 32 MiB. So a piece that runs
    begins its successor first, if that could run: its fences are done and none of them failed. All
    else is as if it had begun in its turn; whatever is wrong with it is told there. Only what an
    operation declares orders it behind other transfers: it may begin before the one that was
    submitted earlier ends.
    """

    def __init__(self) -> None:
        self._last: _Begun | None = None

    def submit(
        self,
        lane: Lane,
        operation: str,
        begin: Callable[[], Wait],
        after: Sequence[Fence] = (),
        *,
        reads: Sequence[Record] = (),
        writes: Sequence[Record] = (),
        nbytes: int,
    ) -> Fence:
        """As `Lane.submit`, of the transfer that `begin` starts."""
        after = dependences(after, reads, writes)
        piece = _Begun(begin, after)
        fence = lane.submit(operation, piece.run, after, nbytes=nbytes)
        # Only what will have its turn may be begun before it: an interrupt may have ended us here.
        if self._last is not None:
            self._last.following = piece
        self._last = piece
        return submitted(fence, reads, writes)


class Tiers:
    """The staged arrays of one model: `stores` has one store for each staged home of `homes`.

    Pieces pass `ring`: its first entry serves `staged_pieces`, the next `ring.num_updates` updates, the
    others fetches. Of several ranks each has the elements of `shards` in its own stores; all
    elements are counted from the layer's first one.
    """

    def __init__(
        self,
        layout: ModelLayout,
        formats: Formats,
        homes: Homes = ALL_ON_HOST,
        stores: Mapping[Home, Store] | None = None,
        ring: StagingRing = NO_RING,
        *,
        shards: Shards | None = None,
    ) -> None:
        self._layers = layout.layers
        self._page_numel = layout.page_numel
        self.shards = shards or Shards()
        self.formats = formats
        self.homes, self.stores, self.ring = homes, dict(stores or {}), ring
        self._maps = [array_maps(layer, formats, self.shards) for layer in layout.layers]
        self._extents = {
            (extent.layer, extent.array): extent
            for extent in extent_requests(layout, formats, homes, self.shards)
        }
        self._store_of = {key: self.stores[homes[key]] for key in self._extents}
        self._staged = threading.Lock()
        entries = [HostEntry(memory) for memory in ring.entries]
        self._other = entries[0].memory if entries else torch.empty(0, dtype=torch.uint8)
        self.updates = EntryRing(entries[1 : 1 + ring.num_updates])
        self.fetches = EntryRing(entries[1 + ring.num_updates :])
        self._transfers = {lane: Transfers() for lane in ("load", "stage", "spill")}

    @property
    def store(self) -> Store:
        """The store of the files; one without bytes, where nothing lies in files."""
        return self.stores.get(FILE, NOTHING)

    @property
    def bytes_read(self) -> int:
        """From all stores."""
        return sum(store.bytes_read for store in self.stores.values())

    @property
    def bytes_written(self) -> int:
        """To all stores."""
        return sum(store.bytes_written for store in self.stores.values())

    @property
    def stored_bytes(self) -> int:
        """What all stores keep."""
        return sum(store.file_bytes for store in self.stores.values())

    def check(self) -> None:
        """`OSError` where what `mapped` gave cannot be read any more."""
        for store in self.stores.values():
            store.check()

    # -- pieces -----------------------------------------------------------------------------------
    def piece_spans(
        self, layer: int, arrays: Sequence[str], begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Spans of elements, each of one range and no more than an entry holds, that cover
        [begin, end) of the layer (all of it that these arrays have here) at multiples of
        `page_numel`."""
        page = self._page_numel
        stop = self._layers[layer].numel if end is None else end
        for low, high in self._spans(layer, arrays):
            first, last = max(low, begin // page * page), min(high, -(-stop // page) * page)
            if first >= last:
                continue
            step = self.ring.piece_bytes // self.nbytes(layer, arrays, low, low + page) * page
            while first < last:
                yield first, min(first + step, last)
                first += step

    def _spans(self, layer: int, arrays: Sequence[str]) -> Iterator[tuple[int, int]]:
        """The elements that the store has of these arrays: of the weights alone every range's, else
        this rank's shares of those that train and have one of the arrays."""
        of_layer, maps = self._layers[layer], self._maps[layer]
        if tuple(arrays) == ("weights",):
            yield from (each.span for each in of_layer.ranges if each.begin < each.end)
            return
        for begin, end in self.shards.trained(of_layer):
            if begin < end and any(maps[array].has(begin, end) for array in arrays):
                yield begin, end

    def piece_views(
        self, memory: torch.Tensor, layer: int, arrays: Sequence[str], begin: int, end: int
    ) -> Views:
        """Where elements [begin, end) of each array lie in an entry ([Note: a piece]). An array
        that their range does not have is left out."""
        made: Views = {}
        at = 0
        for array in arrays:
            of_array = self._maps[layer][array]
            if not of_array.has(begin, end):
                continue
            lies = of_array.bytes_of(begin, end)
            nbytes = lies.stop - lies.start
            made[array] = memory[at : at + nbytes].view(of_array.section(begin, end).dtype)
            at += nbytes
        return made

    def nbytes(self, layer: int, arrays: Sequence[str], begin: int, end: int) -> int:
        """Bytes of a piece."""
        total = 0
        for array in arrays:
            if self._maps[layer][array].has(begin, end):
                lies = self._maps[layer][array].bytes_of(begin, end)
                total += lies.stop - lies.start
        return total

    def begin(self, verb: Verb, layer: int, begin: int, end: int, views: Views) -> Wait:
        """Begin to read elements [begin, end) of each array, or to write them. The result waits
        until none of it is in flight, also when it failed; `OSError` names file, offset and
        length."""
        with contextlib.ExitStack() as started:
            for array, memory in views.items():
                first = self._maps[layer][array].bytes_of(begin, end).start
                key = layer, array
                transfer = self._store_of[key].submit(verb, self._extents[key], first, memory)
                started.callback(transfer.wait)
            return started.pop_all().close

    # -- on the lanes -----------------------------------------------------------------------------
    def queue_load(
        self,
        device: Device,
        state: LayerState,
        begin: int,
        end: int,
        arrays: Sequence[str],
        entry: HostEntry,
        *,
        verb: str = "load",
        what: str = "",
    ) -> Views:
        """Queue a read of elements [begin, end) of `arrays` into `entry`: on the lane `verb`, which
        is "stage" for a fetch. Returns where they will lie."""
        views = self.piece_views(entry.memory, state.index, arrays, begin, end)
        self._transfers[verb].submit(
            device.lane(verb),
            f"{verb}{what} {state.index}",
            partial(self.begin, "read", state.index, begin, end, views),
            reads=state.records_of(arrays),
            writes=(entry.record,),
            nbytes=self.nbytes(state.index, arrays, begin, end),
        )
        return views

    def queue_spill(
        self,
        device: Device,
        layer: int,
        begin: int,
        end: int,
        views: Views,
        entry: HostEntry,
        after: Sequence[Fence],
        *,
        what: str = "",
    ) -> Fence:
        """Queue the write of `views`, elements [begin, end) that lie in `entry`, to the files
        that may be written after `after`."""
        return self._transfers["spill"].submit(
            device.lane("spill"),
            f"spill{what} {layer}",
            partial(self.begin, "write", layer, begin, end, views),
            after,
            reads=(entry.record,),
            nbytes=sum(view.nbytes for view in views.values()),
        )

    # -- outside of the lanes ---------------------------------------------------------------------
    def staged_pieces(
        self, layer: int, arrays: Sequence[str], begin: int, end: int, mode: Mode
    ) -> Iterator[tuple[int, int, Views]]:
        """Elements [begin, end) of arrays that lie in files, piece by piece: (from, to, tensors).

        A tensor is valid until the next piece. "edit" writes back what the caller made of it, and
        "replace" too, whose caller writes every element. Nothing else may touch the range.
        """
        # An iteration that an error ended lives as long as the error does: nobody waits for its
        # entry.
        mine = self._staged.acquire(blocking=False)
        memory = self._other if mine else map_slab(len(self._other), torch.uint8)
        try:
            for low, high in self.piece_spans(layer, arrays, begin, end):
                views = self.piece_views(memory, layer, arrays, low, high)
                first, last = max(begin, low), min(end, high)
                if mode != "replace":
                    self.begin("read", layer, low, high, views)()
                if mode == "replace" and first > low:  # of pages that are not replaced as a whole
                    self._load_page(layer, low, 0, views)
                if mode == "replace" and last < high:
                    self._load_page(layer, low, high - low - self._page_numel, views)
                yield (
                    first,
                    last,
                    {a: view[items(a, first - low, last - low)] for a, view in views.items()},
                )
                if mode != "read":
                    self.begin("write", layer, low, high, views)()
        finally:
            if mine:
                self._staged.release()

    def _load_page(self, layer: int, low: int, at: int, views: Views) -> None:
        end = at + self._page_numel
        page = {a: view[items(a, at, end)] for a, view in views.items()}
        self.begin("read", layer, low + at, low + end, page)()

    def mapped(self, layer: int, array: str) -> torch.Tensor:
        """The array's bytes as memory that shows them: pages of the page cache ([Note: coherence]
        of `slab`)."""
        return self._store_of[layer, array].mapped(self._extents[layer, array])


def extent_requests(
    layout: ModelLayout, formats: Formats, homes: Homes, shards: Shards, home: Home | None = None
) -> list[Extent]:
    """The extents of all that lies at `home`, or at any staged one, layer by layer. Of several
    ranks each has its shares."""
    requests = []
    for layer in layout.layers:
        arrays = homes.staged(layer.index) if home is None else homes.arrays(layer.index, home)
        if arrays:
            maps = array_maps(layer, formats, shards)
            for array in arrays:
                nbytes = maps[array].nbytes
                requests.append(Extent(layer=layer.index, array=array, nbytes=nbytes))
    return requests
