"""Kernels of the C ABI: optimizers, accumulation and norms by address, on threads.

Memory belongs to the caller, who keeps it alive and in place during a call. Any thread may enter. A
call releases the interpreter lock. Calls on one pool from several threads take turns. Arrays may
have any alignment.

`Kernels` is the contract of the arithmetic. A `Pool` implements it for host memory,
`devices.triton_kernels` for a GPU's. The bits of a result depend on the arguments alone. They do
not depend on the device, the instruction set, the number of threads or the caller's floating-point
mode (`kernels/include/stronghold.h`, [Note: same bits]). So a layer has the same bits wherever it
is updated.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stronghold.errors import ConfigError, StateError
from stronghold.native.loader import Closeable, check, library, naming_threads
from stronghold.native.segments import Rows, Segments, Targets, rows, target_rows

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BF16_LEAN = 3
MAX_MOMENTS, MAX_NUMBERS, MAX_CONSTANTS = 2, 6, 12  # per optimizer


class UpdateBatch:
    """A prepared call of an optimizer: made once, then run every step.

    An assignment to `rows["number0"]` or another field changes the next call. With `lean`, weights
    are bf16 and their states lean. Without `targets` the update is in place.
    """

    __slots__ = (
        "_address",
        "_grad_dtype",
        "_optimizer",
        "_targets",
        "_targets_address",
        "_weight_dtype",
        "rows",
    )

    def __init__(
        self,
        optimizer: str,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: Segments,
        *,
        lean: bool = False,
        targets: Targets | None = None,
    ) -> None:
        self._optimizer = optimizer.encode()
        self._weight_dtype = _weight_code(weight_dtype, lean)
        self._grad_dtype = _dtype_code(grad_dtype)
        self.rows = rows(segments)
        self._address = self.rows.ctypes.data
        self._targets: Rows | None = None
        self._targets_address: int | None = None
        if targets is not None:
            self._targets = target_rows(targets, len(self.rows))
            self._targets_address = self._targets.ctypes.data

    def run(self, pool: Pool) -> None:
        """Run one step on every segment. Waits until all are done."""
        check(
            library().sh_update(
                pool.handle,
                self._optimizer,
                self._weight_dtype,
                self._grad_dtype,
                self._address,
                self._targets_address,
                len(self.rows),
            )
        )

    def traffic(self, pool: Pool) -> None:
        """Move the bytes that `run` moves, and compute nothing: the memory's limit for `run`.

        Targets become copies of their sources, past the caches.
        """
        check(
            library().sh_update_traffic(
                pool.handle,
                self._optimizer,
                self._weight_dtype,
                self._grad_dtype,
                self._address,
                self._targets_address,
                len(self.rows),
            )
        )


def optimizers() -> list[str]:
    """The names of the kernels' optimizers."""
    names: list[str] = []
    while (name := library().sh_optimizer_at(len(names))) is not None:
        names.append(name.decode())
    return names


