# mypy: ignore-errors
# Triton compiles these functions from their source. mypy cannot follow them.
"""The programs that `triton_kernels` launches: the formulas of `kernels/src/` for a GPU.

Each program performs the rounded operations of the C++ kernel in the same order. Importing this
file needs Triton, which CUDA builds of torch bring. `TritonKernels` alone imports it.

[Note: formulas]

1. One program, `update`, serves every optimizer. It loads and stores the arrays, joins and splits
   masters, and scales the gradients.
2. An optimizer adds one function, and one row of FORMULAS:

       step(p, g, moments, constants, VARIANT) -> p, moments

3. All values are fp32. p are the masters, g the gradients times constant 0, `moments` a tuple.
4. `constants` and VARIANT are the optimizer's in `stronghold.h`. The order of operations there is
   the contract.
5. `update` stores the results unchanged. So the function applies `_canonical` to them.

[Note: same operations]

1. `tl.fma`, `tl.div_rn` and `tl.sqrt_rn` become PTX's `fma.rn`, `div.rn` and `sqrt.rn`. These round
   to nearest and keep denormals. `/` and `tl.sqrt` become approximations.
2. A launch with `triton_kernels.EXACT` turns `+` and `*` into `add.rn` and `mul.rn`. ptxas may not
   fuse these.
3. The bits of a NaN depend on the hardware. So `_canonical` comes before every store.

[Note: table]

1. One launch serves up to ROWS segments of any sizes.
2. The table is int64 [COLUMNS, ROWS]. Its columns are the number of blocks before a segment, the
   segment's numel, and the addresses of its arrays.
3. A segment starts on a new block. Program i of the launch works on block i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

ROWS: tl.constexpr = tl.constexpr(64)
FIRST: tl.constexpr = tl.constexpr(0)
NUMEL: tl.constexpr = tl.constexpr(1)
ARRAYS: tl.constexpr = tl.constexpr(2)
SUM_LANES: tl.constexpr = tl.constexpr(32)
# Loads in flight per lane while its sum waits for them: a lane is a chain of additions.
SUM_UNROLL: tl.constexpr = tl.constexpr(16)


# -- segments and elements ------------------------------------------------------------------------
@triton.jit
def _row_of(table, num_rows, block):
    """The segment of a block: the last one that starts at or before it."""
    rows = tl.arange(0, ROWS)
    first = tl.load(table + FIRST * ROWS + rows, mask=rows < num_rows, other=2147483647)
    return tl.sum((first <= block).to(tl.int32), axis=0) - 1


@triton.jit
def _field(table, row, column: tl.constexpr):
    return tl.load(table + column * ROWS + row)


@triton.jit
def _array(table, row, index: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The `index`-th array of a segment, as a pointer; ALIGNED: to 16 bytes."""
    array = _field(table, row, ARRAYS + index).to(tl.pointer_type(dtype), bitcast=True)
    if ALIGNED:
        array = tl.multiple_of(array, 16)
    return array


