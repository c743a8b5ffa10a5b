"""What autograd keeps of a call, counted beside the engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(block: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that autograd keeps of `block(x)`, without the block's parameters."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda packed: packed):
        output = block(x)
    nbytes = sum(storage.nbytes() for storage in kept.values())
    del output  # until here no storage's address was another's
    return nbytes