def constants(
    optimizer: str, segments: Segments
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """The constants of each segment's step, and the variant of its formula.

    Returns fp32 [segments, MAX_CONSTANTS] and int32 [segments]; `stronghold.h` has their meaning.
    Constant 0 is `grad_scale`. It reads only numbers, `grad_scale`, `step` and `flags`. ConfigError
    for a number that the optimizer refuses.
    """
    fields = rows(segments)
    step_constants = np.zeros((len(fields), MAX_CONSTANTS), dtype=np.float32)
    variants = np.zeros(len(fields), dtype=np.int32)
    check(
        library().sh_update_constants(
            optimizer.encode(),
            fields.ctypes.data,
            len(fields),
            step_constants.ctypes.data,
            variants.ctypes.data,
        )
    )
    return step_constants, variants


class Kernels(ABC):
    """One implementation of the update's arithmetic.

    1. Dtypes are fp32, bf16 and fp16. numel may be 0.
    2. Addresses lie in memory that the kernels can reach, aligned to their elements.
    3. A written array overlaps no other array of the same call.
    4. The caller keeps the arrays alive and in place until the work is done. A pool's work is done
       when the call returns. A GPU's is done when the calling thread's current stream has passed
       it.
    """

    @abstractmethod
    def prepare_update(
        self,
        optimizer: str,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: Segments,
        *,
        lean: bool = False,
    ) -> Callable[[float | None], None]:
        """Prepare one step of the optimizer on every segment, in place.

        `stronghold.h` has the optimizers and their formulas. `lean` means bf16 weights with lean
        states.

        Returns the function that performs the step. Its argument is one scale of the gradients for
        all segments, or None: each segment's `grad_scale`.

        ConfigError, before anything is written, for a segment that breaks its contract.
        """

    def update(self, *arguments: Any, **options: Any) -> None:
        """Prepare a step and perform it, with each segment's `grad_scale`."""
        self.prepare_update(*arguments, **options)(None)

    @abstractmethod
    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        """acc = float(grad) or, with `add`, acc += float(grad), in fp32.

        A segment is (address of the gradient, address of the fp32 accumulator, numel, add).
        """

    @abstractmethod
    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        """The sum of squares of each segment, (address, numel), in double.

        Finite input never overflows. NaN or infinity makes the sum non-finite. On a GPU the call
        waits for the stream.
        """

    def sum_squares_async(
        self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """The sums of `sum_squares` as an fp64 tensor [segments] on the arrays' device.

        On a GPU it is valid for work that the calling thread's stream runs after the call.
        """
        return torch.tensor(self.sum_squares(dtype, segments), dtype=torch.float64)


class Pool(Kernels, Closeable):
    """Threads for the kernels: `num_threads` with the calling one.

    cores  the cores that the threads may use; None: all
    isa    the instruction set (see `isas()`); None: STRONGHOLD_ISA, else the best

    A pool does not survive `os.fork()`. Close it when no call is running.
    """

    __slots__ = ("_handle", "_num_threads")

    def __init__(
        self, num_threads: int, cores: Sequence[int] | None = None, isa: str | None = None
    ) -> None:
        self._handle: int | None = None
        self._num_threads = num_threads
        listed = list(cores or ())
        if cores is not None and not listed:
            raise ConfigError("cores: got an empty list, expected core numbers or None")
        handle = ctypes.c_void_p()
        with naming_threads(f"a pool of {num_threads} threads"):
            check(
                library().sh_pool_create(
                    num_threads,
                    (ctypes.c_int32 * len(listed))(*listed),
                    len(listed),
                    None if isa is None else isa.encode(),
                    ctypes.byref(handle),
                )
            )
        self._handle = handle.value

    @property
    def num_threads(self) -> int:
        return self._num_threads

    @property
    def isa(self) -> str:
        """The instruction set that this pool's calls run on."""
        name: bytes = library().sh_pool_isa(self.handle)
        return name.decode()

    def prefetch(
        self,
        optimizer: str,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        *,
        lean: bool = False,
    ) -> int:
        """The distance of the optimizer's memory prefetch in place, in elements.

        The pool chooses it by timing the first chunks after step 1; before that it is 0. It changes
        no bit.
        """
        elements = ctypes.c_int64()
        weight, grad = _weight_code(weight_dtype, lean), _dtype_code(grad_dtype)
        check(
            library().sh_update_prefetch(
                self.handle, optimizer.encode(), weight, grad, ctypes.byref(elements)
            )
        )
        return elements.value

    @property
    def handle(self) -> int:
        """The `sh_pool*`; for this module and the benchmarks."""
        if self._handle is None:
            raise StateError("the pool of threads is closed")
        return self._handle

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
        """Prepare a step as `Kernels` does. An array with a target stays: the target is written."""
        batch = UpdateBatch(
            optimizer, weight_dtype, grad_dtype, segments, lean=lean, targets=targets
        )
        return functools.partial(self._run, batch)

    def _run(self, batch: UpdateBatch, scale: float | None) -> None:
        if scale is not None:
            batch.rows["grad_scale"] = scale
        batch.run(self)

    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        fields = np.array(segments, dtype=np.int64)
        dtype = _dtype_code(grad_dtype)
        check(library().sh_accumulate(self.handle, dtype, fields.ctypes.data, len(segments)))

    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        fields = np.array(segments, dtype=np.int64)
        results = np.empty(len(segments), dtype=np.float64)
        check(
            library().sh_sum_squares(
                self.handle,
                _dtype_code(dtype),
                fields.ctypes.data,
                len(segments),
                results.ctypes.data,
            )
        )
        sums: list[float] = results.tolist()
        return sums

    def close(self) -> None:
        """Stop the threads and join them. Twice is harmless."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().sh_pool_destroy(handle)


def touch(memory: torch.Tensor) -> None:
    """Commit the pages of contiguous host memory. Changes no byte, whatever other threads do."""
    library().sh_touch(memory.data_ptr(), memory.nbytes)


def store(word: torch.Tensor, value: int) -> None:
    """Store an int64 that processes share. Who loads it sees all that was written before."""
    library().sh_store(word.data_ptr(), value)


def load(word: torch.Tensor) -> int:
    """Load an int64 that processes share, and with it what was written before it was stored."""
    return int(library().sh_load(word.data_ptr()))


def isas() -> list[str]:
    """The instruction sets of this CPU, best first, of "avx512", "avx2", "neon" and "scalar"."""
    names: list[str] = []
    while (name := library().sh_isa_at(len(names))) is not None:
        names.append(name.decode())
    return names


def isa() -> str:
    """The instruction set of a pool that names none: STRONGHOLD_ISA, or the best."""
    with Pool(1) as pool:
        return pool.isa


def _dtype_code(dtype: torch.dtype) -> int:
    """The C ABI's number of a dtype. ConfigError for a dtype that the kernels do not take."""
    code = _DTYPES.get(dtype)
    if code is None:
        raise ConfigError(f"the kernels take float32, bfloat16 and float16, got {dtype}")
    return code


def _weight_code(dtype: torch.dtype, lean: bool) -> int:
    """The C ABI's number of a weight dtype. ConfigError for lean states without bf16 weights."""
    if not lean:
        return _dtype_code(dtype)
    if dtype != torch.bfloat16:
        raise ConfigError(f"lean states are a layout of bfloat16 weights, got {dtype}")
    return _BF16_LEAN
