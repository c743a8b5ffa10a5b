"""Bytes of device memory that operators read and write, of those that are bound by them.

Owns the count for one operator, from shapes alone: norms, activations, residual additions, rotary
embedding, casts, copies, the loss. Matrix products, convolutions and attention count nothing: their
cost is FLOPs (`costs`). Reads no value. Nothing here keeps a tensor.

The count is of an operator that runs by itself, as in eager PyTorch: it reads its inputs once and
writes its results once. A fused kernel moves less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from stronghold.model.gpu_operators import ATTENTION_KERNELS, MORE_FLOPS

PRODUCTS = {*flop_registry, *MORE_FLOPS, *(kernel.overloadpacket for kernel in ATTENTION_KERNELS)}
# Names of operators, without a trailing underscore. These touch no memory, though their schemas
# do not call them views:
MOVE_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
)
# These only write,
ONLY_WRITE = frozenset(
    {"arange", "fill", "full", "full_like", "new_full", "new_ones", "new_zeros"}
    | {"ones", "ones_like", "zero", "zeros", "zeros_like"}
)
# these read of their first argument as much as they write,
GATHERS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
# and these, in place, read and write as much of it as their last tensor has.
SCATTERS = frozenset({"index_add", "index_copy", "index_put", "scatter", "scatter_add"})


class OperatorBytes(TorchDispatchMode):
    """Adds up what operators move inside its `with`."""

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
    """What one call of an operator reads and writes; 0 of a product, and of a view."""
    name, is_in_place = _name_of(func)
    if func.overloadpacket in PRODUCTS or name in MOVE_NOTHING or _is_view(func):
        return 0
    written = _bytes_of(result)
    if name in ONLY_WRITE:
        return written
    if name == "copy":  # in place: the old values are not read
        return written + _bytes_of(args[1])
    if name in GATHERS:
        return 2 * written + _bytes_of(args[1:])
    if name in SCATTERS and is_in_place:
        *_, last = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return 2 * _bytes_of(last) + _bytes_of(args[1:])
    inputs = (args, {key: value for key, value in kwargs.items() if key != "out"})
    return written + _bytes_of(inputs)


def _name_of(func: Any) -> tuple[str, bool]:
    """Without a trailing underscore; and whether it has one."""
    name = str(func.overloadpacket.__name__)
    return name.removesuffix("_"), name.endswith("_")


def _is_view(func: Any) -> bool:
    """Whether results share the memory of an argument, and nothing is written."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _bytes_of(values: Any) -> int:
    """Of all tensors in `values`, one that is given twice once."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
    return sum(map(_memory_of, tensors.values()))


def _memory_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements, one that stands at several indices (of an expanded tensor) once."""
    return tensor.element_size() * math.prod(
        size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if stride != 0 or size == 0
    )
