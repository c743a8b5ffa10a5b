"""How many bytes of activations each block keeps, counted while the first steps run.

Owns the counts. Changes nothing of what autograd does. Entered by the training thread, in forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class ActivationSizes:
    """`saved[i]` and `boundary[i]`: what block i's largest forward so far kept for backward, and
    what entered it, which recomputation keeps instead. Parameters and slots are not counted, a
    storage is counted once per block. Nothing is counted unless `counting`.
    """

    def __init__(self, num_layers: int) -> None:
        self.counting = False
        self.saved = [0] * num_layers
        self.boundary = [0] * num_layers
        self._layer: int | None = None  # whose forward runs, unless it is a recomputation
        # Held while the forward runs: an address that was freed would be given to another.
        self._seen: dict[int, torch.UntypedStorage] = {}
        self._bytes = 0

    def enter(self, layer: int, inputs: Any) -> None:
        """A forward of the layer begins."""
        if not self.counting:
            return
        self._layer = layer
        self._seen.clear()
        self._bytes = 0
        storages = {
            leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, torch.Tensor)
        }
        self.boundary[layer] = max(self.boundary[layer], sum(storages.values()))

    def leave(self) -> None:
        """It returned or raised."""
        self._layer = None
        self._seen.clear()

    def saw(self, layer: int, tensor: torch.Tensor) -> None:
        """Autograd saves the tensor, which is in no slot."""
        if layer != self._layer or isinstance(tensor, nn.Parameter):
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = storage
            self._bytes += storage.nbytes()
            self.saved[layer] = max(self.saved[layer], self._bytes)
