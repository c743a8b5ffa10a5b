"""The exact fp32 master of 16-bit weights, as weights and what they leave out.

Pure: tensors in, tensors out. Any thread.
"""

from __future__ import annotations

import torch


def split_master(
    master: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A flat fp32 master as weights in `dtype` and what makes it exact again ([Note: layouts])."""
    if dtype is torch.float32:
        return master, None
    if dtype is torch.float16:
        return master.to(dtype), master
    bits = master.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # the carry past the sign is undone by the remainder
    low = (bits - (upper << 16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), low


def join_master(weights: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `split_master`; without `low` the weights themselves, in fp32."""
    if low is None:
        return weights.float()
    if low.dtype is torch.float32:
        return low
    upper = weights.contiguous().view(torch.int16).to(torch.int32)
    return ((upper << 16) + low.to(torch.int32)).view(torch.float32)
