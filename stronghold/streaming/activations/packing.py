"""Saved-tensor hooks: the pair of functions around one forward of a layer.

Decides which handle stands for a tensor that autograd saves (pack), and resolves the handle in
backward (unpack). Owns no tensor: handles are in `saved`, offloaded bytes in `offload`. The
training thread packs in forward. Autograd's thread unpacks in backward, and packs in a second run.

[Note: foreign hooks] The user's own checkpointing works by saved-tensor hooks, too. Torch applies
the innermost pair alone. So our pair passes every tensor outside of slots on to the pair that was
active before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stronghold.streaming.activations.offload import ActivationOffload
from stronghold.streaming.activations.recompute import Place, Recomputation
from stronghold.streaming.activations.saved import (
    ForeignHooks,
    SavedActivation,
    SavedDecoded,
    SavedForeign,
    SavedResident,
    SavedSparse,
    SavedTensor,
    SavedWeight,
    refuse_newer_weights,
    refuse_written,
    refuse_written_resident,
)
from stronghold.streaming.executor import Executor
from stronghold.streaming.patches.autograd import Hooks
from stronghold.streaming.patches.tensors import sparse_parts, version_of

OuterPack = Callable[[torch.Tensor], Any]  # of the user's hooks, or of a recomputation


# Layouts with compressed indices: the methods that return the two tensors of indices.
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class HookPairs:
    """Makes the pairs of hooks. `run_again` starts the second run of a forward."""

    def __init__(
        self,
        executor: Executor,
        offload: ActivationOffload,
        run_again: Callable[[Recomputation], None],
    ) -> None:
        self._executor = executor
        self._offload = offload
        self._run_again = run_again

    def make(
        self,
        layer: int,
        *,
        foreign: ForeignHooks | None = None,
        outer: OuterPack | None = None,
        recomputation: Recomputation | None = None,
        offloads: bool = False,
    ) -> Hooks:
        """Return pack and unpack for one forward of the layer.

        They are called for each saved tensor, some forty times a block. So they look up in local
        variables, and make named tuples without the Python of `__new__`. Neither function names
        itself or the other one: a cycle would keep the block's inputs after the graph has died.

        Args:
            layer: the layer whose forward runs.
            foreign: the user's hooks; they unpack their own handles.
            outer: packs each tensor outside of slots, if given.
            recomputation: the one whose places this forward saves.
            offloads: whether large tensors go to the host.
        """
        executor, layers = self._executor, self._executor.layers
        run_again, weights, offload = (self._run_again, self._executor.weights, self._offload)
        layer_at, staying, decoded = weights.layer_at, weights.staying, weights.decoded
        is_worth_offloading = offload.is_worth_offloading
        new: Any = tuple.__new__

        def pack(tensor: torch.Tensor) -> Any:
            try:
                address = tensor.untyped_storage().data_ptr()
            except NotImplementedError:  # not strided; to ask for the layout takes 2 us
                return self._pack_sparse(tensor, layer, outer, offloads=offloads)
            slot_layer = layer_at.get(address)
            if slot_layer is not None:
                offset, epoch = tensor.storage_offset(), layers[slot_layer].views.epoch
                view = offset, tensor.shape, tensor.stride()
                return new(SavedWeight, (slot_layer, epoch, tensor.dtype, *view))
            if address == decoded.address and decoded.layer is not None:
                offset = tensor.storage_offset()
                place = (decoded.layer, tensor.dtype, offset, tensor.shape, tensor.stride())
                return new(SavedDecoded, place)
            if address in staying:
                # [Note: pack] of `saved`
                return SavedResident(tensor.detach(), version_of(tensor))
            if outer is not None:
                return outer(tensor)
            if offloads and is_worth_offloading(tensor):
                return offload.offload(layer, tensor)
            return new(SavedTensor, (tensor.detach(), version_of(tensor)))

        def unpack(packed: Any) -> torch.Tensor:
            if type(packed) is Place:
                assert recomputation is not None
                packed = recomputation.take(packed, run_again)
            if type(packed) is SavedTensor:
                tensor, version = packed
                return tensor if version_of(tensor) == version else refuse_written(packed)
            if type(packed) is SavedWeight:
                saved_layer, epoch, dtype, offset, shape, stride = packed
                if layers[saved_layer].views.epoch != epoch:
                    refuse_newer_weights(layers[saved_layer], epoch)
                weight = executor.weights_of(saved_layer, layer)
                if weight.dtype is not dtype:
                    weight = weight.view(dtype)
                weight = weight.as_strided(shape, stride, offset)
                # Under create_graph backward saves it in its turn, outside of our hooks. Backward
                # of that graph needs it when the slot holds another layer.
                return weight.clone() if torch.is_grad_enabled() else weight
            if type(packed) is SavedDecoded:
                return self._decoded(packed, layer)
            if type(packed) is SavedSparse:
                return self._unpack_sparse(packed, layer, foreign, recomputation)
            return self._unpack_rare(packed, foreign)

        return pack, unpack

    def _decoded(self, packed: SavedDecoded, layer: int) -> torch.Tensor:
        """Return a saved view of a decoded weight. `layer`: whose forward saved it."""
        memory = self._executor.decoded_weights_of(packed.layer, layer).view(packed.dtype)
        weight = memory.as_strided(packed.shape, packed.stride, packed.offset)
        if torch.is_grad_enabled():  # as for a `SavedWeight`
            return weight.clone()
        return weight

    def _pack_sparse(
        self, tensor: torch.Tensor, layer: int, outer: OuterPack | None, *, offloads: bool
    ) -> Any:
        """Return the handle of a sparse tensor ([Note: sparse] of `saved`)."""
        layer_at = self._executor.weights.layer_at
        tensors = _strided_tensors(tensor)
        if any(strided.untyped_storage().data_ptr() in layer_at for strided in tensors):
            pack, _ = self.make(layer, outer=outer, offloads=offloads)
            handles = tuple(map(pack, tensors))
            is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            return SavedSparse(handles, tensor.layout, tensor.shape, is_coalesced)
        if outer is not None:
            return outer(tensor)
        return SavedTensor(tensor.detach(), version_of(tensor))

    def _unpack_sparse(
        self,
        packed: SavedSparse,
        layer: int,
        foreign: ForeignHooks | None,
        recomputation: Recomputation | None,
    ) -> torch.Tensor:
        _, unpack = self.make(layer, foreign=foreign, recomputation=recomputation)
        return packed.built_from([unpack(handle) for handle in packed.handles])

    def _unpack_rare(self, packed: Any, foreign: ForeignHooks | None) -> torch.Tensor:
        if isinstance(packed, SavedResident):
            if version_of(packed.tensor) != packed.version:
                refuse_written_resident()
            return packed.tensor
        if isinstance(packed, SavedActivation):
            return self._offload.load(packed)
        assert isinstance(packed, SavedForeign)
        assert foreign is not None
        unpack = foreign.pair[1]
        return unpack(packed.packed)


def _strided_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a sparse tensor. Empty for a layout whose memory torch does
    not show."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    names = _COMPRESSED.get(tensor.layout)
    if names is None:
        return []
    indices = [getattr(tensor, name)() for name in names]
    return [*indices, tensor.values()]
