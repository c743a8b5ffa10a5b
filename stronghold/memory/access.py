"""Access to arrays from outside of the lanes: for checkpoints, for the adoption of a model, and for
programs that read or write masters and moments.

Owns no memory. Arrays on the host are shown in place. Arrays on the GPU and in staged homes pass
through host memory piece by piece. The training thread enters, and the io lane for checkpoints.
Callers have waited for the layer's operations, and start none meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from stronghold.devices.base import Device
from stronghold.errors import StateError
from stronghold.memory.layer import LayerState
from stronghold.memory.slab import flush
from stronghold.memory.tiers import Mode, Tiers, Views
from stronghold.model.layout import ParameterSlice, Span
from stronghold.optim.states import Format, items, join_master
from stronghold.plan.homes import GPU

# elements of a piece that comes from the GPU: a multiple of every group
COPIED_NUMEL = 1 << 20


class ArrayAccess:
    """Access to the arrays of `layers`.

    `has_state`: masters and moments exist, in staged homes too.
    """

    def __init__(self, layers: Sequence[LayerState], tiers: Tiers, device: Device) -> None:
        self._layers = layers
        self._tiers = tiers
        self._device = device
        self.has_state = False

    def has(self, index: int, array: str) -> bool:
        """True if the layer has the array now, in memory or in a staged home."""
        state = self._layers[index]
        is_staged = self.has_state and state.home_of(array).is_staged
        return is_staged or state.array(array) is not None

    def pieces(
        self,
        index: int,
        arrays: Sequence[str],
        begin: int,
        end: int,
        *,
        mode: Mode = "read",
        memory: Mapping[str, torch.Tensor] | None = None,
    ) -> Iterator[tuple[slice, Views]]:
        """Yield elements [begin, end) of a layer's arrays, piece by piece.

        index       the layer
        arrays      names of its arrays. A piece lacks those that its range does not have
        begin, end  elements, counted from the layer's first
        mode        "read"; "edit": the caller changes the values; "replace": the caller writes all
        memory      the arrays in memory by name, as `LayerState.all_arrays` gave them earlier.
                    None: the present ones. Arrays in staged homes are read there

        Yields pairs. The slice names the piece's elements, counted from `begin`. The dict has flat
        host tensors by array name, in the dtypes of the piece's range. They are valid until the
        next piece, which writes back what "edit" and "replace" have changed.

        Each rank gets its shares. Arrays that lie on the host come as one piece per range.
        """
        is_on_gpu = self._layers[index].home is GPU
        for elements, views in self._in_place(index, arrays, begin, end, mode, memory or {}):
            if is_on_gpu:
                yield from self._copied(elements, views, mode)
            else:
                yield elements, views

    def _copied(
        self, elements: slice, gpu_views: Views, mode: Mode
    ) -> Iterator[tuple[slice, Views]]:
        """Yield copies in host memory of arrays on the GPU, piece by piece, as `pieces`."""
        numel = elements.stop - elements.start
        room: Views = {}
        for first in range(0, numel, COPIED_NUMEL):
            last = min(first + COPIED_NUMEL, numel)
            targets = {name: view[items(name, first, last)] for name, view in gpu_views.items()}
            if not room:
                room = {
                    name: torch.empty_like(view, device="cpu") for name, view in targets.items()
                }
            piece = {name: room[name][: view.numel()] for name, view in targets.items()}
            if mode != "replace":
                for name, view in targets.items():
                    self._device.copy_now(piece[name], view)
            yield slice(elements.start + first, elements.start + last), piece
            if mode != "read":
                for name, view in targets.items():
                    self._device.copy_now(view, piece[name])

    def _in_place(
        self,
        index: int,
        arrays: Sequence[str],
        begin: int,
        end: int,
        mode: Mode,
        memory: Mapping[str, torch.Tensor],
    ) -> Iterator[tuple[slice, Views]]:
        """Yield pieces as `pieces` does, but arrays on the GPU as GPU tensors.

        `memory`: flat memory of arrays that are not looked up in the layer.
        """
        state = self._layers[index]
        staged = [name for name in arrays if state.home_of(name).is_staged]
        in_memory = {}
        for name in arrays:
            if name in staged:
                continue
            in_memory[name] = memory[name] if name in memory else self._in_memory(state, name)
        for layer_range, span in state.layout.within(begin, end):
            share = state.shards.of(layer_range)
            low = max(span[0], share[0])
            high = min(span[1], share[1])
            if low >= high:
                continue
            pieces: Iterator[tuple[int, int, Views]] = iter([(low, high, {})])
            if staged:
                pieces = self._tiers.staged_pieces(index, staged, low, high, mode)
            for first, last, views in pieces:
                for name, flat in in_memory.items():
                    if state.maps[name].has(first, last):
                        views[name] = state.maps[name].view(flat, first, last)
                yield slice(first - begin, last - begin), views

    @staticmethod
    def _in_memory(state: LayerState, array: str) -> torch.Tensor:
        memory = state.array(array)
        if memory is None:
            raise StateError(f"layer {state.index} has no array {array!r} in memory")
        return memory

    def flush(self, index: int) -> None:
        """Write the weights of mapped files to the disk, after the parameters were written."""
        state = self._layers[index]
        if state.home_of("weights").is_staged:
            flush(state.weights)

    # -- masters ----------------------------------------------------------------------------------
    def _master_arrays(self, index: int) -> tuple[str, ...]:
        return ("weights", "low") if self.has(index, "low") else ("weights",)

    def master(self, index: int, parameter: ParameterSlice) -> torch.Tensor:
        """The fp32 master of one trainable parameter: a new tensor of the parameter's shape.

        Elements of other ranks are zero.
        """
        master = torch.zeros(parameter.shape, dtype=torch.float32)
        flat = master.view(-1)
        begin = parameter.offset
        arrays = self._master_arrays(index)
        for elements, views in self.pieces(index, arrays, begin, begin + parameter.numel):
            flat[elements] = join_master(views["weights"], views.get("low"))
        return master

    def write_master(
        self, index: int, parameter: ParameterSlice, begin: int, master: torch.Tensor
    ) -> None:
        """Write `master` as the master of the parameter's elements from `begin` on.

        `master`: flat fp32 tensor. The weights are rounded from it as updates do: bf16 to nearest,
        ties away from zero.
        """
        first = parameter.offset + begin
        last = first + master.numel()
        trained = self._layers[index].formats[parameter.format].trained
        arrays = self._master_arrays(index)
        for elements, views in self.pieces(index, arrays, first, last, mode="replace"):
            weights, low = trained.split(master[elements])
            views["weights"].copy_(weights)
            if low is not None:
                views["low"].copy_(low)

    def restart_master(self, index: int, positions: Collection[int] | None = None) -> None:
        """Make masters equal to the weights, which were written from outside.

        `positions`: the parameters, or None for all.
        """
        if not self.has(index, "low"):
            return
        layout, formats = self._layers[index].layout, self._layers[index].formats
        spans = [layer_range.span for layer_range in layout.trainable_ranges]
        if positions is not None:
            slices = [layout.slices[position] for position in sorted(positions)]
            spans = [
                (parameter.offset, parameter.offset + parameter.numel)
                for parameter in slices
                if parameter.trainable
            ]
        for span in spans:
            for layer_range, elements in layout.within(*span):
                self._restart_range(index, formats[layer_range.format], elements)

    def _restart_range(self, index: int, weight_format: Format, elements: Span) -> None:
        begin, end = elements
        low = weight_format.trained.low
        if low is torch.float32:  # the whole master
            arrays: tuple[str, ...] = ("weights", "low")
            for _, views in self._in_place(index, arrays, begin, end, "edit", {}):
                views["low"].copy_(views["weights"])
        elif low is not None:  # the remainder beside the weight
            for _, views in self._in_place(index, ("low",), begin, end, "replace", {}):
                views["low"].zero_()