@triton.jit
def _canonical(x):
    """`x` with every NaN as 0x7FC00000. It compares bits, because a compiler may exchange NaNs."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(pointers, mask):
    """Elements as fp32, which holds every value of the three dtypes; 0 where masked."""
    x = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)
    if x.dtype == tl.int16:  # bf16, as bits
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _load_master(weight, low, mask):
    if weight.dtype.element_ty == tl.float32:
        return _load(weight, mask)
    if weight.dtype.element_ty == tl.int16:
        high = tl.load(weight, mask=mask).to(tl.int32) << 16
        bits = high + tl.load(low, mask=mask).to(tl.int32)
        # A remainder that would change the sign belongs to a zero that the user wrote.
        return tl.where((bits ^ high) < 0, high, bits).to(tl.float32, bitcast=True)
    # A weight that is not its master's rounding was written by the user. It counts.
    master, seen = _load(low, mask), _load(weight, mask)
    return tl.where(master.to(tl.float16).to(tl.float32) == seen, master, seen)


@triton.jit
def _store_master(weight, low, p, mask):
    if weight.dtype.element_ty == tl.float32:
        tl.store(weight, p, mask=mask)
    elif weight.dtype.element_ty == tl.int16:
        bits = p.to(tl.int32, bitcast=True)
        tl.store(weight, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
        tl.store(low, bits.to(tl.int16), mask=mask)
    else:
        # The conversion's own NaN differs between devices.
        half = p.to(tl.float16).to(tl.int16, bitcast=True)
        half = tl.where(p == p, half, 0x7E00).to(tl.int16)
        tl.store(weight, half.to(tl.float16, bitcast=True), mask=mask)
        tl.store(low, p, mask=mask)


# -- formulas -------------------------------------------------------------------------------------
@triton.jit
def adam_step(p, g, moments, constants, VARIANT: tl.constexpr):
    """Adam, with decoupled weight decay in variant 1."""
    m, v = moments
    weight_decay, decay_factor, beta1, one_minus_beta1 = constants[1:5]
    beta2, one_minus_beta2, inv_sqrt_bias_correction2, eps, neg_step_size = constants[5:10]
    if VARIANT == 1:
        p = p * decay_factor
    else:
        g = tl.fma(weight_decay, p, g)
    m = _canonical(tl.fma(beta1, m, one_minus_beta1 * g))
    v = _canonical(tl.fma(beta2, v, (one_minus_beta2 * g) * g))
    d = tl.fma(tl.sqrt_rn(v), inv_sqrt_bias_correction2, eps)
    p = _canonical(tl.fma(neg_step_size, tl.div_rn(m, d), p))
    return p, (m, v)


@triton.jit
def _sign(x):
    """1 or -1; 0 for either zero; NaN for NaN."""
    sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
    return tl.where(x == x, sign, x)


@triton.jit
def lion_step(p, g, moments, constants, VARIANT: tl.constexpr):
    """Lion, with decoupled weight decay."""
    (m,) = moments
    decay_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, neg_lr = constants[1:7]
    u = tl.fma(beta1, m, one_minus_beta1 * g)
    p = _canonical(tl.fma(neg_lr, _sign(u), p * decay_factor))
    m = _canonical(tl.fma(beta2, m, one_minus_beta2 * g))
    return p, (m,)


@triton.jit
def sgd_momentum_step(p, g, moments, constants, VARIANT: tl.constexpr):
    """SGD with momentum; Nesterov's in variant 1."""
    (buffer,) = moments
    weight_decay, neg_lr, momentum = constants[1:4]
    g = tl.fma(weight_decay, p, g)
    buffer = _canonical(tl.fma(momentum, buffer, g))
    direction = tl.fma(momentum, buffer, g) if VARIANT == 1 else buffer
    p = _canonical(tl.fma(neg_lr, direction, p))
    return p, (buffer,)


@triton.jit
def sgd_step(p, g, moments, constants, VARIANT: tl.constexpr):
    """SGD without momentum."""
    weight_decay, neg_lr = constants[1:3]
    g = tl.fma(weight_decay, p, g)
    p = _canonical(tl.fma(neg_lr, g, p))
    return p, ()


class Formula(NamedTuple):
    """The step of one optimizer, for `update`."""

    step: Any
    num_moments: int


FORMULAS = {
    "adam": Formula(adam_step, num_moments=2),
    "lion": Formula(lion_step, num_moments=1),
    "sgd_momentum": Formula(sgd_momentum_step, num_moments=1),
    "sgd": Formula(sgd_step, num_moments=0),
}


# -- updates --------------------------------------------------------------------------------------
@triton.jit
def _update_block(
    weight, low, grad, moments, mask, constants, FORMULA: tl.constexpr, VARIANT: tl.constexpr
):
    """One step on a block. `weight`, `low`, `grad` and `moments` are pointers to its elements."""
    p = _load_master(weight, low, mask)
    g = _load(grad, mask) * constants[0]
    old = [_load(moment, mask) for moment in moments]
    p, new = FORMULA(p, g, old, constants, VARIANT)
    for k in tl.static_range(len(moments)):
        tl.store(moments[k], new[k], mask=mask)
    _store_master(weight, low, p, mask)


