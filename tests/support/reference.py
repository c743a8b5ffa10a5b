"""The plain oracle: what everything else is checked against, written to be read, not to be fast.

Optimizers in fp64 NumPy, from the papers' formulas alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AdamHyper:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw: bool = True
    bias_correction: bool = True


def adam_step(
    p: Array, m: Array, v: Array, grad: Array, step: int, hyper: AdamHyper
) -> tuple[Array, Array, Array]:
    """One step in fp64: Kingma & Ba 2015, algorithm 1; with `adamw` Loshchilov & Hutter 2019."""
    if hyper.adamw:
        p = p * (1.0 - hyper.lr * hyper.weight_decay)
    else:
        grad = grad + hyper.weight_decay * p
    m = hyper.beta1 * m + (1.0 - hyper.beta1) * grad
    v = hyper.beta2 * v + (1.0 - hyper.beta2) * grad * grad
    m_hat, v_hat = m, v
    if hyper.bias_correction:
        m_hat = m / (1.0 - hyper.beta1**step)
        v_hat = v / (1.0 - hyper.beta2**step)
    return p - hyper.lr * m_hat / (np.sqrt(v_hat) + hyper.eps), m, v


@dataclass(frozen=True, kw_only=True)
class LionHyper:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0


def lion_step(p: Array, m: Array, grad: Array, hyper: LionHyper) -> tuple[Array, Array, Array]:
    """One step in fp64: Chen et al. 2023, program 1. Returns p, m and the interpolation whose sign
    the step has."""
    u = hyper.beta1 * m + (1.0 - hyper.beta1) * grad
    p = p - hyper.lr * (np.sign(u) + hyper.weight_decay * p)
    m = hyper.beta2 * m + (1.0 - hyper.beta2) * grad
    return p, m, u


@dataclass(frozen=True, kw_only=True)
class SgdHyper:
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


def sgd_step(p: Array, buffer: Array, grad: Array, hyper: SgdHyper) -> tuple[Array, Array]:
    """One step in fp64: Sutskever et al. 2013, in the form that torch documents, undampened. With
    momentum 0 the buffer is the gradient with its weight decay."""
    grad = grad + hyper.weight_decay * p
    buffer = hyper.momentum * buffer + grad
    direction = grad + hyper.momentum * buffer if hyper.nesterov else buffer
    return p - hyper.lr * direction, buffer


def split_bf16(master: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int16], ...]:
    """fp32 -> (bf16 bits, remainder): nearest with ties away from zero, in 64-bit integers."""
    bits = master.view(np.uint32).astype(np.int64)
    upper = (bits + 0x8000) >> 16
    low = bits - (upper << 16)
    assert np.all((low >= -0x8000) & (low <= 0x7FFF))
    return upper.astype(np.uint16).view(np.int16), low.astype(np.int16)


def join_bf16(upper: npt.NDArray[np.int16], low: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
    """(bf16 bits, remainder) -> fp32: the inverse of `split_bf16`; a remainder that would change
    the sign, of a zero that was written, is none."""
    high = upper.view(np.uint16).astype(np.int64) << 16
    bits = (high + low.astype(np.int64)) & 0xFFFFFFFF
    return np.where((bits ^ high) >> 31, high, bits).astype(np.uint32).view(np.float32)
