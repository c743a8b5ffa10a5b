"""Sums, norms and optimizer steps of the layers that are updated on the host.

Every operation takes the same path, piece by piece: load the arrays that are in files, work on the
lane of gradients or of updates, spill the arrays that changed. A layer in memory is one operation
without loads. The training thread submits, and autograd's in backward; lanes compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from stronghold import native
from stronghold.device.base import Fence, dependences
from stronghold.memory.layer import LayerState
from stronghold.memory.tiers import Views
from stronghold.model.layout import ParameterSlice
from stronghold.optim.states import Format
from stronghold.runtime.parts import Parts
from stronghold.runtime.pieces import (
    Gradients,
    Piece,
    PieceNorms,
    gradient_bytes,
    set_or_add,
    step_bytes,
)
from stronghold.runtime.steps import ParameterStep

Work = Callable[[], None]
# What the name of a load or a spill has beside the verb: the arrays, where they are not the
# optimizer's.
WHAT = {"update": "", "norm": " gradients", "merge": " gradients", "accumulate": " sums"}


class HostUpdates:
    """Works on the arrays of layers whose home is the host, or a file.

    Sums and norms run on the lane of gradients, and optimizer steps on the lane of updates.
    """

    def __init__(self, parts: Parts) -> None:
        self._device, self._kernels, self._team = parts.device, parts.kernels, parts.team
        self._host, self._tiers = parts.host, parts.host.tiers

    # -- the three operations ---------------------------------------------------------------------
    def set_or_add(self, batch: Sequence[Gradients], array: str, *, norms: bool) -> None:
        """Bring gradients to an array of their layers, "gradients" or "accumulated": add to what
        it has of a parameter, else set it. `norms`: take sums of squares of the result."""
        for gradients in batch:
            state = gradients.state
            positions = state.gradients.positions(array)
            added = gradients.positions & positions
            is_first = not positions
            positions |= gradients.positions
            taken = PieceNorms(self._kernels, state.gradients.square_sums) if norms else None
            if array == "accumulated":
                self._accumulate(gradients, added, taken, is_first=is_first)
            else:
                self._merge(gradients, added, taken, is_first=is_first)

    def _merge(
        self,
        gradients: Gradients,
        added: frozenset[int],
        norms: PieceNorms | None,
        *,
        is_first: bool,
    ) -> None:
        """Bring gradients, in their dtype, to the array "gradients". They may be there already: the
        offload writes them there where it can."""

        def work(piece: Piece) -> None:
            pending = piece.views["gradients"]
            if pending.data_ptr() != piece.flat.data_ptr():
                for k, at, numel in piece.parameters():
                    place = slice(at - piece.begin, at - piece.begin + numel)
                    set_or_add(pending[place], piece.flat[place], add=k in added)
            if norms is not None:
                norms.add(piece, "gradients")

        self._over_pieces(
            "merge" if norms is None else "norm",
            gradients,
            ("gradients",),
            work,
            gradient_bytes,
            writes_norms=norms is not None,
            is_first=is_first,
        )

    def _accumulate(
        self,
        gradients: Gradients,
        added: frozenset[int],
        norms: PieceNorms | None,
        *,
        is_first: bool,
    ) -> None:
        """Add gradients to the layer's fp32 sums; those that are not `added` begin one."""

        def work(piece: Piece) -> None:
            sums = piece.views["accumulated"]
            segments = [
                (piece.address(k, at), sums.data_ptr() + (at - piece.begin) * 4, numel, k in added)
                for k, at, numel in piece.parameters()
            ]
            if segments:
                self._kernels.accumulate(piece.format.dtype, segments)
            if norms is not None:
                norms.add(piece, "accumulated")

        # Gradients are read, sums read and written; they are read once more for a norm.
        more = 8 if norms is None else 12

        def bytes_each(made: Format) -> float:
            return made.dtype.itemsize + more

        self._over_pieces(
            "accumulate",
            gradients,
            ("accumulated",),
            work,
            bytes_each,
            writes_norms=True,
            is_first=is_first,
        )

    def update(self, gradients: Gradients, steps: Sequence[ParameterStep]) -> None:
        """One optimizer step of a layer, in place. `steps`: of the parameters that have gradients,
        in the order of their positions."""
        numbers = dict(zip(sorted(gradients.positions), steps, strict=True))

        def work(piece: Piece) -> None:
            self._step(piece, numbers, targets=None)

        changed = gradients.state.changed
        bytes_each = partial(step_bytes, summed=gradients.array == "accumulated")
        self._over_pieces("update", gradients, changed, work, bytes_each, writes_norms=False)
        self._team.exchange(gradients.state)

    def update_early(self, gradients: Gradients, steps: Sequence[ParameterStep]) -> Fence:
        """The same step, out of place: it reads the layer's arrays and writes its second ones. All
        of these are written, also where a parameter has no step. The layer lies in memory."""
        state, second = gradients.state, gradients.state.second
        assert second is not None
        numbers = dict(zip(sorted(gradients.positions), steps, strict=True))
        # All addresses are taken now: when the lane runs this, the gate may have committed it, and
        # the layer's arrays are the second ones then.
        pieces = whole_layer(gradients, (*state.changed, *gradients.arrays))
        targets = [piece.targets() for piece in pieces]
        others = sorted(frozenset(range(len(state.parameters))) - gradients.positions)
        copies = [copy for k in others for copy in _without_step(state, state.layout.slices[k])]

        def work() -> None:
            for piece, of_piece in zip(pieces, targets, strict=True):
                self._step(piece, numbers, targets=of_piece)
            for target, source in copies:
                target.copy_(source)

        bytes_each = partial(step_bytes, summed=gradients.array == "accumulated")
        return self._device.update.submit(
            f"update early {state.index}",
            work,
            reads=(gradients.record, *state.records_of(second.arrays)),
            writes=tuple(second.records.values()),
            nbytes=int(gradients.moved_bytes(bytes_each)),
        )

    def _step(
        self,
        piece: Piece,
        numbers: Mapping[int, ParameterStep],
        targets: list[native.Target] | None,
    ) -> None:
        made = piece.format
        self._kernels.update(
            made.kernel,
            made.dtype,
            piece.grad_dtype,
            piece.segments(numbers),
            lean=made.trained.is_lean,
            targets=targets,
        )

    # -- square sums ------------------------------------------------------------------------------
    def square_sums(self, state: LayerState) -> list[float]:
        """The sums of squares of the layer's gradients, whose operations have ended. A parameter
        that was summed before, and got no gradient in the last micro-batch, has none yet."""
        gradients = state.gradients
        arrived = gradients.arrived
        for k in sorted(arrived - gradients.square_sums.keys()):
            self._take_square_sum(state, k)
        return [gradients.square_sums[k] for k in arrived]

    def _take_square_sum(self, state: LayerState, k: int) -> None:
        ((_, begin, end),) = state.elements((k,))
        norms = PieceNorms(self._kernels, state.gradients.square_sums)
        state.gradients.square_sums[k] = 0.0
        part, array = state.layout.slices[k], state.gradients.array
        state.records[array].wait()
        at, stop = part.offset, part.offset + part.numel
        for piece, views in self._host.access.pieces(state.index, (array,), at, stop):
            norms.add_part(views[array], at + piece.start, at + piece.stop, k, begin, end - begin)

    # -- one path for all of them -----------------------------------------------------------------
    def _over_pieces(
        self,
        verb: str,
        gradients: Gradients,
        changed: Sequence[str],
        work: Callable[[Piece], None],
        bytes_each: Callable[[Format], float],
        *,
        writes_norms: bool,
        is_first: bool = False,
    ) -> None:
        """Queue `work` over a layer, piece by piece. It reads the gradients and writes the arrays
        `changed`, and the norms. `bytes_each(format)`: bytes that it moves for an element.
        `is_first`: the changed arrays have nothing yet, so they need not be loaded."""
        state, device = gradients.state, self._device
        lane = device.update if verb == "update" else device.gradients
        last: Callable[[Work], Work] = lambda run: run  # noqa: E731
        if verb == "update":
            last = partial(self._team.publishing, state)
        in_memory = self._in_memory(state, changed)
        norms = [state.records["norms"]] if writes_norms else []
        writes = [*state.records_of(in_memory), *norms]
        arrays = (*changed, *gradients.arrays)
        filed = tuple(a for a in state.staged if a in arrays)
        if not filed:
            pieces = whole_layer(gradients, (*in_memory, *gradients.arrays))
            lane.submit(
                f"{verb} {state.index}",
                last(partial(_each, work, pieces)),
                reads=(gradients.record,),
                writes=writes,
                nbytes=int(gradients.moved_bytes(bytes_each)),
            )
            return
        kept = tuple(a for a in (*in_memory, *gradients.arrays) if a not in filed)
        spills = tuple(a for a in filed if a in changed)
        reads = () if gradients.array in filed else (gradients.record,)
        spilled = dependences((), (), state.records_of(spills))
        cuts = list(self._cut(gradients, filed))
        if not cuts:  # no element of this rank's has a gradient
            run = last(lambda: None)
            device.update.submit(f"{verb} {state.index}", run, reads=reads, writes=writes)
        for begin, end, from_files in cuts:
            if from_files:
                piece = self._staged(verb, gradients, begin, end, from_files, is_first=is_first)
            else:
                piece = Piece(gradients, begin, end, {})
            piece.views = piece.views | memory_views(state, kept, begin, end)
            entry = piece.entry
            run = partial(work, piece)
            lane.submit(
                f"{verb} {state.index}",
                run if (begin, end, from_files) != cuts[-1] else last(run),
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

    def _cut(
        self, gradients: Gradients, filed: tuple[str, ...]
    ) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """The pieces that have a gradient: begin, end, and those of the arrays `filed` that have
        the elements. In memory a piece is this rank's share of a range."""
        state = gradients.state
        for share in state.shares:
            arrays = tuple(a for a in filed if state.maps[a].has(*share))
            cuts = self._tiers.cuts(state.index, arrays, *share) if arrays else iter([share])
            for begin, end in cuts:
                if _has_gradient(gradients, begin, end):
                    yield begin, end, arrays

    def _in_memory(self, state: LayerState, arrays: Iterable[str]) -> tuple[str, ...]:
        """Those of `arrays` that the layer has in memory."""
        filed = state.staged
        return tuple(a for a in arrays if a not in filed and state.array(a) is not None)

    # -- pieces of files --------------------------------------------------------------------------
    def _staged(
        self,
        verb: str,
        gradients: Gradients,
        begin: int,
        end: int,
        filed: tuple[str, ...],
        *,
        is_first: bool,
    ) -> Piece:
        """A piece with room in a staging entry, whose load is queued unless there is nothing."""
        state = gradients.state
        if is_first:
            entry = self._tiers.updates.next()
            views = self._tiers.views(entry.memory, state.index, filed, begin, end)
            return Piece(gradients, begin, end, views, entry)
        entry = self._tiers.updates.next()
        views = self._tiers.queue_load(
            self._device, state, begin, end, filed, entry, what=WHAT[verb]
        )
        return Piece(gradients, begin, end, views, entry)


def whole_layer(gradients: Gradients, arrays: Sequence[str]) -> list[Piece]:
    """A layer that is in memory, with these arrays: a piece for each range that has a gradient."""
    state = gradients.state
    return [
        Piece(gradients, begin, end, memory_views(state, arrays, begin, end))
        for begin, end in state.shares
        if _has_gradient(gradients, begin, end)
    ]


def _without_step(
    state: LayerState, part: ParameterSlice
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a parameter has in the second arrays, and in the layer's own."""
    begin, end = part.offset, part.offset + part.numel
    for array in state.changed:
        source, target = state.view(array, begin, end), state.second_view(array, begin, end)
        if source is not None and target is not None:
            yield target, source


def memory_views(state: LayerState, arrays: Iterable[str], begin: int, end: int) -> Views:
    """Elements [begin, end) of those arrays that their range has."""
    views: dict[str, torch.Tensor] = {}
    for array in arrays:
        view = state.view(array, begin, end)
        if view is not None:
            views[array] = view
    return views


def _has_gradient(gradients: Gradients, begin: int, end: int) -> bool:
    parameters = gradients.state.owned(gradients.positions).parts
    return any(begin < at + numel and at < end for _, at, numel in parameters)


def _each(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        work(piece)
