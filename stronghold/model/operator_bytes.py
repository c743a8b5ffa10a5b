"""Operator bytes: device memory that memory-bound operators read and write.

Owns the count for one operator, from shapes alone. Memory-bound operators are norms, activations,
residual additions, rotary embedding, casts, copies and the loss. Matrix products, convolutions and
attention count 0: their cost is FLOPs (`model.costs`). Reads no value and keeps no tensor. The
thread that traces the model enters it.

The count holds for an operator that runs by itself, as in eager PyTorch. Such an operator reads its
inputs once and writes its results once. A fused kernel moves less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from stronghold.model.gpu_operators import ATTENTION_KERNELS, MORE_FLOPS

PRODUCTS = {*flop_registry, *MORE_FLOPS, *(kernel.overloadpacket for kernel in ATTENTION_KERNELS)}
# Names of operators, without a trailing underscore.
# Operators that touch no memory, though their schemas do not call them views.
MOVE_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
)
# Operators that read nothing.
ONLY_WRITE = frozenset(
    {"arange", "fill", "full", "full_like", "new_full", "new_ones", "new_zeros"}
    | {"ones", "ones_like", "zero", "zeros", "zeros_like"}
)
# Operators that read as much of their first argument as they write.
GATHERS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
# In-place operators that read and write as much of their first argument as their last tensor has.
SCATTERS = frozenset({"index_add", "index_copy", "index_put", "scatter", "scatter_add"})


class OperatorBytes(TorchDispatchMode):
    """Context manager that adds up the bytes that operators move: `total`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += moved_bytes(func, args, kwargs or {}, result)
        return result


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that one call of an operator reads and writes. 0 for a product and for a view."""
    name, is_in_place = _name_of(func)
    is_product = func.overloadpacket in PRODUCTS
    if is_product or name in MOVE_NOTHING or _is_view(func):
        return 0
    written = _bytes_of(result)
    if name in ONLY_WRITE:
        return written
    if name == "copy":  # in place: the old values are not read
        return written + _bytes_of(args[1])
    if name in GATHERS:
        return 2 * written + _bytes_of(args[1:])
    if name in SCATTERS and is_in_place:
        *_, last = _tensors_in(args)
        return 2 * _bytes_of(last) + _bytes_of(args[1:])
    named_inputs = {key: value for key, value in kwargs.items() if key != "out"}
    return written + _bytes_of((args, named_inputs))


def _name_of(func: Any) -> tuple[str, bool]:
    """(the operator's name without a trailing underscore, True if it had one: it is in place)."""
    name = str(func.overloadpacket.__name__)
    return name.removesuffix("_"), name.endswith("_")


def _is_view(func: Any) -> bool:
    """True if results share the memory of an argument, and nothing is written."""
    for result in func._schema.returns:
        alias = result.alias_info
        if alias is not None and not alias.is_write:
            return True
    return False


def _bytes_of(values: Any) -> int:
    """Bytes of all tensors in `values`, each tensor once."""
    tensors = {id(tensor): tensor for tensor in _tensors_in(values)}
    return sum(map(_memory_of, tensors.values()))


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements. An element at several indices (expanded) counts once."""
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            num_elements *= size
    return tensor.element_size() * num_elements
