# mypy: ignore-errors
# Triton compiles these functions from their source. mypy cannot follow them.
"""The programs that decode packed weights on a GPU: `kernels/src/decode-inl.h` for Triton.

`triton_kernels.TritonKernels` alone imports this file. The formats are [Note: packed formats] of
`stronghold.h`. [Note: same operations] of `triton_programs` holds here, too.

[Note: tiles]

1. A weight is cut into tiles of BLOCK elements. Program i works on tile i of all weights of its
   launch.
2. The table of a launch has, after its first column: elements, inner tensors, the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stronghold.optim.triton_programs import FIRST, NUMEL, _array, _canonical, _field, _row_of

# The weight's place among the arrays, which are the columns of the table from the third on.
WEIGHT: tl.constexpr = tl.constexpr(4)

NF4_BLOCK: tl.constexpr = tl.constexpr(64)
NESTED_BLOCK: tl.constexpr = tl.constexpr(256)
# The first 16 values of the code books are nf4's. The dynamic map follows.
NF4_VALUES: tl.constexpr = tl.constexpr(16)


@triton.jit
def _store(pointers, x, mask):
    """Round fp32 values to the weight's dtype, to nearest even. bf16 is stored as bits."""
    x = _canonical(x)
    if pointers.dtype.element_ty == tl.float32:
        tl.store(pointers, x, mask=mask)
    elif pointers.dtype.element_ty == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        odd = (bits >> 16) & 1
        # The sum of a positive NaN and the rest stays positive: 0x7FC00000 + 0x7FFF.
        tl.store(pointers, ((bits + 0x7FFF + odd) >> 16).to(tl.int16), mask=mask)
    else:
        # The conversion's own NaN differs between devices.
        half = x.to(tl.float16).to(tl.int16, bitcast=True)
        half = tl.where(x == x, half, 0x7E00).to(tl.int16)
        tl.store(pointers, half.to(tl.float16, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def decode_nf4(
    table, num_rows, books, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK elements of a flat nf4 weight. `books`: fp32 [16 + 256]."""
    block = tl.program_id(0)
    table_row = _row_of(table, num_rows, block)
    numel = _field(table, table_row, NUMEL)
    start = (block - _field(table, table_row, FIRST)) * BLOCK
    codes = _array(table, table_row, 0, tl.uint8, ALIGNED)
    absmax = _array(table, table_row, 1, tl.uint8, ALIGNED)
    nested_absmax = _array(table, table_row, 2, tl.float32, False)
    nested_offset = _array(table, table_row, 3, tl.float32, False)
    weight = _array(table, table_row, WEIGHT, OUT, ALIGNED)

    blocks = start // NF4_BLOCK + tl.arange(0, BLOCK // NF4_BLOCK)
    has_block = blocks * NF4_BLOCK < numel
    nested_code = tl.load(absmax + blocks, mask=has_block, other=0).to(tl.int32)
    nested = tl.load(nested_absmax + blocks // NESTED_BLOCK, mask=has_block, other=0.0)
    offset = tl.load(nested_offset)
    scale = tl.load(books + NF4_VALUES + nested_code) * nested + offset

    pairs = tl.arange(0, NF4_BLOCK // 2)
    bytes = blocks[:, None] * (NF4_BLOCK // 2) + pairs[None, :]
    packed = tl.load(codes + bytes, mask=bytes * 2 < numel, other=0).to(tl.int32)
    first = tl.load(books + (packed >> 4)) * scale[:, None]
    second = tl.load(books + (packed & 15)) * scale[:, None]
    values = tl.interleave(first, second)
    elements = blocks[:, None] * NF4_BLOCK + tl.arange(0, NF4_BLOCK)[None, :]
    _store(weight + elements, values, elements < numel)


class Decoder(NamedTuple):
    """The program of one packed format."""

    program: Any
    # of an element of each inner tensor, which its address aligns to
    item_bytes: tuple[int, ...]


DECODERS = {"nf4": Decoder(decode_nf4, (1, 1, 4, 4))}
