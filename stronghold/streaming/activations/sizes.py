"""Sizes of saved tensors: the bytes that each layer's forward keeps for backward.

Owns the counts of the first steps, from which the planner refines its plan. Never keeps a tensor
longer than one forward. The training thread enters in forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stronghold.model.gpu_operators import AttentionCost, total_attention
from stronghold.streaming.patches.tensors import sparse_parts, tree_leaves

# Layouts with compressed indices: the methods that return the two tensors of indices.
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class ActivationSizes:
    """Counts the bytes that the forwards of each layer save.

    All lists have one element per layer, for the largest forward so far. Parameters and slots are
    not counted. A storage counts once per forward. Nothing is counted unless `counting`.

    saved            bytes that autograd keeps for backward
    boundary         bytes of the arguments, which recomputation keeps instead
    attended         cost of the attention kernels among them
    square_saved     bytes of `saved` that grow with the square of `length`
    square_boundary  bytes of `boundary` that grow with the square of `length`
    length           tokens of a sequence of the running batch; 0: unknown
    least_chunks     the smallest number of chunks of a divided call; 1: none was divided
    """

    def __init__(self, num_layers: int) -> None:
        self.counting = False
        self.saved = [0] * num_layers
        self.boundary = [0] * num_layers
        self.length = 0
        self.square_saved = [0] * num_layers
        self.square_boundary = [0] * num_layers
        self.attended = [total_attention(())] * num_layers
        self.least_chunks = 1
        self._num_chunks = 0  # of the running call; 0: it is not divided
        self._layer: int | None = None  # the layer whose first forward runs
        # By address. They stay alive during the forward: a freed address would be used again.
        self._counted: dict[int, torch.UntypedStorage] = {}
        self._bytes = 0
        self._square_bytes = 0
        self._attended: list[AttentionCost] = []  # calls of the running forward

    def divide(self, layer: int, inputs: Any, num_chunks: int) -> None:
        """Begin a call of the layer whose chunks enter one after the other."""
        if not self.counting:
            return
        if self.least_chunks == 1:
            self.least_chunks = num_chunks
        else:
            self.least_chunks = min(self.least_chunks, num_chunks)
        self.enter(layer, inputs)
        self._num_chunks = num_chunks

    def enter(self, layer: int, inputs: Any) -> None:
        """Begin a forward of the layer with these arguments, a tree."""
        if not self.counting:
            return
        self._layer = layer
        self._counted.clear()
        if self._num_chunks:  # the counts of a call's chunks add up
            return
        self._bytes = 0
        self._square_bytes = 0
        self._attended = []
        nbytes: dict[int, int] = {}  # by address
        square_nbytes: dict[int, int] = {}
        for tensor in _strided_leaves(inputs):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            nbytes[address] = storage.nbytes()
            square_nbytes[address] = storage.nbytes() if self._is_square(tensor) else 0
        total = sum(nbytes.values())
        if total > self.boundary[layer]:
            self.boundary[layer] = total
            self.square_boundary[layer] = sum(square_nbytes.values())

    def leave(self, *, chunk: bool = False) -> None:
        """End the forward, or one `chunk` of it, after its return or exception."""
        self._layer = None
        self._counted.clear()
        if not chunk:
            self._num_chunks = 0

    def saw_attention(self, layer: int, call: AttentionCost) -> None:
        """Count one call of an attention kernel."""
        if layer != self._layer:
            return
        self._attended.append(call)
        self.attended[layer] = max(self.attended[layer], total_attention(self._attended))

    def saw(self, layer: int, tensor: torch.Tensor) -> None:
        """Count a tensor that autograd saves. The tensor lies in no slot."""
        if layer != self._layer or isinstance(tensor, nn.Parameter):
            return
        for strided in strided_tensors(tensor):
            storage = strided.untyped_storage()
            address = storage.data_ptr()
            if address in self._counted:
                continue
            self._counted[address] = storage
            self._bytes += storage.nbytes()
            if self._is_square(strided):
                self._square_bytes += storage.nbytes()
        if self._bytes > self.saved[layer]:
            self.saved[layer] = self._bytes
            self.square_saved[layer] = self._square_bytes

    def _is_square(self, tensor: torch.Tensor) -> bool:
        """True if the tensor grows with the square of the sequence length."""
        return self.length > 1 and list(tensor.shape).count(self.length) > 1


def strided_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory of `tensor`.

    Returns:
        For a strided tensor itself; for a sparse one its indices and values; for any other layout
        an empty list, since torch does not show its memory.
    """
    if tensor.layout is torch.strided:
        return [tensor]
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    names = _COMPRESSED.get(tensor.layout)
    if names is None:
        return []
    indices = [getattr(tensor, name)() for name in names]
    return [*indices, tensor.values()]


def _strided_leaves(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield from strided_tensors(leaf)
