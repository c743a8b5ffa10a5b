"""GPU operators: tensors of the meta device take the operators that a GPU would run.

Owns the few places where torch's meta device takes another path than CUDA: fused attention and
fused dropout. With them a trace saves for backward what a GPU saves. It also answers the questions
about values that a training step of whole, unpacked sequences asks. Reads no value. Active only
inside its `with`, in the calling thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from stronghold.model.operator_counts import Counts, OperatorCounts

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256
FLASH_HEAD_MULTIPLE = 8  # torch pads the heads to it before the kernel

aten = torch.ops.aten
WRITTEN_OUT = torch._C._nn.scaled_dot_product_attention  # on the meta device


# Fused attention, of every kind of device, whose forward gives all that its backward needs beside
# q, k and v.
ATTENTION_KERNELS = frozenset(
    getattr(aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)


class AttentionCost(NamedTuple):
    """The cost of one call of an attention kernel, or of several."""

    nbytes: int  # of all results
    flops: float  # of all pairs of tokens, forward
    tokens: int  # rows of queries, of all sequences


def attention_cost(inputs: Sequence[torch.Tensor], results: Sequence[Any]) -> AttentionCost:
    """The cost of a call with `inputs` q, k and v, each [batch, heads, tokens, head size]."""
    query, key, value = (tensor.shape for tensor in inputs)
    nbytes: dict[int, int] = {}  # by storage: results that share memory count once
    for result in results:
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            nbytes[id(storage)] = storage.nbytes()
    return AttentionCost(
        nbytes=sum(nbytes.values()),
        flops=float(_attention_flops(query, key, value)),
        tokens=query[0] * query[2],
    )


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """FLOPs of q k^T and of the product with v, for every head of the query.

    Several heads of the query may share a head of the key.
    """
    batch, heads, rows, size = query
    num_pairs = rows * key[-2]
    return int(2 * batch * heads * num_pairs * (size + value[-1]))


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
    cost = attention_cost((query, key, value), results)
    causal_flops = cost.flops if is_causal else 0.0
    counts.attend(
        Counts(attention_flops=cost.flops, causal_flops=causal_flops, attention_bytes=cost.nbytes)
    )
    output: torch.Tensor = results[0]
    return output[..., :size] if missing else output


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The additive mask in the query's dtype, seen as [batch, heads, rows, columns], not copied."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)
    batch, heads, rows, _ = query.shape
    return mask.expand(batch, heads, rows, key.shape[-2])
