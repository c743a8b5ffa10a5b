"""What autograd keeps of a call, seen beside the engine."""

from __future__ import annotations

from typing import Any

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


def has_saved_tensor_hooks() -> bool:
    """True while saved-tensor hooks are active in this thread: autograd gives another tensor back
    then than the one that it saved."""
    x, same = torch.ones(1, requires_grad=True), []

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(given)
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            same.append(ctx.saved_tensors[0] is x)
            return gradient

    output: Any = Saving.apply(x)
    output.backward()
    return not same[0]
