"""One operation over the arrays of a layer, piece by piece, wherever they lie.

A layer in memory is one operation of a lane. Arrays in files pass a ring of staging entries: each
piece is loaded, worked on, and spilled if it changed. The training thread submits, and autograd's
in backward; lanes compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial

from stronghold.devices.base import Device, Record
from stronghold.memory.tiers import Tiers
from stronghold.optim.states import Format
from stronghold.streaming.pieces import LayerGradients, Piece, pieces_in_memory

Work = Callable[[], None]


class Verb(Enum):
    """The work of an operation, and its name in traces, before the layer's number. On the host
    UPDATE runs on the lane of updates, all others on the lane of gradients, and NORM may also merge
    gradients. On the GPU all run on the compute lane."""

    UPDATE = "update"
    NORM = "norm"
    MERGE = "merge"
    ACCUMULATE = "accumulate"


# What the name of a load or a spill has beside its verb: the arrays, if they are not the
# optimizer's.
WHAT = {
    Verb.UPDATE: "",
    Verb.NORM: " gradients",
    Verb.MERGE: " gradients",
    Verb.ACCUMULATE: " sums",
}


class LayerOperations:
    """Queues operations over layers whose home is the host, or a file."""

    def __init__(self, device: Device, tiers: Tiers) -> None:
        self._device, self._tiers = device, tiers

    def queue(
        self,
        verb: Verb,
        gradients: LayerGradients,
        changed: Sequence[str],
        work: Callable[[Piece], None],
        bytes_each: Callable[[Format], float],
        *,
        also_writes: Sequence[Record] = (),
        needs_load: bool = True,
        last: Callable[[Work], Work] | None = None,
    ) -> None:
        """Queue `work` over a layer. It reads the gradients and writes the arrays `changed`, and
        what `also_writes` names. `bytes_each(format)`: bytes that it moves for an element.
        `needs_load`: False if the changed arrays have nothing yet. `last` wraps the work of the
        last piece."""
        state = gradients.state
        lane = self._device.update if verb is Verb.UPDATE else self._device.gradients
        in_memory = state.in_memory(changed)
        writes = [*state.records_of(in_memory), *also_writes]
        arrays = (*changed, *gradients.arrays)
        filed = tuple(a for a in state.staged if a in arrays)
        if filed:
            self._queue_staged(
                verb,
                gradients,
                changed,
                filed,
                work,
                bytes_each,
                writes,
                last,
                needs_load=needs_load,
            )
            return
        nbytes = gradients.elements.moved_bytes(bytes_each)
        pieces = pieces_in_memory(gradients, (*in_memory, *gradients.arrays))
        run: Work = partial(_each, work, pieces)
        lane.submit(
            f"{verb.value} {state.index}",
            run if last is None else last(run),
            reads=(gradients.record,),
            writes=writes,
            nbytes=nbytes,
        )

    # -- pieces of files --------------------------------------------------------------------------
    def _queue_staged(
        self,
        verb: Verb,
        gradients: LayerGradients,
        changed: Sequence[str],
        filed: tuple[str, ...],
        work: Callable[[Piece], None],
        bytes_each: Callable[[Format], float],
        writes: Sequence[Record],
        last: Callable[[Work], Work] | None,
        *,
        needs_load: bool,
    ) -> None:
        """Queue an operation whose arrays `filed` are in files: load, work, spill."""
        state, device = gradients.state, self._device
        lane = device.update if verb is Verb.UPDATE else device.gradients
        operation = f"{verb.value} {state.index}"
        arrays = (*state.in_memory(changed), *gradients.arrays)
        kept = tuple(a for a in arrays if a not in filed)
        spills = tuple(a for a in filed if a in changed)
        reads = () if gradients.array in filed else (gradients.record,)
        spilled = tuple(fence for each in state.records_of(spills) for fence in each.users)
        cuts = list(self._cuts(gradients, filed))
        if not cuts:  # no element of this rank's has a gradient
            run = _nothing if last is None else last(_nothing)
            lane.submit(operation, run, reads=reads, writes=writes)
        for begin, end, from_files in cuts:
            piece = Piece(gradients, begin, end, {})
            if from_files:
                self._stage(verb, piece, from_files, needs_load=needs_load)
            piece.views = piece.views | state.views_of(kept, begin, end)
            entry, run = piece.entry, partial(work, piece)
            if last is not None and (begin, end, from_files) == cuts[-1]:
                run = last(run)
            lane.submit(
                operation,
                run,
                reads=reads,
                writes=writes if entry is None else (entry.record, *writes),
                nbytes=int(bytes_each(piece.format) * (end - begin)),
            )
            if entry is not None and any(array in spills for array in from_files):
                views = {array: piece.views[array] for array in from_files if array in spills}
                fence = self._tiers.queue_spill(
                    device, state.index, begin, end, views, entry, spilled, what=WHAT[verb]
                )
                spilled = (fence,)
        for record in state.records_of(spills) if cuts and spilled else ():
            record.write(spilled[0])

    def _cuts(
        self, gradients: LayerGradients, filed: tuple[str, ...]
    ) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """The pieces that have a gradient: begin, end, and those of the arrays `filed` that have
        the elements. In memory a piece is this rank's share of a range."""
        state = gradients.state
        for share in state.shares:
            arrays = tuple(a for a in filed if state.maps[a].has(*share))
            cuts = self._tiers.piece_spans(state.index, arrays, *share) if arrays else iter([share])
            for begin, end in cuts:
                if gradients.elements.has_any(begin, end):
                    yield begin, end, arrays

    def _stage(self, verb: Verb, piece: Piece, filed: tuple[str, ...], *, needs_load: bool) -> None:
        """Give the piece a staging entry, and queue its load if it needs one."""
        state, begin, end = piece.gradients.state, piece.begin, piece.end
        piece.entry = self._tiers.updates.next()
        if needs_load:
            piece.views = self._tiers.queue_load(
                self._device, state, begin, end, filed, piece.entry, what=WHAT[verb]
            )
        else:
            piece.views = self._tiers.piece_views(
                piece.entry.memory, state.index, filed, begin, end
            )


def _each(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        work(piece)


def _nothing() -> None:
    """The work of an operation that has no piece."""
