"""The arrays that hold a parameter's training state, for each weight dtype, kind and optimizer.

Owns the table of arrays that memory, files, plan and checkpoints follow, the split of a master, and
the formulas of lean states in plain torch. `kernels/src/lean-inl.h` computes these with the same
bits. Pure; any thread.

    array         exact                          lean (bf16 weights only)
    weights       the compute dtype              bf16
    low           bf16: int16 remainder          int8 remainder
                  fp16: the fp32 master
                  fp32: absent
    MOMENT        fp32                           int8 code; of a root: uint8 code
    MOMENT_scale  absent                         fp32, one per group of 64 elements

The optimizer names its moments (`contract.Moment`): Adam has `exp_avg` and `exp_avg_sq`, a root.

[Note: items]

1. An array may have one item for a group of elements. Element i of a layer is item i // group.
2. Parameters begin at multiples of a group. So do the pieces and the ranks' shards of a layer.
   No group crosses any of these borders.
3. A parameter's last group may be short.
4. All zeros are a fresh state.

[Note: lean states] Lean states take 5.125 bytes per parameter. A step of Adam decodes, runs the
exact kernel's fp32 step, and encodes. The ideas are FlashOptim's (arXiv 2602.23349). A master is
its 16-bit weight and an 8-bit remainder. Moments are 8-bit codes of a companded value, relative to
the largest one of their group; the second moment's code is that of its square root. Here rounding
is to nearest and never random. Three details differ for that reason:

* [Note: scales] A group is 64 elements with an fp32 scale. FlashOptim has 32 elements with an fp16
  scale, in as many bytes. With beta2 = 0.999 a second moment shrinks by 0.1 % per step, and
  neighbouring codes are at least 0.8 % apart. So the group's scale must follow the decay. fp16
  values are 0.05 to 0.1 % apart, so an fp16 scale decays too fast or does not decay. Measured 3000
  steps after gradients became ten times smaller (sizes of gradients spread lognormally by 0.7): the
  median root was 0.71 of the exact one with fp16 scales, and 1.00 with fp32 scales.
* [Note: companding] Both moments' codes are companded by a piecewise linear square root. `compress`
  halves the bits of a float, with its exponent. That is the square root at the powers of four, and
  linear between powers of two. `expand` is its exact inverse. It takes two integer instructions. A
  true root or quotient takes longer than all of Adam.
* A second moment's code is never 0. A root that is small beside its group's largest is rounded up
  to 1/65024 of that, because the first moment is divided by it.

The bounds of rounding are:

    master                        relative error at most 2^-16
    first moment                  1/126 of the group's largest; 1/31 of its value if that is at
                                  least 1/15 of the largest
    root of the second moment     1/254 of the group's largest; 1/31 of its value if that is at
                                  least 1/63 of the largest
    largest of a group < 2^-112   2^-119, because scales end there

A group with a moment that is not finite decodes to NaN in all elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from stronghold.native import MAX_MOMENTS
from stronghold.optim.contract import Moment

StateKind = Literal["exact", "lean"]
EXACT: StateKind = "exact"
LEAN: StateKind = "lean"
KINDS: tuple[StateKind, ...] = (EXACT, LEAN)
SCALE = "_scale"  # ends the name of an array that has one item per group

GROUP = 64  # number of elements that share a scale
SIGNED_TOP = 16128.0  # expand(127): the largest code's value, in units of the scale
ROOT_TOP = 65024.0  # expand(255)
SMALLEST_SCALE = 2.0**-126  # its reciprocal is a normal number
COMPARED_NUMEL = 1 << 22  # elements at once
_ONE = 0x3F800000  # the bits of 1.0

# The dtype of the master remainder of each trainable dtype. Weight and remainder are the exact fp32
# master.
LOW_DTYPE: dict[torch.dtype, torch.dtype | None] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.float32,
    torch.float32: None,
}
PAGE_BYTES = 4096  # the block size of files
# Bytes per element of the smallest array that a kind of states can have. Lean: the scales.
_SMALLEST_BYTES: dict[StateKind, float] = {EXACT: 2, LEAN: 4 / GROUP}


def group_size(array: str) -> int:
    """Number of elements for which the array has one item."""
    return GROUP if array.endswith(SCALE) else 1


def items(array: str, begin: int, end: int) -> slice:
    """The array's items for elements [begin, end). `begin` is a multiple of the array's group."""
    size = group_size(array)
    return slice(begin // size, -(-end // size))


def num_items(array: str, numel: int) -> int:
    """Number of items of an array of `numel` elements."""
    return -(-numel // group_size(array))


def page_numel(kind: StateKind, *, in_files: bool = True) -> int:
    """The smallest number of elements for which every array has whole pages.

    Padding and pieces are multiples of it. If no array lies `in_files`, only the weights' two bytes
    count.
    """
    smallest_bytes = _SMALLEST_BYTES[kind] if in_files else 2
    return int(PAGE_BYTES / smallest_bytes)


@dataclass(frozen=True)  # without slots, so that its properties are computed once
class States:
    """The arrays of weights of `dtype` with states of `kind`, for an optimizer with `moments`."""

    dtype: torch.dtype
    kind: StateKind
    moments: tuple[Moment, ...]

    @functools.cached_property
    def is_lean(self) -> bool:
        return self.kind == LEAN

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes of one parameter's weight."""
        return self.dtype.itemsize

    @functools.cached_property
    def low(self) -> torch.dtype | None:
        """The dtype of the master remainder; None if the weights are the masters."""
        return torch.int8 if self.is_lean else LOW_DTYPE[self.dtype]

    @functools.cached_property
    def low_bytes(self) -> int:
        """Bytes of one parameter's master remainder."""
        return 0 if self.low is None else self.low.itemsize

    @functools.cached_property
    def moment_dtypes(self) -> dict[str, torch.dtype]:
        """The arrays that hold the moments, with their dtypes."""
        return _moment_dtypes(self.moments, self.kind)

    @functools.cached_property
    def moment_bytes(self) -> float:
        """Bytes of all moments of one parameter."""
        return self.item_bytes(self.moment_dtypes)

    def item_bytes(self, arrays: Iterable[str]) -> float:
        """Bytes of these arrays for one parameter."""
        return sum(self.dtypes[array].itemsize / group_size(array) for array in arrays)

    @functools.cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The arrays that an update changes, with their dtypes, the weights first."""
        dtypes = {"weights": self.dtype}
        if self.low is not None:
            dtypes["low"] = self.low
        return dtypes | self.moment_dtypes

    @functools.cached_property
    def kernel_arrays(self) -> tuple[str | None, ...]:
        """The arrays in the order of a kernel's segment: weights, low, moments, their scales.

        None stands for an array that these states do not have.
        """
        names = [moment.name for moment in self.moments]
        unused = [None] * (MAX_MOMENTS - len(names))
        scales = [name + SCALE if self.is_lean else None for name in names]
        low = None if self.low is None else "low"
        return ("weights", low, *names, *unused, *scales, *unused)

    def update_bytes(self, grad_dtype: torch.dtype) -> float:
        """Bytes of memory that a step reads and writes for one parameter.

        Every array counts twice, the gradient once.
        """
        array_bytes = self.weight_bytes + self.low_bytes + self.moment_bytes
        return 2 * array_bytes + grad_dtype.itemsize

    def of(self, moments: tuple[Moment, ...]) -> States:
        """The states of the same weights and kind, for an optimizer with other moments."""
        return states_of(self.dtype, self.kind, moments)

    def split(self, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split a flat fp32 master into weights and `low`. Lean states round it to 24 bits."""
        if self.is_lean:
            return split_lean_master(master)
        return split_master(master, self.dtype)

    def moment(self, name: str) -> Moment | None:
        """The moment with this name; None if there is none."""
        return next((moment for moment in self.moments if moment.name == name), None)

    def arrays_of(self, moment: Moment) -> tuple[str, ...]:
        """The arrays that hold one of the moments."""
        if self.is_lean:
            return (moment.name, moment.name + SCALE)
        return (moment.name,)

    def encode(self, moment: Moment, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode a moment as the arrays that hold it.

        `values` are flat fp32. Their first element begins a group.
        """
        if not self.is_lean:
            return {moment.name: values}
        encoded = encode_root(values) if moment.is_root else encode_signed(values)
        return dict(zip(self.arrays_of(moment), encoded, strict=True))

    def decode(self, moment: Moment, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode a moment: the inverse of `encode`. Returns fp32 values, as a step reads them."""
        if not self.is_lean:
            return arrays[moment.name]
        codes, scales = (arrays[array] for array in self.arrays_of(moment))
        if moment.is_root:
            return decode_root(codes, scales)
        return decode_signed(codes, scales)


@functools.cache
def states_of(dtype: torch.dtype, kind: StateKind, moments: tuple[Moment, ...]) -> States:
    """The states with these arguments. Equal arguments give one object."""
    return States(dtype, kind, moments)


def _moment_dtypes(moments: tuple[Moment, ...], kind: StateKind) -> dict[str, torch.dtype]:
    if kind == EXACT:
        return {moment.name: torch.float32 for moment in moments}
    codes = {moment.name: torch.uint8 if moment.is_root else torch.int8 for moment in moments}
    return codes | {moment.name + SCALE: torch.float32 for moment in moments}


def split_master(
    master: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split a flat fp32 master into weights of `dtype` and the exact remainder, or None."""
    if dtype is torch.float32:
        return master, None
    if dtype is torch.float16:
        return master.to(dtype), master
    bits = torch.where(master.isnan(), torch.nan, master).contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # the carry past the sign is undone by the remainder
    low = (bits - (upper << 16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), low


def join_master(weights: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """Join weights and `low` to the fp32 master: the inverse of `States.split`.

    The dtype of `low` decides the formula. Without `low` the result is the weights in fp32. If the
    user has changed a weight, the result follows the weight, as an update does.
    """
    if low is None:
        return weights.float()
    if low.dtype is torch.float32:
        return torch.where(low.to(weights.dtype) == weights, low, weights.float())
    upper = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    remainder = low.to(torch.int32)
    if low.dtype is torch.int8:
        remainder = remainder << 8
    bits = upper + remainder
    # A remainder that would change the sign belongs to a zero that the user wrote.
    return torch.where((bits ^ upper) < 0, upper, bits).view(torch.float32)


# -- the formulas of lean states -------------------------------------------------------------------
def split_lean_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an fp32 master, rounded to its upper 24 bits, into the nearest bf16 weight and an int8
    remainder. Ties go away from zero."""
    quiet = torch.where(master.isnan(), torch.nan, master)
    bits = quiet.contiguous().view(torch.int32).to(torch.int64)
    kept = (bits + 0x80) >> 8
    upper = (kept + 0x80) >> 8
    weights = upper.to(torch.int16).view(torch.bfloat16)
    low = (kept - (upper << 8)).to(torch.int8)
    return weights, low


def count_standing(weights: torch.Tensor, step_size: float) -> int:
    """Count the weights of lean states that a step of about this size, which is positive, does not
    move.

    A master has 24 bits. For a weight in [2^e, 2^(e+1)) half a unit in the last place is 2^(e-16),
    and a smaller change is rounded away. So weights from 2^(floor(log2(size)) + 17) on stand still.
    """
    least = 2.0 ** (math.floor(math.log2(step_size)) + 17)
    return sum(int((block.abs() >= least).sum()) for block in weights.split(COMPARED_NUMEL))


def compress(x: torch.Tensor) -> torch.Tensor:
    """The piecewise linear square root of x >= 0: [Note: companding]."""
    bits = x.contiguous().view(torch.int32)
    root_bits = (bits >> 1) + (_ONE >> 1)
    return root_bits.view(torch.float32)


def expand(codes: torch.Tensor) -> torch.Tensor:
    """The x >= 0 with compress(x) == codes, for integers from 0. expand(0) is 0."""
    bits = codes.to(torch.float32).view(torch.int32)
    values = ((bits << 1) - _ONE).view(torch.float32)
    return values.masked_fill(codes == 0, 0.0)


def decode_signed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """sign(code) * expand(|code|) * scale."""
    magnitudes = expand(codes.to(torch.int16).abs())
    values = magnitudes * _element_scales(scales, codes)
    return torch.where(codes < 0, -values, values)


def encode_signed(exp_avg: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode signed moments as (int8 codes, fp32 scales).

    With a group's largest magnitude A:

        scale = max(A * (1 / 16128), 2^-126)
        code = sign * round(compress(|m| * (1 / scale)))

    If A is not finite, the scale is NaN and the codes are 0.
    """
    roots, scales = _compressed(exp_avg.abs(), SIGNED_TOP)
    codes = torch.where(exp_avg < 0, -roots, roots)
    return codes.to(torch.int8), scales


def decode_root(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(expand(code) * scale)^2."""
    roots = expand(codes.to(torch.int16)) * _element_scales(scales, codes)
    return roots.square()


def encode_root(exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the square roots of moments as (uint8 codes, fp32 scales).

    The formula is that of `encode_signed` without signs. A code is at least 1; in a group with a
    value that is not finite it is 0.
    """
    # NumPy's root is the IEEE one. torch's, from a vector library, may be a unit off.
    with np.errstate(invalid="ignore"):
        root_values = np.sqrt(np.atleast_1d(exp_avg_sq.numpy()))
    roots = torch.from_numpy(root_values).view(exp_avg_sq.shape)
    codes, scales = _compressed(roots, ROOT_TOP)
    is_finite = _element_scales(scales, codes).isfinite()
    lowest = is_finite.to(codes.dtype)
    return codes.maximum(lowest).to(torch.uint8), scales


def _compressed(magnitudes: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes as fp32, with the magnitudes' shape, and one fp32 scale per group.

    `top` is the largest code's value.
    """
    flat = magnitudes.reshape(-1)
    numel = flat.numel()
    num_groups = -(-numel // GROUP)
    padded = flat.new_zeros(num_groups, GROUP)
    padded.view(-1)[:numel] = flat
    largest = padded.amax(1)  # NaN for a group with a NaN
    is_finite = largest.isfinite()
    scales = (largest * torch.tensor(1.0 / top)).clamp_min(SMALLEST_SCALE)
    scales = scales.masked_fill(~is_finite, torch.nan)
    scaled = padded * scales.reciprocal()[:, None]
    codes = compress(scaled).round()
    codes = codes.masked_fill(~is_finite[:, None], 0.0)
    return codes.view(-1)[:numel].view(magnitudes.shape), scales


def _element_scales(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element, with the codes' shape."""
    of_elements = scales.repeat_interleave(GROUP)[: codes.numel()]
    return of_elements.view(codes.shape)
