"""Access to arrays from outside of the lanes, wherever they lie: checkpoints, the adoption of a
model, and programs that read or write masters and moments.

Owns no memory. Arrays on the host are shown where they are, those on the GPU and those of staged
homes pass host memory piece by piece. The training thread enters, and the io lane for checkpoints.
Callers have waited for the layer's operations, and let none begin meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from stronghold.device.base import Device
from stronghold.errors import StateError
from stronghold.memory.layer import LayerState
from stronghold.memory.slab import flush
from stronghold.memory.tiers import Mode, Tiers, Views
from stronghold.model.layout import ParameterSlice
from stronghold.optim.states import items, join_master
from stronghold.plan.homes import GPU

COPIED_NUMEL = 1 << 20  # elements of a piece that comes from the GPU: a multiple of every group


class ArrayAccess:
    """The arrays of `layers`. `has_state`: what only training needs exists, in staged homes too."""

    def __init__(self, layers: Sequence[LayerState], tiers: Tiers, device: Device) -> None:
        self._layers, self._tiers, self._device = layers, tiers, device
        self.has_state = False

    def has(self, index: int, array: str) -> bool:
        """Whether the layer has the array now, in memory or in a staged home."""
        state = self._layers[index]
        is_staged = self.has_state and state.home_of(array).is_staged
        return is_staged or state.array(array) is not None

    def pieces(
        self, index: int, arrays: Sequence[str], begin: int, end: int, *, mode: Mode = "read"
    ) -> Iterator[tuple[slice, Views]]:
        """Elements [begin, end) of `arrays`, piece by piece: which of them, counted from `begin`,
        and flat tensors of host memory by name, in the dtypes of the range that has the piece.

        Of several ranks each gets the pieces that are its own. One piece for each range where all
        lie on the host. An array that a range does not have is left out of its pieces. Tensors are
        valid until the next piece; "edit" and "replace" make what the caller writes to them the
        arrays' values, and the caller of "replace" writes all of it.
        """
        is_on_gpu = self._layers[index].home is GPU
        for own, views in self._in_place(index, arrays, begin, end, mode):
            if is_on_gpu:
                yield from self._copied(own, views, mode)
            else:
                yield own, views

    def _copied(self, own: slice, there: Views, mode: Mode) -> Iterator[tuple[slice, Views]]:
        """Arrays on the GPU, in host memory, as `pieces`."""
        numel = own.stop - own.start
        room: Views = {}
        for first in range(0, numel, COPIED_NUMEL):
            last = min(first + COPIED_NUMEL, numel)
            targets = {a: view[items(a, first, last)] for a, view in there.items()}
            if not room:
                room = {a: torch.empty_like(view, device="cpu") for a, view in targets.items()}
            piece = {a: room[a][: view.numel()] for a, view in targets.items()}
            if mode != "replace":
                for array, view in targets.items():
                    self._device.copy_now(piece[array], view)
            yield slice(own.start + first, own.start + last), piece
            if mode != "read":
                for array, view in targets.items():
                    self._device.copy_now(view, piece[array])

    def _in_place(
        self, index: int, arrays: Sequence[str], begin: int, end: int, mode: Mode
    ) -> Iterator[tuple[slice, Views]]:
        """As `pieces`, but arrays on the GPU are shown where they are."""
        state = self._layers[index]
        staged = [array for array in arrays if state.home_of(array).is_staged]
        in_memory = {a: self._in_memory(state, a) for a in arrays if a not in staged}
        for each, span in state.layout.within(begin, end):
            share = state.shards.of(each)
            low, high = max(span[0], share[0]), min(span[1], share[1])
            if low >= high:
                continue
            pieces: Iterator[tuple[int, int, Views]] = iter([(low, high, {})])
            if staged:
                pieces = self._tiers.staged_pieces(index, staged, low, high, mode)
            for first, last, views in pieces:
                for array, memory in in_memory.items():
                    if state.maps[array].has(first, last):
                        views[array] = state.maps[array].view(memory, first, last)
                yield slice(first - begin, last - begin), views

    @staticmethod
    def _in_memory(state: LayerState, array: str) -> torch.Tensor:
        memory = state.array(array)
        if memory is None:
            raise StateError(f"layer {state.index} has no array {array!r} in memory")
        return memory

    def flush(self, index: int) -> None:
        """New weights were written where the parameters rest: bring them to their home."""
        state = self._layers[index]
        if state.home_of("weights").is_staged:
            flush(state.weights)

    # -- masters ----------------------------------------------------------------------------------
    def _master_arrays(self, index: int) -> tuple[str, ...]:
        return ("weights", "low") if self.has(index, "low") else ("weights",)

    def master(self, index: int, part: ParameterSlice) -> torch.Tensor:
        """The fp32 master of one trainable parameter, as a fresh tensor of its shape, with zeros
        for what other ranks have."""
        master = torch.zeros(part.shape, dtype=torch.float32)
        flat, at, arrays = master.view(-1), part.offset, self._master_arrays(index)
        for own, views in self.pieces(index, arrays, at, at + part.numel):
            flat[own] = join_master(views["weights"], views.get("low"))
        return master

    def write_master(
        self, index: int, part: ParameterSlice, begin: int, master: torch.Tensor
    ) -> None:
        """Make `master` (flat, fp32) the master of the parameter's elements from `begin` on, and
        round the weights from it: bf16 to nearest, ties away from zero, as updates do."""
        at, formats = part.offset + begin, self._layers[index].formats
        arrays = self._master_arrays(index)
        for own, views in self.pieces(index, arrays, at, at + master.numel(), mode="replace"):
            weights, low = formats[part.format].trained.split(master[own])
            views["weights"].copy_(weights)
            if low is not None:
                views["low"].copy_(low)

    def restart_master(self, index: int, positions: Collection[int] | None = None) -> None:
        """Make the masters of the parameters at `positions`, or of all, equal to their weights,
        which were written from outside."""
        if not self.has(index, "low"):
            return
        layout, formats = self._layers[index].layout, self._layers[index].formats
        spans = [each.span for each in layout.trainable_ranges]
        if positions is not None:
            parts = [layout.slices[k] for k in sorted(positions) if layout.slices[k].trainable]
            spans = [(part.offset, part.offset + part.numel) for part in parts]
        for span in spans:
            for each, (begin, end) in layout.within(*span):
                low = formats[each.format].trained.low
                if low is torch.float32:  # the master itself
                    arrays: tuple[str, ...] = ("weights", "low")
                    for _, views in self._in_place(index, arrays, begin, end, "edit"):
                        views["low"].copy_(views["weights"])
                elif low is not None:  # a remainder
                    for _, views in self._in_place(index, ("low",), begin, end, "replace"):
                        views["low"].zero_()
