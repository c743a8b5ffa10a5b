"""Operator counts: the FLOPs of products, and the device memory that all other operators move.

Owns the count for one operator, from shapes alone. Products and convolutions count FLOPs, by the
formulas of torch's `FlopCounterMode`. Attention counts by its own formula, in
`model.gpu_operators`. All other operators count bytes: norms, activations, residual additions,
rotary embedding, casts, copies, the loss. Reads no value and keeps no tensor. The thread that
traces the model enters it.

The bytes hold for an operator that runs by itself, as in eager PyTorch. Such an operator reads its
inputs once and writes its results once. A fused kernel moves less.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
ATTENTION = "scaled_dot_product"  # in the names of its kernels, forward and backward
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


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of some operators.

    product_flops    products and convolutions
    moved_bytes      device memory that all others but attention read and write
    attention_flops  fused attention in forward. A causal attention counts like one without a mask
    causal_flops     share of `attention_flops` of calls with a causal mask
    attention_bytes  results of fused attention
    """

    product_flops: float = 0.0
    moved_bytes: float = 0.0
    attention_flops: float = 0.0
    causal_flops: float = 0.0
    attention_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, astuple(self), astuple(other)))


class OperatorCounts(TorchDispatchMode):
    """Context manager that counts the operators that run in it, but for attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._product_flops = 0.0
        self._moved_bytes = 0.0
        self._attention = Counts()

    def attend(self, counts: Counts) -> None:
        """Count a call of fused attention."""
        self._attention += counts

    def take(self) -> Counts:
        """Return the counts since the last call."""
        counts = self._attention + Counts(self._product_flops, self._moved_bytes)
        self._product_flops = self._moved_bytes = 0.0
        self._attention = Counts()
        return counts

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in FLOPS:
            self._product_flops += FLOPS[packet](*args, **kwargs, out_val=result)
        elif ATTENTION not in packet.__name__:
            self._moved_bytes += moved_bytes(func, args, kwargs, result)
        return result


def _grouped_mm_flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of one product per expert: (m, k) by (experts, k, n) and the like. The rows are divided
    among the experts."""
    are_batched = left.dim() == right.dim() == 3
    num_products = left.shape[0] if are_batched else 1
    return int(2 * num_products * left.shape[-2] * left.shape[-1] * right.shape[-1])


FLOPS: dict[Any, Any] = {
    packet: flops for packet, flops in flop_registry.items() if ATTENTION not in str(packet)
}
FLOPS[aten._grouped_mm] = _grouped_mm_flops


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that one call of an operator, which is no product, reads and writes. 0 for a view."""
    name, is_in_place = _name_of(func)
    if name in MOVE_NOTHING or _is_view(func):
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
