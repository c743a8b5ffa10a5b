"""The kernels on a GPU: updates, accumulation and norms as launches of Triton programs.

Owns the tables of segments that it keeps on the device. The formulas of the optimizers are in
`triton_programs`, and `native.constants` gives the numbers of a step: this file names no optimizer.
Launches go to the calling thread's current stream and return at once. Entered with the device
current by the training thread, and by autograd's in backward; never by both at once.

The bits are those of `native`. What that needs of a GPU is in [Note: same operations] of
`triton_programs`; that the compiled code has it, `tests/units/test_device_programs.py` reads off
the PTX.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stronghold import native
from stronghold.device.base import Device
from stronghold.errors import ConfigError
from stronghold.native import Kernels, Rows, Segments, Targets

# What a launch must ask of the compiler for the host's bits: [Note: same operations].
EXACT = {"enable_fp_fusion": False}

BLOCK = 1024  # elements of a program: 8 per thread, so that bf16 is loaded by 16 bytes
NUM_WARPS = 4
SUM_BLOCK = 65536  # kSumBlock of targets.h: part of the sum's definition
SUM_WARPS = 1  # the sum's 32 lanes are the threads
VECTOR_BYTES = 16

# 3.5 KiB each. A layer takes a few, and as many again where its gradients change places; more than
# this, and tables are sent anew.
MAX_TABLES = 1024

# The other half of a master, beside its weight. An fp32 weight has none, and none is read.
_LOW = {torch.float32: torch.float32, torch.bfloat16: torch.int16, torch.float16: torch.float32}

_Rows = npt.NDArray[np.int64]  # [segments, 1 + arrays]: numel, addresses


class _Launch(NamedTuple):
    """The segments of one launch, on the device."""

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
    """`Kernels` for a CUDA device. ConfigError when Triton is missing.

    Each first call with new dtypes compiles, for about a second. A call whose segments were seen
    before copies nothing to the device: only its numbers travel, with the launch.
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
        """Drop the tables of earlier launches: later ones send theirs anew. A prepared call that
        has not launched yet keeps its own."""
        self._tables.clear()

    def prepare_update(
        self,
        optimizer: str,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: Segments,
        *,
        lean: bool = False,
        targets: Targets | None = None,
    ) -> Callable[[float | None], None]:
        """Sends the tables; its result launches. Segments with equal constants share a launch.
        ConfigError for lean states, too."""
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
        columns = [fields[name] for name in ("numel", *arrays)]
        if targets is not None:
            targets = native.target_rows(targets, len(fields))
            native.check_targets(optimizer, weight_dtype, grad_dtype, fields, targets)
            written = {name: dtype for name, dtype in arrays.items() if name != "grad"}
            columns += _target_columns(fields, targets, written)
            arrays |= {f"the target of {name}": dtype for name, dtype in written.items()}
        rows = np.stack(columns, axis=1)
        _check_arrays(rows, arrays)
        dtypes, in_place = (weight_dtype, grad_dtype), targets is None
        launches = [
            partial(self._launch_update, launch, group, formula, dtypes, in_place)
            for group in groups
            for launch in self._launches(rows[group.indices], BLOCK)
        ]

        def run(scale: float | None) -> None:
            for launch in launches:
                launch(scale)

        return run

    def _launch_update(
        self,
        launch: _Launch,
        group: _Group,
        formula: Any,
        dtypes: tuple[torch.dtype, torch.dtype],
        in_place: bool,
        scale: float | None,
    ) -> None:
        weight_dtype, grad_dtype = dtypes
        constants = group.constants
        if scale is not None:  # replaces constant 0, and is rounded as that was
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
            IN_PLACE=in_place,
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
        for add in (False, True):
            for launch in self._launches(rows[(fields[:, 3] != 0) == add], BLOCK):
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
        for launch in self._launches(rows, SUM_BLOCK):
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

    def _launches(self, rows: _Rows, block: int) -> Iterator[_Launch]:
        """`rows` in as many launches as they need, in their order."""
        num_table_rows = self._programs.ROWS.value
        for start in range(0, len(rows), num_table_rows):
            part = rows[start : start + num_table_rows]
            blocks = -(-part[:, 0] // block)
            ends = np.cumsum(blocks)
            table = np.zeros((1 + part.shape[1], num_table_rows), dtype=np.int64)
            table[0, : len(part)] = ends - blocks
            table[1:, : len(part)] = part.T
            yield _Launch(
                table=self._on_device(table),
                num_rows=len(part),
                num_blocks=int(ends[-1]),
                aligned=not np.any(part[:, 1:] % VECTOR_BYTES),
            )

    def _on_device(self, table: npt.NDArray[np.int64]) -> torch.Tensor:
        """The table's copy on the device: kept from an earlier call, or sent in stream order."""
        key = table.tobytes()
        found = self._tables.pop(key, None)
        if found is None:
            source = torch.from_numpy(table)
            if self._device.torch_device.type == "cuda":
                # From pageable memory the copy may wait for the stream. Torch's allocator rounds
                # these few KiB up by little, and keeps them until the copy is done.
                source = source.pin_memory()
            found = source.to(self._device.torch_device, non_blocking=True)
        self._tables[key] = found
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        # Should it be dropped, its memory waits for this stream, which need not be the first one's.
        self._device.memory.keep_for_lane(found)
        return found

    def _element(self, dtype: torch.dtype) -> Any:
        """The type that a program reads. bf16 is read as bits: it is fp32 without the lower 16."""
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
        indices_of.setdefault((constants[i].tobytes(), int(variants[i])), []).append(i)
    return [
        _Group(tuple(constants[indices[0]].tolist()), variant, indices)
        for (_, variant), indices in indices_of.items()
    ]


def _target_columns(
    fields: Rows, targets: Rows, written: dict[str, torch.dtype]
) -> list[npt.NDArray[np.int64]]:
    """Where each of the `written` arrays goes."""
    if written["weight"] == torch.float32:  # it has no other half, and none is written
        targets["low"] = targets["weight"]
    return [np.where(targets[name] == 0, fields[name], targets[name]) for name in written]


def _check_arrays(rows: _Rows, arrays: dict[str, torch.dtype]) -> None:
    """Sizes, and addresses that a GPU can load from."""
    numel = rows[:, 0]
    _check(numel >= 0, "numel", numel, ">= 0")
    for column, (name, dtype) in enumerate(arrays.items(), start=1):
        address = rows[:, column]
        good = (address != 0) & (address % dtype.itemsize == 0)
        _check(good | (numel == 0), name, address, f"an address aligned to {dtype.itemsize} bytes")


def _check(good: npt.NDArray[np.bool_], name: str, values: npt.NDArray[Any], expected: str) -> None:
    if not good.all():
        i = int(np.argmin(good))
        raise ConfigError(f"segment {i}: {name}: got {values[i]}, expected {expected}")
