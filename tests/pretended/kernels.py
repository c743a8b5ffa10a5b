"""What stands for the Triton kernels: the host's, on the bytes behind device addresses.

They refuse addresses of the host, and run on the current stream's thread, later than the call
returns. Nothing here runs a program of Triton: the interpreter does
(tests/units/test_device_kernels.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stronghold import native
from stronghold.device import cuda, triton_kernels
from stronghold.errors import ConfigError
from stronghold.native import Kernels

ADDRESSES = ("weight", "low", "exp_avg", "exp_avg_sq", "grad")


def install(extension: Any) -> None:
    """Every `CudaDevice` makes these from now on, and tests that ask for Triton's do."""
    begin: int = extension.device_base()
    end: int = begin + extension.ARENA_BYTES
    distance: int = extension.distance()

    def shadow(address: int, numel: int) -> int:
        if numel == 0 or address == 0:
            return 0
        assert begin <= address < end, f"a kernel on the GPU was given a host address {address:#x}"
        return address + distance

    class PretendedKernels(Kernels):
        def __init__(self, device: object) -> None:
            self._host = native.Pool(1)

        def prepare_adam(
            self, weight: torch.dtype, grad: torch.dtype, segments: Any, *, lean: bool = False
        ) -> Callable[[float | None], None]:
            if lean:
                raise ConfigError("there is no program for lean states")  # as on a GPU
            rows = native.adam_rows(segments).copy()  # the caller may write its own anew
            numels = rows["numel"].tolist()
            for name in ADDRESSES:
                rows[name] = [
                    shadow(*pair) for pair in zip(rows[name].tolist(), numels, strict=True)
                ]
            run = self._host.prepare_adam(weight, grad, rows)
            return lambda scale: extension.launch(lambda: run(scale))

        def accumulate(self, grad: torch.dtype, segments: Any) -> None:
            moved = [(shadow(a, n), shadow(b, n), n, add) for a, b, n, add in segments]
            extension.launch(lambda: self._host.accumulate(grad, moved))

        def sum_squares(self, dtype: torch.dtype, segments: Sequence[Any]) -> list[float]:
            return self.sum_squares_async(dtype, segments).tolist()

        def sum_squares_async(self, dtype: torch.dtype, segments: Sequence[Any]) -> torch.Tensor:
            moved = [(shadow(a, n), n) for a, n in segments]
            sums = torch.empty(len(moved), dtype=torch.float64, device="cuda")
            address = shadow(sums.data_ptr(), len(moved))

            def launch() -> None:
                found = np.asarray(self._host.sum_squares(dtype, moved), dtype=np.float64)
                ctypes.memmove(address, found.ctypes.data, found.nbytes)

            if moved:
                extension.launch(launch)
            return sums

    for module in (triton_kernels, cuda):
        module.TritonKernels = PretendedKernels  # type: ignore[attr-defined]
