"""The arrays that hold a parameter's training state, for each weight dtype, kind and optimizer.

Owns the table from which memory, files, plan and checkpoints are made; how a master is split; and
the formulas of lean states in plain torch, which `kernels/src/lean-inl.h` has with the same bits.
Pure; any thread.

    array         exact                          lean (bf16 weights only)
    weights       the compute dtype              bf16
    low           bf16: int16 remainder          int8 remainder
                  fp16: the fp32 master
                  fp32: absent
    MOMENT        fp32                           int8 code; of a root: uint8 code
    MOMENT_scale  absent                         fp32, one per group of 64 elements

The optimizer names its moments (`contract.Moment`): Adam has `exp_avg` and `exp_avg_sq`, a root.

[Note: items] An array that has one item for a group of elements is as long as the elements by that:
element i of a layer is item i // group. Parameters begin at multiples of a group, and so do the
ranges into which a layer is cut, for pieces or ranks: no group crosses any of them. A parameter's
last group may be short. All zeros are a fresh state.

[Note: lean states] take 5.125 bytes per parameter; a step of Adam is: decode, the exact kernel's
fp32 step, encode. The ideas are FlashOptim's (arXiv 2602.23349): a master is its 16-bit weight and
an 8-bit remainder; moments are 8-bit codes of a companded value (the second one's of its square
root), relative to their group's largest. What differs is there because the rounding is to nearest
and never random:

* [Note: scales] A group is 64 elements with an fp32 scale, where FlashOptim has 32 with an fp16
  one; the bytes are the same. With beta2 = 0.999 a second moment shrinks by 0.1 % per step, and a
  code is at best 0.8 % from its neighbour: what follows the decay is the group's scale. Rounded to
  fp16, whose neighbours are 0.05 to 0.1 % apart, it decays too fast or stands still: 3000 steps
  after gradients became ten times smaller the median root was 0.71 of the exact one, with fp32
  scales 1.00 (sizes of gradients spread lognormally by 0.7).
* [Note: companding] Both moments' codes are companded by the square root, and that by straight
  lines: `compress` halves the bits of a float, exponent and all, which is the square root at the
  powers of four and linear between powers of two; `expand` is its exact inverse. It takes two
  integer instructions, where a true root or quotient takes longer than all of Adam.
* A second moment's code is never 0: a root that is small beside its group's is rounded up to
  1/65024 of the largest, not to a zero that the first moment would be divided by.

What that promises: a master within 2^-16 of its value, relatively; a first moment within 1/126 of
its group's largest, and within 1/31 of its own value from 1/15 of the largest on; the root of a
second moment within 1/254 of the largest, and within 1/31 of its own value from 1/63 on. Below
2^-112 scales end, and what is promised is 2^-119. A group in which a moment is not finite decodes
to NaN whole.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from stronghold.errors import StateError
from stronghold.native import MAX_MOMENTS
from stronghold.optim.contract import Moment

StateKind = Literal["exact", "lean"]
EXACT: StateKind = "exact"
LEAN: StateKind = "lean"
KINDS: tuple[StateKind, ...] = (EXACT, LEAN)
SCALE = "_scale"  # ends the name of an array that has one item per group

GROUP = 64  # elements that share a scale
SIGNED_TOP = 16128.0  # expand(127): the largest code's value, in units of the scale
ROOT_TOP = 65024.0  # expand(255)
SMALLEST_SCALE = 2.0**-126  # its reciprocal is a normal number
_ONE = 0x3F800000  # the bits of 1.0

# What makes exact weights of each trainable dtype an fp32 master.
LOW_DTYPE: dict[torch.dtype, torch.dtype | None] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.float32,
    torch.float32: None,
}
PAGE_BYTES = 4096  # the block size of files
# Bytes per element of the smallest array that a kind of states can have. Lean: of the scales.
_SMALLEST_BYTES: dict[StateKind, float] = {EXACT: 2, LEAN: 4 / GROUP}


def group_size(array: str) -> int:
    """Elements for which the array has one item."""
    return GROUP if array.endswith(SCALE) else 1


def items(array: str, begin: int, end: int) -> slice:
    """The array's items for elements [begin, end), of which begin is a multiple of its group."""
    size = group_size(array)
    return slice(begin // size, -(-end // size))


def num_items(array: str, numel: int) -> int:
    """Items of an array of `numel` elements."""
    return -(-numel // group_size(array))


def page_numel(kind: StateKind, *, in_files: bool = True) -> int:
    """Elements of which every array has whole pages. Padding and pieces are multiples of it. Where
    no array lies `in_files`, only the weights' two bytes count."""
    return int(PAGE_BYTES / (_SMALLEST_BYTES[kind] if in_files else 2))


@dataclass(frozen=True)  # without slots: its properties are found once
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
        """Of one parameter."""
        return self.dtype.itemsize

    @functools.cached_property
    def low(self) -> torch.dtype | None:
        """The dtype of the array that makes weights masters; None where weights are masters."""
        return torch.int8 if self.is_lean else LOW_DTYPE[self.dtype]

    @functools.cached_property
    def low_bytes(self) -> int:
        """Of one parameter."""
        return 0 if self.low is None else self.low.itemsize

    @functools.cached_property
    def moment_dtypes(self) -> dict[str, torch.dtype]:
        """The arrays that hold the moments."""
        return _moment_dtypes(self.moments, self.kind)

    @functools.cached_property
    def moment_bytes(self) -> float:
        """Of all moments of one parameter."""
        dtypes = self.moment_dtypes
        return sum(dtype.itemsize / group_size(array) for array, dtype in dtypes.items())

    @functools.cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The arrays that a step changes, the weights first."""
        low = {} if self.low is None else {"low": self.low}
        return {"weights": self.dtype, **low, **self.moment_dtypes}

    @functools.cached_property
    def kernel_arrays(self) -> tuple[str | None, ...]:
        """The arrays in the order of a kernel's segment: weights, low, moments, their scales. None
        stands for an array that these states do not have."""
        names = [moment.name for moment in self.moments]
        free = [None] * (MAX_MOMENTS - len(names))
        scales = [name + SCALE if self.is_lean else None for name in names]
        low = None if self.low is None else "low"
        return ("weights", low, *names, *free, *scales, *free)

    def update_bytes(self, grad_dtype: torch.dtype) -> float:
        """Bytes of memory that a step reads and writes for one parameter: every array both ways,
        the gradient one way."""
        kept = self.weight_bytes + self.low_bytes + self.moment_bytes
        return 2 * kept + grad_dtype.itemsize

    def split(self, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A flat fp32 master as weights and `low`. Lean states round it to 24 bits."""
        if self.is_lean:
            return split_lean_master(master)
        return split_master(master, self.dtype)

    def moment(self, name: str) -> Moment | None:
        """The moment of this name."""
        return next((moment for moment in self.moments if moment.name == name), None)

    def arrays_of(self, moment: Moment) -> tuple[str, ...]:
        """The arrays that hold one of the moments."""
        return (moment.name, moment.name + SCALE) if self.is_lean else (moment.name,)

    def encode(self, moment: Moment, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """A moment in fp32, flat, which begins with a group, as the arrays that hold it."""
        if not self.is_lean:
            return {moment.name: values}
        encoded = encode_root(values) if moment.is_root else encode_signed(values)
        return dict(zip(self.arrays_of(moment), encoded, strict=True))

    def decode(self, moment: Moment, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `encode`: the moment in fp32, as a step reads it."""
        codes, *scales = (arrays[array] for array in self.arrays_of(moment))
        if not self.is_lean:
            return codes
        return decode_root(codes, *scales) if moment.is_root else decode_signed(codes, *scales)


@dataclass(frozen=True, slots=True)
class Format:
    """How the parameters of a range lie: the dtype of their weights and, where they train, the
    arrays of their states and the kernel of their optimizer."""

    dtype: torch.dtype
    states: States | None = None
    kernel: str = ""

    @property
    def trained(self) -> States:
        """The states of a range that trains. StateError for a format of frozen ranges."""
        if self.states is None:
            raise StateError(f"a range of {self.dtype} trains, and its format has no states")
        return self.states


Formats = tuple[Format, ...]
"""Of one model; ranges have their numbers."""


def one_format(states: States, kernel: str = "") -> Formats:
    """Of a model whose parameters all have one dtype and one optimizer."""
    return (Format(states.dtype, states, kernel),)


@functools.cache
def states_of(dtype: torch.dtype, kind: StateKind, moments: tuple[Moment, ...]) -> States:
    """The same object for the same arguments."""
    return States(dtype, kind, moments)


def _moment_dtypes(moments: tuple[Moment, ...], kind: StateKind) -> dict[str, torch.dtype]:
    if kind == EXACT:
        return {moment.name: torch.float32 for moment in moments}
    codes = {moment.name: torch.uint8 if moment.is_root else torch.int8 for moment in moments}
    return codes | {moment.name + SCALE: torch.float32 for moment in moments}


def split_master(
    master: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A flat fp32 master as weights of `dtype` and what exact states keep beside them."""
    if dtype is torch.float32:
        return master, None
    if dtype is torch.float16:
        return master.to(dtype), master
    bits = torch.where(master.isnan(), torch.nan, master).contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # the carry past the sign is undone by the remainder
    low = (bits - (upper << 16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), low


def join_master(weights: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """The fp32 master, by the dtype of `low`: the inverse of `States.split`; without `low` the
    weights themselves, in fp32. A weight that somebody wrote counts, as it does in Adam."""
    if low is None:
        return weights.float()
    if low.dtype is torch.float32:
        return torch.where(low.to(weights.dtype) == weights, low, weights.float())
    upper = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    rest = low.to(torch.int32)
    bits = upper + (rest << 8 if low.dtype is torch.int8 else rest)
    # What would change the sign belongs to a zero that was written by somebody else.
    return torch.where((bits ^ upper) < 0, upper, bits).view(torch.float32)


# -- the formulas of lean states -------------------------------------------------------------------
def split_lean_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 master rounded to its upper 24 bits, as the bf16 weight nearest to those, and the
    remainder; ties go away from zero."""
    quiet = torch.where(master.isnan(), torch.nan, master)
    bits = quiet.contiguous().view(torch.int32).to(torch.int64)
    kept = (bits + 0x80) >> 8
    upper = (kept + 0x80) >> 8
    weights = upper.to(torch.int16).view(torch.bfloat16)
    return weights, (kept - (upper << 8)).to(torch.int8)


def compress(x: torch.Tensor) -> torch.Tensor:
    """The square root of x >= 0 by straight lines between powers of two: [Note: companding]."""
    return ((x.contiguous().view(torch.int32) >> 1) + (_ONE >> 1)).view(torch.float32)


def expand(codes: torch.Tensor) -> torch.Tensor:
    """The x >= 0 with compress(x) == codes, integers from 0; 0 of 0."""
    bits = codes.to(torch.float32).view(torch.int32)
    return ((bits << 1) - _ONE).view(torch.float32).masked_fill(codes == 0, 0.0)


def decode_signed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """sign(code) * expand(|code|) * scale."""
    values = expand(codes.to(torch.int16).abs()) * _of_elements(scales, codes)
    return torch.where(codes < 0, -values, values)


def encode_signed(exp_avg: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales): with a group's largest magnitude A, scale = max(A * (1 / 16128), 2^-126) and
    code = sign * round(compress(|m| * (1 / scale))); for A that is not finite NaN, and 0."""
    roots, scales = _compressed(exp_avg.abs(), SIGNED_TOP)
    return torch.where(exp_avg < 0, -roots, roots).to(torch.int8), scales


def decode_root(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(expand(code) * scale)^2."""
    return (expand(codes.to(torch.int16)) * _of_elements(scales, codes)).square()


def encode_root(exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of the square roots, as of first moments, without signs; a code is at least
    1, but in a group with something that is not finite."""
    # NumPy's root is the IEEE one; torch's, of a vector library, may be a unit off.
    with np.errstate(invalid="ignore"):
        roots = torch.from_numpy(np.sqrt(np.atleast_1d(exp_avg_sq.numpy())))
    codes, scales = _compressed(roots.view(exp_avg_sq.shape), ROOT_TOP)
    lowest = _of_elements(scales, codes).isfinite().to(codes.dtype)
    return codes.maximum(lowest).to(torch.uint8), scales


def _compressed(magnitudes: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    flat = magnitudes.reshape(-1)
    padded = flat.new_zeros(-(-flat.numel() // GROUP), GROUP)
    padded.view(-1)[: flat.numel()] = flat
    largest = padded.amax(1)  # NaN, if there is one
    finite = largest.isfinite()
    scales = (largest * torch.tensor(1.0 / top)).clamp_min(SMALLEST_SCALE)
    scales = scales.masked_fill(~finite, torch.nan)
    roots = compress(padded * scales.reciprocal()[:, None]).round()
    roots = roots.masked_fill(~finite[:, None], 0.0)
    return roots.view(-1)[: flat.numel()].view(magnitudes.shape), scales


def _of_elements(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return scales.repeat_interleave(GROUP)[: codes.numel()].view(codes.shape)
