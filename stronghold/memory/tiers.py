"""Tiers: how arrays of staged homes pass through host memory, piece by piece.

A staged home (`plan.homes`) is a place that kernels cannot address, such as a file. Each has one
store. Load (swap in) copies a piece from a store to host memory. Spill (swap out) copies it back.

Owns the use of the staging ring's entries, and the lock of the entry that serves checkpoints. Never
decides where an array lies (the plan does), nor when a piece moves (`streaming` does). The training
thread constructs it. Lanes call `begin`. The training thread and the io lane call `staged_pieces`.

[Note: a piece] One entry holds elements [begin, end) of several arrays of one range of a layer, one
array after the other. Ranges are padded to the layout's `page_numel` elements, and pieces are cut
at its multiples. So each array's bytes begin and end on a page, whatever its element size, and
however many elements share one item. The arrays of a piece may have different staged homes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stronghold.devices.base import Device, Fence, Lane, Record, dependences, record_accesses
from stronghold.devices.lane_name import LaneName
from stronghold.memory.buffers import EntryRing, HostEntry
from stronghold.memory.layer import LayerState
from stronghold.memory.slab import map_slab
from stronghold.memory.staging import NO_RING, StagingRing
from stronghold.memory.stores import Extent, NullStore, Store, Verb
from stronghold.model.arrays import array_maps
from stronghold.model.layout import ModelLayout, Shards
from stronghold.optim.states import Formats, items
from stronghold.plan.homes import ALL_ON_HOST, FILE, Home, Homes

FILE_LANES = (LaneName.LOAD, LaneName.STAGE, LaneName.SPILL)
# Access to a piece: read its values; edit them; replace all of them without a read.
Mode = Literal["read", "edit", "replace"]

# Flat host tensors by array name, in the dtypes of one range.
Views = dict[str, torch.Tensor]

# Blocks until transfers under way have ended.
Wait = Callable[[], None]

NO_STORE = NullStore()


@dataclass(slots=True, eq=False)
class _QueuedTransfer:
    """One transfer in a lane's queue, which may start before its turn ([Note: no pause]).

    `start` starts it. `started`: its wait, once it was started early. `following`: the next in the
    queue, or None.
    """

    start: Callable[[], Wait]
    after: Sequence[Fence]
    started: Wait | None = None
    following: _QueuedTransfer | None = None

    def run(self) -> None:
        wait = self.started or self.start()
        following = self.following
        self.following = None
        if following is not None and following.may_start:
            # it starts again in its turn, and raises there
            with contextlib.suppress(OSError):
                following.started = following.start()
        wait()

    @property
    def may_start(self) -> bool:
        return all(fence.done and not fence.failed for fence in self.after)


class Transfers:
    """Transfers of files on one lane, without a pause between them.

    [Note: no pause] A disk runs dry at the end of every piece if its lane waits for the piece
    before it starts the next one. That costs 3 to 6 % of its rate with pieces of 32 MiB. So:
        1. The lane runs piece A: it starts A's transfer, unless that was started early.
        2. The lane starts the transfer of B, the next piece in the queue, if all fences of B are
           done and none failed.
        3. The lane waits for A.
        4. The lane runs piece B, whose transfer is under way.
    Errors of B surface in step 4. A transfer is ordered behind others only by its declared reads,
    writes and fences: B may start before A ends.
    """

    def __init__(self) -> None:
        self._last: _QueuedTransfer | None = None

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
        """Queue a transfer on `lane`. `begin` starts it. All other arguments as `Lane.submit`."""
        after = dependences(after, reads, writes)
        transfer = _QueuedTransfer(begin, after)
        fence = lane.submit(operation, transfer.run, after, nbytes=nbytes)
        # Linked after the submit: an interrupt may end this call between the two, and a transfer
        # that will never run must not be started early.
        if self._last is not None:
            self._last.following = transfer
        self._last = transfer
        return record_accesses(fence, reads, writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceTransfer:
    """The read or write of one piece: `views` are elements [begin, end) of a layer's arrays."""

    tiers: Tiers
    verb: Verb
    layer: int
    begin: int
    end: int
    views: Views

    def start(self) -> Wait:
        return self.tiers.begin(self.verb, self.layer, self.begin, self.end, self.views)


