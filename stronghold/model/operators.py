"""Operators of a model that is traced on the meta device: what each costs, and which a GPU takes.

Owns the count for one operator, from shapes alone (`OperatorCounts`). Products and convolutions
count FLOPs, by the formulas of torch's `FlopCounterMode`. Fused attention counts by its own
formula. All other operators count the bytes of device memory that they move: norms, activations,
residual additions, rotary embedding, casts, copies, the loss. The bytes hold for an operator that
runs by itself, as in eager PyTorch. Such an operator reads its inputs once and writes its results
once. A fused kernel moves less.

Owns the few places where torch's meta device takes another path than CUDA (`GpuOperators`): fused
attention and fused dropout. With them a trace saves for backward what a GPU saves. It also answers
the questions about values that a training step of whole, unpacked sequences asks.

Reads no value and keeps no tensor. The thread that traces the model enters.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
ATTENTION = "scaled_dot_product"  # in the names of its kernels, forward and backward
# Fused attention, of every kind of device, whose forward gives all that its backward needs beside
# q, k and v.
ATTENTION_KERNELS = frozenset(
    getattr(aten, f"_{ATTENTION}_{name}").default
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)
WRITTEN_OUT = torch._C._nn.scaled_dot_product_attention  # on the meta device
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256
FLASH_HEAD_MULTIPLE = 8  # torch pads the heads to it before the kernel
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
    """Context manager that counts the operators that run in it, and the storages that live.

    Attention is counted by `attend`. `known` are the ids of storages that do not count.
    """

    def __init__(self, known: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._product_flops = 0.0
        self._moved_bytes = 0.0
        self._attention = Counts()
        self.sees_storages = True
        self._known = set(known)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live_bytes = self._peak = self._base = 0

    def attend(self, counts: Counts) -> None:
        """Count a call of fused attention."""
        self._attention += counts

    def take(self) -> Counts:
        """Return the counts since the last call."""
        counts = self._attention + Counts(self._product_flops, self._moved_bytes)
        self._product_flops = self._moved_bytes = 0.0
        self._attention = Counts()
        return counts

    def restart_peak(self) -> None:
        """Forget the most bytes of storages at once."""
        self._base = self._peak = self._live_bytes

    def peak(self) -> int:
        """Return the most bytes at once since `restart_peak`, beside those that lived then."""
        return self._peak - self._base

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
        if self.sees_storages:
            for tensor in _tensors_in(result):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key in self._alive or key in self._known:
            return
        self._alive[key] = weakref.ref(storage, functools.partial(self._freed, key, nbytes))
        self._live_bytes += nbytes
        self._peak = max(self._peak, self._live_bytes)

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        del self._alive[key]
        self._live_bytes -= nbytes


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


# -- a GPU's operators -----------------------------------------------------------------------------
_ALL = (torch.Tensor.all, torch.all)
_ANY = (torch.Tensor.any, torch.any)
_SUM = (torch.Tensor.sum, torch.sum)
_EQUAL = (torch.Tensor.__eq__, torch.Tensor.eq, torch.eq)


class GpuOperators(TorchFunctionMode):
    """Context manager in which tensors of the meta device take CUDA's operators.

    Arguments:
        counts: counts the calls of attention.
        is_padded: some sequence is padded. Questions about masks are answered by it.
    """

    def __init__(self, counts: OperatorCounts, *, is_padded: bool = False) -> None:
        super().__init__()
        self._attention = functools.partial(attention, counts=counts)
        self._is_padded = is_padded
        # By identity: the tensor, which is held so that its id is not used again, and its truth.
        self._answers: dict[int, tuple[torch.Tensor, bool]] = {}
        self._sums = WeakIdKeyDictionary()  # sums of a mask's elements

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is WRITTEN_OUT:
            return self._attention(*args, **kwargs)
        if func is F.dropout:
            return dropout(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._with_attention(func, *args, **kwargs)
        if func is torch.Tensor.__bool__ and id(args[0]) in self._answers:
            return self._answers[id(args[0])][1]
        result = func(*args, **kwargs)
        if func in (*_ALL, *_ANY):
            # A model asks `all` about the ordinary case, and `any` about the exception.
            is_true = (func in _ALL) is not self._is_padded
            self._answers[id(result)] = (result, is_true)
        elif func in _SUM and not args[0].is_floating_point():
            self._sums[result] = True
        elif func in _EQUAL and args[0] in self._sums:  # `all` in another way
            self._answers[id(result)] = (result, not self._is_padded)
        return result

    def _with_attention(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a Python function of `F` that calls `F`'s attention. A mode sees no such call."""
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attention
        try:
            return func(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = before


def dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """`F.dropout` by the fused kernel, which saves a mask of one byte per element."""
    if inplace:
        return torch.dropout_(input, p, training)
    if not training or p in (0.0, 1.0):
        return torch.dropout(input, p, training)
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return output


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    counts: OperatorCounts,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` by the kernel that torch picks on a GPU.

    The rule is that of compute capability 8.0 or more:

    1. Flash attention for 16-bit types without a mask. Its heads have a multiple of 8 elements.
    2. The memory-efficient kernel with a mask, or in fp32.
    3. Else the written-out formula, whose products count as such.

    Both fused kernels save q, k, v, the output and one fp32 per row. So does cuDNN's, which torch
    picks first for 16-bit types on a GPU of 9.0 or 10.0.

    query, key, value   [batch, heads, tokens, head size]
    """
    size = query.shape[-1]
    is_plain = query.dim() == 4 and size == key.shape[-1]
    fits_flash = (
        attn_mask is None
        and query.dtype in FLASH_DTYPES
        and size == value.shape[-1] <= FLASH_HEAD_DIM
    )
    is_grouped = enable_gqa and key.shape[1] != query.shape[1]
    if not is_plain or (is_grouped and not fits_flash):
        return WRITTEN_OUT(
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    missing = -size % FLASH_HEAD_MULTIPLE if fits_flash else 0
    if missing:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    if fits_flash:
        results = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    else:
        bias = _bias(attn_mask, query, key)
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    counts.attend(_attention_counts((query, key, value), results, is_causal=is_causal))
    output: torch.Tensor = results[0]
    return output[..., :size] if missing else output


def _attention_counts(
    inputs: Sequence[torch.Tensor], results: Sequence[Any], *, is_causal: bool
) -> Counts:
    """The counts of a call with `inputs` q, k and v, each [batch, heads, tokens, head size].

    FLOPs are those of q k^T and of the product with v, for every head of the query and all pairs of
    tokens. Several heads of the query may share a head of the key.
    """
    query, key, value = (tensor.shape for tensor in inputs)
    batch, heads, rows, size = query
    flops = float(2 * batch * heads * rows * key[-2] * (size + value[-1]))
    storages = [leaf.untyped_storage() for leaf in results if isinstance(leaf, torch.Tensor)]
    distinct = {id(storage): storage.nbytes() for storage in storages}
    return Counts(
        attention_flops=flops,
        causal_flops=flops if is_causal else 0.0,
        attention_bytes=sum(distinct.values()),
    )


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The additive mask in the query's dtype, seen as [batch, heads, rows, columns], not copied."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)
    batch, heads, rows, _ = query.shape
    return mask.expand(batch, heads, rows, key.shape[-2])
