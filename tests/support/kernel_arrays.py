"""Segments for the laws of the native kernels, at any byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from stronghold import native
from tests.support.optimizers import OPTIMIZERS, hyper_fields
from tests.support.reference import join_bf16, split_bf16

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
SIZES = (0, 1, 15, 17, 33, 4097)
NAN = 0x7FC00000


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def misaligned(tensor: torch.Tensor, skip: int) -> torch.Tensor:
    """The same values, `skip` bytes past an aligned address."""
    raw = torch.zeros(tensor.nbytes + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + skip
    out = torch.from_numpy(
        np.frombuffer(raw.numpy().data, dtype=np.uint8, offset=start, count=tensor.nbytes)
    )
    if tensor.numel():
        out.copy_(tensor.view(torch.uint8))
    return out  # bytes: torch does not view them as floats at odd addresses


class Arrays:
    """The arrays of one segment with exact states, as bytes at a chosen misalignment: `parts`, by
    the segment's fields."""

    def __init__(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        weight_dtype: torch.dtype,
        skip: int = 0,
        optimizer: str = "adam",
    ) -> None:
        low = torch.empty(0)
        if weight_dtype == F32:
            weight = master
        elif weight_dtype == BF16:
            upper, rest = split_bf16(master.numpy())
            weight, low = torch.from_numpy(upper).view(BF16), torch.from_numpy(rest)
        else:
            weight, low = master.half(), master
        self.optimizer, self.numel = optimizer, master.numel()
        self.weight_dtype, self.grad_dtype = weight_dtype, grad.dtype
        arrays = {"weight": weight, "low": low, "grad": grad}
        for k in range(OPTIMIZERS[optimizer].num_moments):
            arrays[f"moment{k}"] = torch.zeros_like(master)
        self.parts = {name: misaligned(array, skip) for name, array in arrays.items()}

    def segment(self, step: int = 1, **changes: float) -> native.UpdateSegment:
        addresses = {name: part.data_ptr() for name, part in self.parts.items()}
        fields = hyper_fields(self.optimizer, **changes)
        return native.UpdateSegment(**{**addresses, "numel": self.numel, "step": step, **fields})

    def run(self, pool: native.Pool, steps: Sequence[int] = (1, 2, 3), **changes: float) -> None:
        for step in steps:
            segments = [self.segment(step, **changes)]
            pool.update(self.optimizer, self.weight_dtype, self.grad_dtype, segments)

    def put(self, name: str, value: torch.Tensor) -> None:
        self.parts[name].copy_(value.view(torch.uint8))

    def array(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.parts[name].clone().view(dtype)

    def master(self) -> torch.Tensor:
        if self.weight_dtype == F32:
            return self.array("weight", F32)
        if self.weight_dtype == F16:
            return self.array("low", F32)
        upper, low = self.array("weight", torch.int16), self.array("low", torch.int16)
        return torch.from_numpy(join_bf16(upper.numpy(), low.numpy()))


def target_of(segment: native.UpdateSegment) -> native.Target:
    """A target with the addresses of the arrays that a step of the segment writes."""
    return native.Target(*(getattr(segment, name) for name in native.Target._fields))


def same(left: Arrays, right: Arrays) -> bool:
    return all(torch.equal(left.parts[name], right.parts[name]) for name in left.parts)


def values(numel: int, seed: int, special: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= torch.pow(10.0, torch.randint(-6, 3, (numel,), generator=generator).float())
    if special and numel:
        odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, 1e-20, -3.4e38]
        at = torch.arange(0, numel, 3)
        x[at] = torch.tensor(odd)[torch.randint(0, len(odd), (len(at),), generator=generator)]
    return x


def addresses(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
