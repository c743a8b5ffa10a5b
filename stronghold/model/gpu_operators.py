"""Operators on tensors without memory as a GPU runs them.

Owns the few places where torch's meta device takes another path than CUDA does, so that what is
saved for backward is what a GPU saves: fused attention, fused dropout. Also answers the conditions
on values that a training step of whole, unpacked sequences answers. Reads no value; active only
inside its `with`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256
FLASH_HEAD_MULTIPLE = 8  # torch pads the heads to it before the kernel

aten = torch.ops.aten
WRITTEN_OUT = torch._C._nn.scaled_dot_product_attention  # on the meta device


def _grouped_mm_flops(
    left: torch.Size, right: torch.Size, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Of one product per expert: (m, k) by (experts, k, n) and the like, rows shared out among the
    experts."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])


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


class Attended(NamedTuple):
    """What one of them takes: bytes that it gives, FLOPs, and rows of all sequences' queries."""

    nbytes: int
    flops: float
    tokens: int


def is_causal(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of one of them has a causal mask, so that it skips half of all pairs."""
    names = [argument.name for argument in kernel._schema.arguments]
    position = names.index("is_causal")
    given = args[position] if len(args) > position else kwargs.get("is_causal", False)
    return bool(given)


def attended(inputs: Sequence[torch.Tensor], results: Sequence[Any]) -> Attended:
    """Of a call with q, k and v."""
    query, key, value = (tensor.shape for tensor in inputs)
    storages = [r.untyped_storage() for r in results if isinstance(r, torch.Tensor)]
    return Attended(
        sum({id(storage): storage.nbytes() for storage in storages}.values()),
        float(_attention_flops(query, key, value)),
        query[0] * query[2],
    )


def in_all(calls: Sequence[Attended]) -> Attended:
    """Of several calls."""
    return Attended(
        sum(call.nbytes for call in calls),
        sum(call.flops for call in calls),
        sum(call.tokens for call in calls),
    )


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    """q k^T and the product with v, of every head of the query; several may share a key's."""
    batch, heads, rows, size = query
    return int(2 * batch * heads * rows * key[-2] * (size + value[-1]))


def _uncounted(*_: Any, **__: Any) -> int:
    return 0


# Products that torch's counter does not know. Torch's own formula for attention refuses grouped
# heads before 2.13; nothing counts a backward's.
MORE_FLOPS: dict[Any, Any] = {
    aten._grouped_mm: _grouped_mm_flops,
    aten._scaled_dot_product_flash_attention: _attention_flops,
    aten._scaled_dot_product_efficient_attention: _attention_flops,
    aten._scaled_dot_product_flash_attention_backward: _uncounted,
    aten._scaled_dot_product_efficient_attention_backward: _uncounted,
}


_ALL = (torch.Tensor.all, torch.all)
_ANY = (torch.Tensor.any, torch.any)


class AsOnGpu(TorchFunctionMode):
    """Tensors of the meta device take CUDA's operators."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is WRITTEN_OUT:
            return attention(*args, **kwargs)
        if func is F.dropout:
            return dropout(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _with_attention(func, *args, **kwargs)
        if func is torch.Tensor.__bool__ and id(args[0]) in self._answers:
            return self._answers[id(args[0])][1]
        result = func(*args, **kwargs)
        if func in (*_ALL, *_ANY):
            # Nothing is padded or packed: "are they all so?" is asked of what is ordinary, "is any
            # one?" of what is not. The tensor is held, so that its id stays its own.
            self._answers[id(result)] = (result, func in _ALL)
        return result


def _with_attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a Python function of `F` that asks `F` for attention: a mode does not see inside."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention
    try:
        return func(*args, **kwargs)
    finally:
        F.scaled_dot_product_attention = before


def dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """`F.dropout` by the fused kernel, which saves a mask of one byte per element."""
    if not training or p in (0.0, 1.0) or inplace:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
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
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` by the kernel that torch picks on a GPU of compute
    capability 8.0 or more: flash attention for 16-bit types without a mask, the memory-efficient
    kernel with a mask or in fp32, the written-out formula where neither applies. Both fused kernels
    save q, k, v, the output and one fp32 per row, and so does cuDNN's, which torch picks first for
    16-bit types on a GPU of 9.0 or 10.0."""
    grouped = enable_gqa and key.shape[1] != query.shape[1]
    plain = query.dim() == 4 and query.shape[-1] == key.shape[-1]
    if (
        plain
        and attn_mask is None
        and query.dtype in FLASH_DTYPES
        and query.shape[-1] == value.shape[-1] <= FLASH_HEAD_DIM
    ):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if plain and not grouped:
        bias = _bias(attn_mask, query, key)
        output: torch.Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
        return output
    return WRITTEN_OUT(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    size = query.shape[-1]
    missing = -size % FLASH_HEAD_MULTIPLE
    if missing:
        query, key, value = (F.pad(part, (0, missing)) for part in (query, key, value))
        scale = size**-0.5 if scale is None else scale
    output: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :size] if missing else output


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The additive mask in the query's dtype, as large as it is given, seen as one per head."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)
    batch, heads, rows, _ = query.shape
    return mask.expand(batch, heads, rows, key.shape[-2])
