"""Adam, accumulation and norms where the bytes lie: on the host, or on the device.

`Kernels` is the contract, `NativeKernels` runs it with threads of the CPU; `TritonKernels` of
`triton_kernels` runs it on a GPU. All of them give the same bits ([Note: same bits] of
`kernels/include/stronghold.h`), so where a layer is updated never shows in its weights.

Addresses are of memory that the implementation can reach. Who calls keeps that memory alive and in
place until the work is done: NativeKernels' when the call returns, a GPU's when the stream that is
current in the calling thread has passed it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from stronghold import native

AdamSegments = Sequence[native.AdamSegment] | native.AdamRows


class Kernels(ABC):
    """One implementation of the update's arithmetic. Dtypes are fp32, bf16 and fp16; any numel,
    zero included; addresses are aligned to their elements. Arrays that are written overlap no other
    array of the same call."""

    @abstractmethod
    def prepare_adam(
        self,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: AdamSegments,
        *,
        lean: bool = False,
    ) -> Callable[[float | None], None]:
        """The host's share of a step of Adam or AdamW on every segment, in place; the formula is in
        `stronghold.h`. What it returns does the rest, with one scale of the gradients for all
        segments, or with each one's own (None). `lean`: bf16 weights with lean states.

        ConfigError for a segment that breaks its contract, before anything is written.
        """

    def adam(
        self,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: AdamSegments,
        *,
        lean: bool = False,
    ) -> None:
        """Both at once, with the segments' own scales."""
        self.prepare_adam(weight_dtype, grad_dtype, segments, lean=lean)(None)

    @abstractmethod
    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        """acc = float(grad) or, with `add`, acc += float(grad), in fp32.

        Segments are (address of the gradient, address of the fp32 accumulator, numel, add).
        """

    @abstractmethod
    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        """The sum of squares of each segment, (address, numel), accumulated in double.

        On a GPU it waits for the stream: `sum_squares_async` does not.
        """

    def sum_squares_async(
        self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """The same sums as an fp64 tensor of [segments], where the arrays lie; on a GPU it is valid
        for what the calling thread's stream runs after it."""
        return torch.tensor(self.sum_squares(dtype, segments), dtype=torch.float64)


class NativeKernels(Kernels):
    """The kernels of `native` on one pool of threads: for host memory, and for the emulated device,
    whose memory is the host's.

    The pool is the caller's, who closes it. Calls on one pool take turns: work that must not wait
    for the update lane's takes a pool of its own.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: native.Pool) -> None:
        self._pool = pool

    def prepare_adam(
        self,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: AdamSegments,
        *,
        lean: bool = False,
    ) -> Callable[[float | None], None]:
        batch = native.AdamBatch(weight_dtype, grad_dtype, segments, lean=lean)

        def run(scale: float | None) -> None:
            if scale is not None:
                batch.rows["grad_scale"] = scale
            batch.run(self._pool)

        return run

    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        native.accumulate(self._pool, grad_dtype, segments)

    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        return native.sum_squares(self._pool, dtype, segments)