@triton.jit(do_not_specialize=["num_rows"])
def update(
    table,
    num_rows,
    constants,
    FORMULA: tl.constexpr,
    VARIANT: tl.constexpr,
    NUM_MOMENTS: tl.constexpr,
    WEIGHT: tl.constexpr,
    LOW: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step of an optimizer on BLOCK elements.

    The arrays are weight, low, grad, then the moments. The constants are those of
    `native.constants`, in its order.
    """
    block = tl.program_id(0)
    row = _row_of(table, num_rows, block)
    start = (block - _field(table, row, FIRST)) * BLOCK
    rest = _field(table, row, NUMEL) - start
    i = tl.arange(0, BLOCK)
    weight = _array(table, row, 0, WEIGHT, ALIGNED) + start + i
    low = _array(table, row, 1, LOW, ALIGNED) + start + i
    grad = _array(table, row, 2, GRAD, ALIGNED) + start + i
    moments = ()
    for k in tl.static_range(NUM_MOMENTS):
        moment = _array(table, row, 3 + k, tl.float32, ALIGNED) + start + i
        moments = moments + (moment,)  # noqa: RUF005 (Triton compiles no star)
    if rest >= BLOCK:  # without a mask, loads and stores take 16 bytes
        _update_block(weight, low, grad, moments, None, constants, FORMULA, VARIANT)
    else:
        _update_block(weight, low, grad, moments, i < rest, constants, FORMULA, VARIANT)


@triton.jit(do_not_specialize=["num_rows"])
def accumulate(
    table,
    num_rows,
    GRAD: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """acc = float(grad), or acc + float(grad), on BLOCK elements. Arrays: grad, acc."""
    block = tl.program_id(0)
    row = _row_of(table, num_rows, block)
    start = (block - _field(table, row, FIRST)) * BLOCK
    i = tl.arange(0, BLOCK)
    grad = _array(table, row, 0, GRAD, ALIGNED) + start + i
    acc = _array(table, row, 1, tl.float32, ALIGNED) + start + i
    mask = i < _field(table, row, NUMEL) - start
    x = _load(grad, mask)
    if ADD:
        x = _load(acc, mask) + x
    tl.store(acc, _canonical(x), mask=mask)


# -- norms ----------------------------------------------------------------------------------------
@triton.jit
def _halve(x):
    """The first half of `x` plus its second half."""
    left, right = tl.split(tl.trans(tl.reshape(x, [2, x.shape[0] // 2])))
    return left + right


@triton.jit(do_not_specialize=["num_rows"])
def sum_squares(table, num_rows, partials, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """partials[i] = the sum of squares of block i, in double.

    Element j goes to lane j % 32. Then the 32 lanes are halved five times. The array is x.
    """
    block = tl.program_id(0)
    row = _row_of(table, num_rows, block)
    start = (block - _field(table, row, FIRST)) * BLOCK
    numel = tl.minimum(_field(table, row, NUMEL) - start, BLOCK).to(tl.int32)
    lane = tl.arange(0, SUM_LANES)
    x = _array(table, row, 0, TYPE, False) + start + lane
    sums = tl.zeros([SUM_LANES], tl.float64)
    for i in range(0, numel, SUM_LANES * SUM_UNROLL):
        for k in tl.static_range(SUM_UNROLL):
            at = i + k * SUM_LANES
            square = _load(x + at, lane + at < numel).to(tl.float64)
            # the square is exact; a masked zero adds nothing
            sums = tl.fma(square, square, sums)
    sums = _halve(_halve(_halve(_halve(sums))))
    left, right = tl.split(sums)
    tl.store(partials + block, left + right)


@triton.jit
def sum_blocks(table, partials, sums, BLOCK: tl.constexpr):
    """sums[i], as bits = the sum of segment i's blocks in their order.

    A NaN has the bits of C++'s `numeric_limits`.
    """
    row = tl.program_id(0)
    first = _field(table, row, FIRST).to(tl.int32)
    end = first + tl.cdiv(_field(table, row, NUMEL), BLOCK).to(tl.int32)
    total = tl.full([], 0.0, tl.float64)
    for i in range(first, end, SUM_UNROLL):
        for k in tl.static_range(SUM_UNROLL):
            total += tl.load(partials + i + k, mask=i + k < end, other=0.0)
    bits = total.to(tl.int64, bitcast=True)
    is_nan = (bits & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000
    tl.store(sums + row, tl.where(is_nan, 0x7FF8000000000000, bits))
