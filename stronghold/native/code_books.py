"""The code books of nf4: the values of its codes, and of the codes of its absmax.

`kernels/src/code_books.h` has the same numbers. A test compares the kernels with them.
"""

from __future__ import annotations

import functools
from fractions import Fraction

import torch

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NF4's code book (QLoRA, arXiv:2305.14314): the value of each code, exact in fp32."""


def dynamic_values() -> list[float]:
    """The values of the signed 8-bit dynamic map [256], ascending, rounded to fp32.

    Decade i, of 7, has 2^i values between 10^(i-7) and 10^(i-6): the middles of equal parts. Their
    negatives, 0 and 1 are added (8-bit optimizers, arXiv:2110.02861).
    """
    positive = [
        Fraction(10) ** (decade - 6)
        * (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * part + 1, 2 ** (decade + 1)))
        for decade in range(7)
        for part in range(2**decade)
    ]
    values = sorted([*positive, *(-value for value in positive), Fraction(0), Fraction(1)])
    rounded: list[float] = torch.tensor([float(x) for x in values], dtype=torch.float32).tolist()
    return rounded


@functools.cache
def code_books(device: torch.device) -> torch.Tensor:
    """`NF4_VALUES` and then `dynamic_values`, as fp32 [16 + 256] on a device. Made once."""
    return torch.tensor([*NF4_VALUES, *dynamic_values()], dtype=torch.float32, device=device)


def nf4_map(device: torch.device) -> torch.Tensor:
    """`NF4_VALUES` as fp32 [16] on a device."""
    return code_books(device)[: len(NF4_VALUES)]


def dynamic_map(device: torch.device) -> torch.Tensor:
    """`dynamic_values` as fp32 [256] on a device."""
    return code_books(device)[len(NF4_VALUES) :]
