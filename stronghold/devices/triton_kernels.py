"""The kernels on a GPU: updates, sums and norms as launches of Triton programs.

Owns the tables of segments on the device. The formulas of the optimizers are in `triton_programs`,
and `native.constants` gives the numbers of a step. So this file names no optimizer. Launches go to
the calling thread's current stream and return at once. The training thread enters this file, and
autograd's thread in backward, with the device current; never both at once.

The bits are those of `native`. [Note: same operations] of `triton_programs` has the conditions on a
GPU. `tests/units/test_device_programs.py` checks them in the compiled PTX.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stronghold import native
from stronghold.devices.device import Device
from stronghold.errors import ConfigError
from stronghold.native import Kernels, Segments

# The compiler option of every launch that gives the host's bits: [Note: same operations].
EXACT = {"enable_fp_fusion": False}

# elements of a program: 8 per thread, so that a thread loads 16 bytes of bf16
BLOCK = 1024
NUM_WARPS = 4
SUM_BLOCK = 65536  # kSumBlock of targets.h: the definition of the sum has it
SUM_WARPS = 1  # the sum's 32 lanes are the threads
VECTOR_BYTES = 16

# A table takes 3.5 KiB. A layer needs a few tables, and as many again if its gradients change
# places. Beyond this number the oldest tables are dropped, and sent again when they are needed.
MAX_TABLES = 1024

# The dtype of the master remainder beside each weight dtype. An fp32 weight has none; its program
# reads none.
_LOW = {torch.float32: torch.float32, torch.bfloat16: torch.int16, torch.float16: torch.float32}

_Rows = npt.NDArray[np.int64]  # [segments, 1 + arrays]: numel, addresses


class _Launch(NamedTuple):
    """The segments of one launch, on the device."""

    # int64 [1 + columns of rows, ROWS]: [Note: table] of triton_programs
    table: torch.Tensor
    num_rows: int
    num_blocks: int
    aligned: bool  # every array starts on VECTOR_BYTES


class _Group(NamedTuple):
    """Segments that can share a launch."""

    constants: tuple[float, ...]  # [native.MAX_CONSTANTS], each an fp32 number
    variant: int  # of the formula
    indices: list[int]


class TritonKernels(Kernels):
    """`Kernels` for a CUDA device. ConfigError if Triton is missing.

    The first call with new dtypes compiles for about a second. A call with segments of an earlier
    call copies no table to the device: its numbers are arguments of the launch.
    """

    def __init__(self, device: Device) -> None:
        try:
            from stronghold.optim import triton_programs
        except ImportError as error:
            raise ConfigError(
                "updates on the GPU need Triton, which torch brings where it is built for CUDA; "
                f"importing it failed: {error}. Install it with `pip install triton`"
            ) from error
        self._programs: Any = triton_programs
        self._device = device
        self._tables: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def drop_tables(self) -> None:
        """Drop the tables of earlier launches; later launches send theirs again.

        A prepared call that has not launched yet keeps its tables.
        """
        self._tables.clear()

    def prepare_update(
        self,
        optimizer: str,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: Segments,
        *,
        lean: bool = False,
    ) -> Callable[[float | None], None]:
        """Send the tables, and return the function that launches.

        Segments with equal constants share a launch. Raises ConfigError for lean states too.
        """
        if lean:
            raise ConfigError(
                "lean states are updated on the host: there is no program for a GPU. Set "
                'stronghold.resident_updates to "host"'
            )
        fields = native.UpdateBatch(optimizer, weight_dtype, grad_dtype, segments).rows
        groups = _groups(optimizer, fields)
        formula = self._programs.FORMULAS[optimizer]
        arrays = {"weight": weight_dtype, "low": _LOW[weight_dtype], "grad": grad_dtype}
        arrays |= {f"moment{k}": torch.float32 for k in range(formula.num_moments)}
        if weight_dtype == torch.float32:
            fields["low"] = fields["weight"]
        rows = np.stack([fields[name] for name in ("numel", *arrays)], axis=1)
        _check_arrays(rows, arrays)
        launches = [
            (launch, group)
            for group in groups
            for launch in self._element_launches(rows[group.indices], BLOCK)
        ]

        def perform(scale: float | None) -> None:
            for launch, group in launches:
                self._launch_update(launch, group, formula, (weight_dtype, grad_dtype), scale)

        return perform

    def _launch_update(
        self,
        launch: _Launch,
        group: _Group,
        formula: Any,
        dtypes: tuple[torch.dtype, torch.dtype],
        scale: float | None,
    ) -> None:
        weight_dtype, grad_dtype = dtypes
        constants = group.constants
        if scale is not None:  # it replaces constant 0, and is rounded like that
            constants = (float(np.float32(scale)), *constants[1:])
        self._programs.update[(launch.num_blocks,)](
            launch.table,
            launch.num_rows,
            constants,
            FORMULA=formula.step,
            VARIANT=group.variant,
            NUM_MOMENTS=formula.num_moments,
            WEIGHT=self._element(weight_dtype),
            LOW=self._element(_LOW[weight_dtype]),
            GRAD=self._element(grad_dtype),
            ALIGNED=launch.aligned,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **EXACT,
        )

    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        fields = np.array(segments, dtype=np.int64).reshape(-1, 4)
        rows = fields[:, [2, 0, 1]]
        _check_arrays(rows, {"grad": grad_dtype, "acc": torch.float32})
        adds = fields[:, 3] != 0
        for add in (False, True):
            for launch in self._element_launches(rows[adds == add], BLOCK):
                self._programs.accumulate[(launch.num_blocks,)](
                    launch.table,
                    launch.num_rows,
                    GRAD=self._element(grad_dtype),
                    ADD=add,
                    ALIGNED=launch.aligned,
                    BLOCK=BLOCK,
                    num_warps=NUM_WARPS,
                    **EXACT,
                )

    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        sums: list[float] = self.sum_squares_async(dtype, segments).tolist()
        return sums

    def sum_squares_async(
        self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        rows = np.array(segments, dtype=np.int64).reshape(-1, 2)[:, ::-1]
        _check_arrays(rows, {"x": dtype})
        sums = torch.empty(len(rows), dtype=torch.float64, device=self._device.torch_device)
        first = 0
        for launch in self._element_launches(rows, SUM_BLOCK):
            partials = sums.new_empty(launch.num_blocks)
            if launch.num_blocks > 0:
                self._programs.sum_squares[(launch.num_blocks,)](
                    launch.table,
                    launch.num_rows,
                    partials,
                    TYPE=self._element(dtype),
                    BLOCK=SUM_BLOCK,
                    num_warps=SUM_WARPS,
                    **EXACT,
                )
            self._programs.sum_blocks[(launch.num_rows,)](
                launch.table,
                partials,
                sums[first : first + launch.num_rows].view(torch.int64),
                BLOCK=SUM_BLOCK,
                num_warps=SUM_WARPS,
                **EXACT,
            )
            first += launch.num_rows
        return sums

    def _element_launches(self, rows: _Rows, block: int) -> Iterator[_Launch]:
        """`_launches` of segments that are cut into programs of `block` elements."""
        return self._launches(rows, -(-rows[:, 0] // block), rows[:, 1:])

    def _launches(
        self, rows: _Rows, num_blocks: npt.NDArray[np.int64], addresses: _Rows
    ) -> Iterator[_Launch]:
        """Cut `rows` into as many launches as they need, in their order.

        num_blocks  programs of each row
        addresses   of each row: all of them decide whether the launch is aligned
        """
        num_table_rows = self._programs.ROWS.value
        for start in range(0, len(rows), num_table_rows):
            launch_rows = rows[start : start + num_table_rows]
            num_rows, num_columns = launch_rows.shape
            blocks = num_blocks[start : start + num_table_rows]
            launch_addresses = addresses[start : start + num_table_rows]
            ends = np.cumsum(blocks)
            table = np.zeros((1 + num_columns, num_table_rows), dtype=np.int64)
            table[0, :num_rows] = ends - blocks
            table[1:, :num_rows] = launch_rows.T
            yield _Launch(
                table=self._on_device(table),
                num_rows=num_rows,
                num_blocks=int(ends[-1]),
                aligned=not np.any(launch_addresses % VECTOR_BYTES),
            )

    def _on_device(self, table: npt.NDArray[np.int64]) -> torch.Tensor:
        """The table's copy on the device: that of an earlier call, or a new one, sent in stream
        order."""
        key = table.tobytes()
        copy = self._tables.pop(key, None)
        if copy is None:
            source = torch.from_numpy(table)
            if self._device.torch_device.type == "cuda":
                # A copy from pageable memory may wait for the stream. torch's allocator rounds
                # these few KiB up by little, and keeps them until the copy is done.
                source = source.pin_memory()
            copy = source.to(self._device.torch_device, non_blocking=True)
        self._tables[key] = copy
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        # If the table is dropped, its memory must wait for this stream too. The first call may have
        # used another stream.
        self._device.memory.keep_for_lane(copy)
        return copy

    def _element(self, dtype: torch.dtype) -> Any:
        """The type that a program reads for a dtype. A program reads bf16 as bits: the upper 16 of
        an fp32."""
        tl = self._programs.tl
        elements = {
            torch.float32: tl.float32,
            torch.float16: tl.float16,
            torch.bfloat16: tl.int16,
            torch.int16: tl.int16,  # remainders
        }
        if dtype not in elements:
            raise ConfigError(f"the kernels take float32, bfloat16 and float16, got {dtype}")
        return elements[dtype]


def _groups(optimizer: str, fields: npt.NDArray[np.void]) -> list[_Group]:
    """The segments with elements, in groups of equal constants and variants."""
    constants, variants = native.constants(optimizer, fields)
    indices_of: dict[tuple[bytes, int], list[int]] = {}  # by bits: -0.0 is not 0.0
    for i in np.flatnonzero(fields["numel"]).tolist():
        key = constants[i].tobytes(), int(variants[i])
        indices_of.setdefault(key, []).append(i)
    groups: list[_Group] = []
    for (_, variant), indices in indices_of.items():
        group_constants = tuple(constants[indices[0]].tolist())
        groups.append(_Group(group_constants, variant, indices))
    return groups


def _check_arrays(rows: _Rows, arrays: dict[str, torch.dtype]) -> None:
    """ConfigError for a negative size, or an address from which a GPU cannot load. Segments without
    elements have any address."""
    numel = rows[:, 0]
    _check(numel >= 0, "numel", numel, ">= 0")
    for column, (name, dtype) in enumerate(arrays.items(), start=1):
        address = rows[:, column]
        is_loadable = (address != 0) & (address % dtype.itemsize == 0)
        expected = f"an address aligned to {dtype.itemsize} bytes"
        _check(is_loadable | (numel == 0), name, address, expected)


def _check(
    is_right: npt.NDArray[np.bool_], name: str, values: npt.NDArray[Any], expected: str
) -> None:
    """ConfigError with the first wrong value."""
    if not is_right.all():
        i = int(np.argmin(is_right))
        raise ConfigError(f"segment {i}: {name}: got {values[i]}, expected {expected}")