class Tiers:
    """The staged arrays of one model. `stores` has one store for each staged home of `homes`.

    Pieces pass through `ring`. Its first entry serves `staged_pieces`, the next `ring.num_updates`
    serve updates, and the others serve fetches. Each rank has the elements of `shards` in stores of
    its own. Elements are counted from the layer's first one on every rank.
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
        self.homes = homes
        self.stores = dict(stores or {})
        self.ring = ring
        self._maps = [array_maps(layer, formats, self.shards) for layer in layout.layers]
        extents = extent_requests(layout, formats, homes, self.shards)
        self._extents = {(extent.layer, extent.array): extent for extent in extents}
        self._store_of = {key: self.stores[homes[key]] for key in self._extents}
        entries = [HostEntry(memory) for memory in ring.entries]
        first_update, first_fetch = 1, 1 + ring.num_updates
        self.updates = EntryRing(entries[first_update:first_fetch])
        self.fetches = EntryRing(entries[first_fetch:])
        self._access_memory = entries[0].memory if entries else torch.empty(0, dtype=torch.uint8)
        self._access_lock = threading.Lock()
        self._transfers = {lane: Transfers() for lane in FILE_LANES}

    @property
    def store(self) -> Store:
        """The store of the files. A `NullStore` if nothing lies in files."""
        return self.stores.get(FILE, NO_STORE)

    @property
    def bytes_read(self) -> int:
        """Bytes read from all stores."""
        return sum(store.bytes_read for store in self.stores.values())

    @property
    def bytes_written(self) -> int:
        """Bytes written to all stores."""
        return sum(store.bytes_written for store in self.stores.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes that all stores keep."""
        return sum(store.file_bytes for store in self.stores.values())

    def check(self) -> None:
        """Raise `OSError` if mapped memory of a store cannot be read any more."""
        for store in self.stores.values():
            store.check()

    # -- pieces -----------------------------------------------------------------------------------
    def piece_spans(
        self, layer: int, arrays: Sequence[str], begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield the pieces that cover elements [begin, end) of a layer's arrays.

        Each is a span of elements of one range, cut at multiples of `page_numel`, and fits an
        entry. Without `end` they cover all elements that these arrays have on this rank.
        """
        page = self._page_numel
        stop = self._layers[layer].numel if end is None else end
        page_begin = begin // page * page
        page_end = -(-stop // page) * page
        for low, high in self._stored_spans(layer, arrays):
            first = max(low, page_begin)
            last = min(high, page_end)
            if first >= last:
                continue
            page_bytes = self.nbytes(layer, arrays, low, low + page)
            step = self.ring.piece_bytes // page_bytes * page
            while first < last:
                yield first, min(first + step, last)
                first += step

    def _stored_spans(self, layer: int, arrays: Sequence[str]) -> Iterator[tuple[int, int]]:
        """The spans of elements that the stores have of these arrays.

        The weights alone: every range. Else: this rank's shares of the ranges that train and have
        one of the arrays.
        """
        layout = self._layers[layer]
        maps = self._maps[layer]
        if tuple(arrays) == ("weights",):
            for layer_range in layout.ranges:
                if layer_range.begin < layer_range.end:
                    yield layer_range.span
            return
        for begin, end in self.shards.trained(layout):
            if begin < end and any(maps[array].has(begin, end) for array in arrays):
                yield begin, end

    def piece_views(
        self, memory: torch.Tensor, layer: int, arrays: Sequence[str], begin: int, end: int
    ) -> Views:
        """Views of elements [begin, end) of each array in an entry's memory ([Note: a piece]).

        `memory`: flat uint8 tensor. An array that the range does not have is left out.
        """
        views: Views = {}
        offset = 0
        for array in arrays:
            array_map = self._maps[layer][array]
            if not array_map.has(begin, end):
                continue
            span = array_map.bytes_of(begin, end)
            nbytes = span.stop - span.start
            dtype = array_map.section(begin, end).dtype
            views[array] = memory[offset : offset + nbytes].view(dtype)
            offset += nbytes
        return views

    def nbytes(self, layer: int, arrays: Sequence[str], begin: int, end: int) -> int:
        """Bytes of the piece with elements [begin, end) of the arrays."""
        total = 0
        for array in arrays:
            array_map = self._maps[layer][array]
            if array_map.has(begin, end):
                span = array_map.bytes_of(begin, end)
                total += span.stop - span.start
        return total

    def begin(self, verb: Verb, layer: int, begin: int, end: int, views: Views) -> Wait:
        """Start to read elements [begin, end) of each array into its view, or to write them.

        The result waits until nothing is in flight, also after an error. It raises `OSError` with
        the file, offset and length of a failed transfer.
        """
        with contextlib.ExitStack() as started:
            for array, memory in views.items():
                key = layer, array
                first_byte = self._maps[layer][array].bytes_of(begin, end).start
                store = self._store_of[key]
                transfer = store.submit(verb, self._extents[key], first_byte, memory)
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
        lane: LaneName = LaneName.LOAD,
        what: str = "",
    ) -> Views:
        """Queue the load (swap in) of elements [begin, end) of `arrays` into `entry`.

        `lane`: LOAD for an update, STAGE for a fetch. `what`: a word for the
        operation's name. Returns the views of `entry` that the load fills.
        """
        views = self.piece_views(entry.memory, state.index, arrays, begin, end)
        transfer = _PieceTransfer(
            tiers=self, verb="read", layer=state.index, begin=begin, end=end, views=views
        )
        self._transfers[lane].submit(
            device.lane(lane),
            f"{lane}{what} {state.index}",
            transfer.start,
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
        """Queue the spill (swap out) of `views`: elements [begin, end) of arrays, in `entry`.

        `after`: fences of the operations after which the stores may be written. `what`: a word for
        the operation's name.
        """
        transfer = _PieceTransfer(
            tiers=self, verb="write", layer=layer, begin=begin, end=end, views=views
        )
        return self._transfers[LaneName.SPILL].submit(
            device.lane(LaneName.SPILL),
            f"spill{what} {layer}",
            transfer.start,
            after,
            reads=(entry.record,),
            nbytes=sum(view.nbytes for view in views.values()),
        )

    # -- outside of the lanes ---------------------------------------------------------------------
    def staged_pieces(
        self, layer: int, arrays: Sequence[str], begin: int, end: int, mode: Mode
    ) -> Iterator[tuple[int, int, Views]]:
        """Yield elements [begin, end) of staged arrays, piece by piece: (begin, end, views).

        Views are valid until the next piece, which writes back what the caller of "edit" or
        "replace" has changed. The caller of "replace" writes every element. No other thread may
        touch these elements.
        """
        # An iteration that an error ended lives as long as the error does, and keeps the lock. So
        # a caller never waits for the entry, and takes memory of its own instead.
        has_entry = self._access_lock.acquire(blocking=False)
        memory = self._access_memory
        if not has_entry:
            memory = map_slab(len(self._access_memory), torch.uint8)
        try:
            for low, high in self.piece_spans(layer, arrays, begin, end):
                views = self.piece_views(memory, layer, arrays, low, high)
                first = max(begin, low)
                last = min(end, high)
                if mode != "replace":
                    self._transfer_now("read", layer, low, high, views)
                # the first page is replaced in part
                if mode == "replace" and first > low:
                    self._load_page(layer, low, 0, views)
                # the last page is replaced in part
                if mode == "replace" and last < high:
                    self._load_page(layer, low, high - low - self._page_numel, views)
                inner = {
                    array: view[items(array, first - low, last - low)]
                    for array, view in views.items()
                }
                yield first, last, inner
                if mode != "read":
                    self._transfer_now("write", layer, low, high, views)
        finally:
            if has_entry:
                self._access_lock.release()

    def _transfer_now(self, verb: Verb, layer: int, begin: int, end: int, views: Views) -> None:
        wait = self.begin(verb, layer, begin, end, views)
        wait()

    def _load_page(self, layer: int, low: int, first: int, views: Views) -> None:
        """Load one page of elements, from `first` on, of a piece that begins at element `low`."""
        last = first + self._page_numel
        page = {array: view[items(array, first, last)] for array, view in views.items()}
        self._transfer_now("read", layer, low + first, low + last, page)

    def mapped(self, layer: int, array: str) -> torch.Tensor:
        """The array's bytes as memory: pages of the page cache ([Note: coherence] of `slab`)."""
        return self._store_of[layer, array].mapped(self._extents[layer, array])


def extent_requests(
    layout: ModelLayout, formats: Formats, homes: Homes, shards: Shards, home: Home | None = None
) -> list[Extent]:
    """The extents of all arrays at `home`, or at any staged home, layer by layer.

    Each rank has its shares (`shards`).
    """
    requests = []
    for layer in layout.layers:
        arrays = homes.staged(layer.index) if home is None else homes.arrays(layer.index, home)
        if not arrays:
            continue
        maps = array_maps(layer, formats, shards)
        for array in arrays:
            nbytes = maps[array].nbytes
            requests.append(Extent(layer=layer.index, array=array, nbytes=nbytes))
    return requests
