"""Segments for the laws of kernels, on any device, and their comparison bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from stronghold import native
from stronghold.native import Kernels
from tests.support.optimizers import FORMS, OPTIMIZERS, hyper_fields
from tests.support.reference import split_bf16

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
SIZES = (1, 0, 15, 17, 4097, 1023)
STATE = ("weight", "low", "moment0", "moment1")
# Updates to compare: every form of every formula, and Adam with other constants.
UPDATES = {**FORMS, "adam-uncorrected": ("adam", {"bias_correction": False})}
GUARD = 16  # elements: one vector of any kernel
# A lone bit pattern per hardware hazard: NaN, infinities, both zeros, denormals of fp32 and of
# fp16, the largest numbers, and squares that underflow.
SPECIAL = [
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, 1e-20, 65519.0),
    *(65520.0, 6e-8, 5.9e-8, -3e-8, 2.98e-8, 6.1e-5),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits on the host: NaNs and signs of zeros compare too."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.cpu().view(integers)


def values(numel: int, seed: int, special: bool = False) -> torch.Tensor:
    """fp32 over nine decades; with `special` every third element is a hazard."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= torch.pow(10.0, torch.randint(-6, 3, (numel,), generator=generator).float())
    if special:
        at = torch.arange(0, numel, 3)
        chosen = torch.randint(0, len(SPECIAL), (len(at),), generator=generator)
        x[at] = torch.tensor(SPECIAL)[chosen]
    return x


def placed(tensor: torch.Tensor, device: torch.device, skip: int) -> torch.Tensor:
    """A copy on `device`, `skip` elements past an aligned address, ones on both sides."""
    room = torch.ones(skip + tensor.numel() + GUARD, dtype=tensor.dtype, device=device)
    inside = room[skip : skip + tensor.numel()]
    inside.copy_(tensor)
    return inside


def surroundings(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of what `placed` made, with the ones: nothing may write there."""
    return bits(tensor._base)


class Arrays:
    """The arrays of one segment with exact states on a device. The same arguments give the same
    bits."""

    def __init__(
        self,
        numel: int,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        *,
        device: torch.device,
        seed: int = 0,
        special: bool = False,
        skip: int = 0,
        optimizer: str = "adam",
    ) -> None:
        self.optimizer = optimizer
        master = values(numel, seed, special)
        # A few half-precision weights are not their masters', as after the caller's writing.
        written = torch.arange(numel) % 7 == 3
        if weight_dtype == BF16:
            upper, rest = split_bf16(master.numpy())
            weight, low = torch.from_numpy(upper).view(BF16), torch.from_numpy(rest)
            weight[written] = 0.0
        else:
            weight, low = (master * ~written).to(weight_dtype), master
        second = values(numel, seed + 1).square()  # of Adam it is never negative
        grads = [values(numel, seed + k, special).to(grad_dtype) for k in (2, 3, 4)]
        parts = (weight, low, values(numel, seed + 5), second, *grads)
        # Also moments that the optimizer does not have: nothing may write there.
        self.weight, self.low, self.moment0, self.moment1, *self.grads = (
            placed(part, device, skip) for part in parts
        )

    def segment(self, step: int, **changes: Any) -> native.UpdateSegment:
        moments = [self.moment0.data_ptr(), self.moment1.data_ptr()]
        num_moments = OPTIMIZERS[self.optimizer].num_moments
        return native.UpdateSegment(
            weight=self.weight.data_ptr(),
            low=0 if self.weight.dtype == F32 else self.low.data_ptr(),
            grad=self.grads[step % 3].data_ptr(),
            numel=self.weight.numel(),
            step=step,
            **{f"moment{k}": address for k, address in enumerate(moments[:num_moments])},
            **hyper_fields(self.optimizer, **changes),
        )

    def state(self) -> list[torch.Tensor]:
        return [surroundings(getattr(self, name)) for name in STATE]


def some_arrays(
    sizes: Sequence[int],
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> list[Arrays]:
    return [
        Arrays(numel, weight_dtype, grad_dtype, device=device, seed=10 * k, **options)
        for k, numel in enumerate(sizes)
    ]


def meetings(device: torch.device, optimizer: str) -> Arrays:
    """fp32 arrays in which every two and three hazards of master, moment and gradient meet."""
    hazards = torch.tensor([*SPECIAL, 1.0])
    triples = torch.cartesian_prod(hazards, hazards, hazards)
    arrays = Arrays(len(triples), F32, F32, device=device, optimizer=optimizer)
    for part, column in ((arrays.weight, 0), (arrays.moment0, 1), *((g, 2) for g in arrays.grads)):
        part.copy_(triples[:, column])
    arrays.moment1.copy_(triples.roll(1, dims=0)[:, 2].abs())
    return arrays


def run_steps(
    kernels: Kernels, arrays: Sequence[Arrays], steps: Sequence[int], **changes: Any
) -> None:
    """`steps` of the arrays' optimizer. Neighbours differ in weight decay and in the step that they
    have reached."""
    dtypes = arrays[0].weight.dtype, arrays[0].grads[0].dtype
    for step in steps:
        kernels.update(
            arrays[0].optimizer,
            *dtypes,
            [
                part.segment(step + k % 2, weight_decay=(0.1, 0.0, 0.01)[k % 3], **changes)
                for k, part in enumerate(arrays)
            ],
        )


def run_adam(
    kernels: Kernels, arrays: Sequence[Arrays], steps: Sequence[int], **changes: Any
) -> None:
    """`run_steps` of arrays that were made for Adam."""
    run_steps(kernels, arrays, steps, **changes)


def assert_same(left: Sequence[Arrays], right: Sequence[Arrays], where: str = "") -> None:
    for a, b in zip(left, right, strict=True):
        for name, x, y in zip(STATE, a.state(), b.state(), strict=True):
            differ = int((x != y).sum())
            assert torch.equal(x, y), f"{where} {name}: {differ} of {len(x)} differ"


def accumulated(
    kernels: Kernels, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, skip: int = 0
) -> list[torch.Tensor]:
    """Accumulators after both forms of `accumulate`, special values included."""
    pairs = list(itertools.product(enumerate(sizes), (False, True)))
    grads = [placed(values(n, k, True).to(dtype), device, skip) for (k, n), _ in pairs]
    accs = [placed(values(n, k + 1, True), device, skip) for (k, n), _ in pairs]
    kernels.accumulate(
        dtype,
        [
            (grad.data_ptr(), acc.data_ptr(), grad.numel(), add)
            for grad, acc, (_, add) in zip(grads, accs, pairs, strict=True)
        ],
    )
    return [surroundings(acc) for acc in accs]


def sums(
    kernels: Kernels,
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    special: bool = False,
) -> torch.Tensor:
    """The bits of `sum_squares_async` over segments of these sizes."""
    arrays = [values(n, k, special and k % 2 == 0).to(dtype) for k, n in enumerate(sizes)]
    arrays = [placed(x, device, k % 2) for k, x in enumerate(arrays)]
    return bits(kernels.sum_squares_async(dtype, [(x.data_ptr(), x.numel()) for x in arrays]))
