# mypy: ignore-errors
# Triton compiles these functions from their source. mypy cannot follow them.
"""The programs that decode packed weights on a GPU: `kernels/src/decode-inl.h` for Triton.

`triton_kernels.TritonKernels` alone imports this file. The formats are [Note: packed formats] of
`stronghold.h`. [Note: same operations] of `triton_programs` holds here, too.

[Note: tiles]

1. A weight is cut into rows, and a row into blocks of BLOCK columns. Program i works on block i of
   all weights of its launch. So it divides a few numbers, and none for each element.
2. nf4's blocks run over the flat weight. For it the whole weight is one row.
3. The table of a launch has, after its first column: elements, inner tensors, the weight, columns
   of a row, rows of a matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stronghold.optim.triton_programs import FIRST, _array, _canonical, _field, _row_of

# The weight's place among the arrays, which are the columns of the table from the third on.
WEIGHT: tl.constexpr = tl.constexpr(4)
COLUMNS: tl.constexpr = tl.constexpr(7)
MATRIX_ROWS: tl.constexpr = tl.constexpr(8)

NF4_BLOCK: tl.constexpr = tl.constexpr(64)
NESTED_BLOCK: tl.constexpr = tl.constexpr(256)
FP8_BLOCK: tl.constexpr = tl.constexpr(128)
INT8_RECIPROCAL: tl.constexpr = tl.constexpr(7.874015718698502e-3)
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


@triton.jit
def _e4m3(code):
    """float8_e4m3fn as fp32. `code` is its byte as int8."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    sign = (code >> 31) << 31
    normal = (magnitude << 20) + 0x3C000000
    denormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, denormal, normal) | sign
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tile(table, num_rows, BLOCK: tl.constexpr):
    """The table's row of this program, and its row and first column in the weight."""
    block = tl.program_id(0)
    table_row = _row_of(table, num_rows, block)
    columns = _field(table, table_row, COLUMNS)
    tile = block - _field(table, table_row, FIRST)
    across = tl.cdiv(columns, BLOCK)
    return table_row, tile // across, tile % across * BLOCK, columns


@triton.jit(do_not_specialize=["num_rows"])
def decode_nf4(
    table, num_rows, books, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK elements of a flat nf4 weight. `books`: fp32 [16 + 256]."""
    table_row, _, start, numel = _tile(table, num_rows, BLOCK)
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


@triton.jit(do_not_specialize=["num_rows"])
def decode_int8(
    table, num_rows, books, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of a row of an int8 weight."""
    table_row, row, start, columns = _tile(table, num_rows, BLOCK)
    column = start + tl.arange(0, BLOCK)
    at = row * columns + column
    code = tl.load(
        _array(table, table_row, 0, tl.int8, ALIGNED) + at, mask=column < columns, other=0
    )
    scale = tl.load(_array(table, table_row, 1, tl.float32, False) + row)
    value = code.to(tl.float32) * scale * INT8_RECIPROCAL
    _store(_array(table, table_row, WEIGHT, OUT, ALIGNED) + at, value, column < columns)


@triton.jit(do_not_specialize=["num_rows"])
def decode_fp8(
    table, num_rows, books, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of a row of an fp8 weight."""
    table_row, row, start, columns = _tile(table, num_rows, BLOCK)
    matrix_rows = _field(table, table_row, MATRIX_ROWS)
    down, across = tl.cdiv(matrix_rows, FP8_BLOCK), tl.cdiv(columns, FP8_BLOCK)
    first = (row // matrix_rows * down + row % matrix_rows // FP8_BLOCK) * across
    column = start + tl.arange(0, BLOCK)
    at = row * columns + column
    code = tl.load(
        _array(table, table_row, 0, tl.int8, ALIGNED) + at, mask=column < columns, other=0
    )
    scales = _array(table, table_row, 1, tl.float32, False) + first + column // FP8_BLOCK
    value = _e4m3(code) * tl.load(scales, mask=column < columns, other=0.0)
    _store(_array(table, table_row, WEIGHT, OUT, ALIGNED) + at, value, column < columns)


class Decoder(NamedTuple):
    """The program of one packed format."""

    program: Any
    # of an element of each inner tensor, which its address aligns to
    item_bytes: tuple[int, ...]
    is_flat: bool  # the whole weight is one row


DECODERS = {
    "nf4": Decoder(decode_nf4, (1, 1, 4, 4), is_flat=True),
    "int8": Decoder(decode_int8, (1, 4), is_flat=False),
    "fp8": Decoder(decode_fp8, (1, 4), is_flat=False),
}
