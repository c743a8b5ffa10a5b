"""Lean states: the layout that keeps Adam's state of bf16 weights in 5.125 bytes per parameter.

Owns the formulas, in plain torch; `kernels/src/lean-inl.h` has the same bits, and a step of Adam
with lean states is: decode, the exact kernel's fp32 step, encode. Pure; any thread.

The ideas are FlashOptim's (arXiv 2602.23349): a master is its 16-bit weight and an 8-bit remainder;
moments are 8-bit codes of a companded value (the second one's of its square root), relative to
their group's largest. What differs is there because the rounding is to nearest and never random:

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

Layout, for a parameter of n elements in their order: `low` int8[n], `exp_avg` int8[n], `exp_avg_sq`
uint8[n], `exp_avg_scale` and `exp_avg_sq_scale` fp32[ceil(n / 64)]. Element i is in group i // 64;
no group crosses a parameter, and the last one may be short. All zeros are a fresh state.

What the encoding promises: a master within 2^-16 of its value, relatively; a first moment within
1/126 of its group's largest, and within 1/31 of its own value from 1/15 of the largest on; the root
of a second moment within 1/254 of the largest, and within 1/31 of its own value from 1/63 on. Below
2^-112 scales end, and what is promised is 2^-119. A group in which a moment is not finite decodes
to NaN whole.
"""

from __future__ import annotations

import numpy as np
import torch

GROUP = 64
EXP_AVG_TOP = 16128.0  # expand(127): the largest code's value, in units of the scale
EXP_AVG_SQ_TOP = 65024.0  # expand(255)
SMALLEST_SCALE = 2.0**-126  # so that its reciprocal is a normal number

_ONE = 0x3F800000  # the bits of 1.0


def join_master(weights: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """bits(master) = (bits(weight) << 16) + (low << 8)."""
    return joined(weights, low.to(torch.int32) << 8)


def joined(weights: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """bits(master) = (bits(weight) << 16) + rest; the weight where that would change the sign: a
    zero that somebody wrote keeps no negative remainder."""
    upper = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    bits = upper + rest
    return torch.where((bits ^ upper) < 0, upper, bits).view(torch.float32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def decode_exp_avg(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """sign(code) * expand(|code|) * scale."""
    values = expand(codes.to(torch.int16).abs()) * _of_elements(scales, codes)
    return torch.where(codes < 0, -values, values)


def encode_exp_avg(exp_avg: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales): with a group's largest magnitude A, scale = max(A * (1 / 16128), 2^-126) and
    code = sign * round(compress(|m| * (1 / scale))); for A that is not finite NaN, and 0."""
    roots, scales = _compressed(exp_avg.abs(), EXP_AVG_TOP)
    return torch.where(exp_avg < 0, -roots, roots).to(torch.int8), scales


def decode_exp_avg_sq(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(expand(code) * scale)^2."""
    return (expand(codes.to(torch.int16)) * _of_elements(scales, codes)).square()


def encode_exp_avg_sq(exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of the square roots, as of first moments, without signs; a code is at least
    1, but in a group with something that is not finite."""
    # NumPy's root is the IEEE one; torch's, of a vector library, may be a unit off.
    with np.errstate(invalid="ignore"):
        roots = torch.from_numpy(np.sqrt(np.atleast_1d(exp_avg_sq.numpy())))
    codes, scales = _compressed(roots.view(exp_avg_sq.shape), EXP_AVG_SQ_TOP)
    lowest = _of_elements(scales, codes).isfinite().to(codes.dtype)
    return codes.maximum(lowest).to(torch.uint8), scales


def num_groups(numel: int) -> int:
    return -(-numel // GROUP)


def _compressed(magnitudes: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    flat = magnitudes.reshape(-1)
    padded = flat.new_zeros(num_groups(flat.numel()), GROUP)
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
