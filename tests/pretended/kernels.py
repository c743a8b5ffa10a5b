"""What stands for the Triton programs: the host's kernels, on the bytes behind device addresses.

`TritonKernels` launches them as it launches Triton's: from tables of segments that lie on the
device. They read their table, refuse addresses of the host, and run on the current stream's thread,
later than the call returns. Nothing here runs a program of Triton: the interpreter does
(tests/units/test_device_kernels.py).
"""

from __future__ import annotations

import ctypes
import importlib
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from stronghold import native
from stronghold.devices import cuda, triton_kernels
from stronghold.devices.device import Device
from stronghold.native import Rows, Segments

# As in triton_programs, which needs Triton.
ROWS = 64  # of a table
NUM_MOMENTS = {"adam": 2, "lion": 1, "sgd_momentum": 1, "sgd": 0}
ARRAYS = ("weight", "low", "grad", "moment0", "moment1")

Table = npt.NDArray[np.int64]  # [columns, segments]: blocks before it, numel, addresses


class Memory:
    """The bytes behind the device's addresses."""

    def __init__(self, extension: Any) -> None:
        self._begin: int = extension.device_base()
        self._end: int = self._begin + extension.ARENA_BYTES
        self._distance: int = extension.distance()

    def address(self, address: int, numel: int = 1) -> int:
        """Where the host finds what lies at a device address."""
        if numel == 0 or address == 0:
            return 0
        inside = self._begin <= address < self._end
        assert inside, f"a kernel on the GPU was given a host address {address:#x}"
        return address + self._distance

    def table(self, address: int, num_rows: int, num_arrays: int) -> Table:
        """A launch's segments as they lie on the device now, with addresses for the host."""
        size = (2 + num_arrays) * ROWS
        words = (ctypes.c_int64 * size).from_address(self.address(address))
        found = np.frombuffer(words, dtype=np.int64).reshape(-1, ROWS)[:, :num_rows].copy()
        for column in range(2, len(found)):
            found[column] = [self.address(*pair) for pair in found[[column, 1]].T.tolist()]
        return found


class Program:
    """`program[grid](...)` as Triton's programs are launched."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run


class Programs:
    """The programs of `triton_programs` but `update`, which takes other numbers here."""

    ROWS = SimpleNamespace(value=ROWS)
    FORMULAS: ClassVar = {
        name: SimpleNamespace(step=name, num_moments=number) for name, number in NUM_MOMENTS.items()
    }

    def __init__(self, extension: Any, memory: Memory, host: native.Pool) -> None:
        self._extension, self._memory, self._host = extension, memory, host
        self.accumulate = Program(self._accumulate)
        self.sum_squares = Program(self._sum_squares)
        self.sum_blocks = Program(self._sum_blocks)

    def _accumulate(
        self, table: torch.Tensor, num_rows: int, *, GRAD: torch.dtype, ADD: bool, **_: Any
    ) -> None:
        address = table.data_ptr()

        def run() -> None:
            _, numels, grads, sums = self._memory.table(address, num_rows, 2).tolist()
            rows = zip(grads, sums, numels, strict=True)
            self._host.accumulate(GRAD, [(*row, ADD) for row in rows])

        self._extension.launch(run)

    def _sum_squares(
        self,
        table: torch.Tensor,
        num_rows: int,
        partials: torch.Tensor,
        *,
        TYPE: torch.dtype,
        BLOCK: int,
        **_: Any,
    ) -> None:
        address = table.data_ptr()
        partials_address = self._memory.address(partials.data_ptr())

        def run() -> None:
            _, numels, arrays = self._memory.table(address, num_rows, 1).tolist()
            blocks = [
                (array + begin * TYPE.itemsize, min(BLOCK, numel - begin))
                for array, numel in zip(arrays, numels, strict=True)
                for begin in range(0, numel, BLOCK)
            ]
            sums = np.asarray(self._host.sum_squares(TYPE, blocks), dtype=np.float64)
            ctypes.memmove(partials_address, sums.ctypes.data, sums.nbytes)

        self._extension.launch(run)

    def _sum_blocks(
        self,
        table: torch.Tensor,
        partials: torch.Tensor,
        sums: torch.Tensor,
        *,
        BLOCK: int,
        **_: Any,
    ) -> None:
        num_rows, num_blocks = len(sums), len(partials)
        address = table.data_ptr()
        blocks_address = self._memory.address(partials.data_ptr(), num_blocks)
        sums_address = self._memory.address(sums.data_ptr())

        def run() -> None:
            first, numels, _ = self._memory.table(address, num_rows, 1).tolist()
            of_blocks = (ctypes.c_double * num_blocks).from_address(blocks_address)
            found = (ctypes.c_double * num_rows).from_address(sums_address)
            for row, (begin, numel) in enumerate(zip(first, numels, strict=True)):
                found[row] = 0.0
                for block in range(begin, begin - (-numel // BLOCK)):
                    found[row] += of_blocks[block]

        self._extension.launch(run)


def import_without_cuda(package: str) -> None:
    """Import a package that computes with torch's operators if there is no GPU. Its own library of
    CUDA kernels needs a real one."""
    with mock.patch("torch.cuda.is_available", return_value=False):
        importlib.import_module(package)


def install(extension: Any) -> None:
    """Every `CudaDevice` makes these from now on, and tests that ask for Triton's do."""
    import_without_cuda("bitsandbytes")
    memory = Memory(extension)

    class PretendedKernels(triton_kernels.TritonKernels):
        def __init__(self, device: Device) -> None:
            self._device = device
            self._host = native.Pool(1)
            self._programs = Programs(extension, memory, self._host)
            self._tables = OrderedDict()

        def prepare_update(
            self,
            optimizer: str,
            weight_dtype: torch.dtype,
            grad_dtype: torch.dtype,
            segments: Segments,
            *,
            lean: bool = False,
        ) -> Callable[[float | None], None]:
            dtypes = weight_dtype, grad_dtype
            launches = super().prepare_update(optimizer, *dtypes, segments, lean=lean)
            rows = native.rows(segments)  # a copy: the caller may write its own anew

            def run(scale: float | None) -> None:
                self._rows = rows
                launches(scale)

            return run

        def _launch_update(
            self,
            launch: Any,
            group: Any,
            formula: Any,
            dtypes: tuple[torch.dtype, torch.dtype],
            scale: float | None,
        ) -> None:
            """The host's kernel takes the segments' numbers, from which it makes the constants."""
            rows: Rows = self._rows
            address, num_rows = launch.table.data_ptr(), launch.num_rows
            row_of = {weight: row for row, weight in enumerate(rows["weight"].tolist())}
            names = ARRAYS[: 3 + formula.num_moments]

            def run() -> None:
                _, numels, *arrays = memory.table(address, num_rows, len(names))
                weights = arrays[0] - extension.distance()
                chosen = rows[[row_of[weight] for weight in weights.tolist()]]
                assert (chosen["numel"] == numels).all()
                for name, array in zip(names, arrays, strict=True):
                    chosen[name] = array
                self._host.prepare_update(formula.step, *dtypes, chosen)(scale)

            extension.launch(run)

        def _element(self, dtype: torch.dtype) -> Any:
            return dtype

    for module in (triton_kernels, cuda):
        module.TritonKernels = PretendedKernels  # type: ignore[attr-defined]
