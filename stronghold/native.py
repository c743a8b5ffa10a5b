"""The C ABI of `kernels/` for Python: optimizers, accumulation and norms on threads, and
asynchronous files.

Owns the loaded library alone. Memory belongs to the caller, who keeps it alive and in place during
a call. Any thread may enter. A call releases the interpreter lock. Calls on one pool from several
threads take turns. Arrays may have any alignment.

`Kernels` is the contract of the arithmetic. A `Pool` implements it for host memory,
`optim.triton_kernels` for a GPU's. The bits of a result depend on the arguments alone. They do not
depend on the device, the instruction set, the number of threads or the caller's floating-point mode
(`kernels/include/stronghold.h`, [Note: same bits]). So a layer has the same bits wherever it is
updated.

[Note: files]

1. A queue has C threads, which Python does not see. They transfer blocks while no caller waits.
2. An operation returns a ticket. One thread waits for a ticket.
3. Offsets, lengths, addresses and sizes are multiples of `ALIGNMENT`.
4. Operations may overtake each other, also on the same bytes. The caller waits if order counts.

`kernels/include/stronghold_io.h` has the whole contract.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt
import torch

from stronghold.errors import ConfigError, StateError

_ABI_VERSION = 4
_SH_INVALID = 1
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BF16_LEAN = 3
MAX_MOMENTS, MAX_NUMBERS, MAX_CONSTANTS = 2, 6, 12  # per optimizer
ALIGNMENT = 4096  # [Note: files]
_WRITABLE, _CREATE, _PREALLOCATE, _DIRECT = 1, 2, 4, 8


class UpdateSegment(NamedTuple):
    """The arguments of one step for one array of parameters.

    weight, low, grad, moment*, scale*  addresses in host memory; 0 for an array that the states
                                        (`stronghold.optim.states`) do not have
    numel                               elements of each array
    number*, flags                      those of the optimizer, in its order; see `stronghold.h`
    grad_scale                          multiplies the gradient
    step                                counts from 1

    A tuple, in the order and with the types of the C structure, because a step makes hundreds. Make
    it with keywords.
    """

    weight: int
    low: int
    grad: int
    numel: int
    moment0: int = 0
    moment1: int = 0
    scale0: int = 0
    scale1: int = 0
    number0: float = 0.0
    number1: float = 0.0
    number2: float = 0.0
    number3: float = 0.0
    number4: float = 0.0
    number5: float = 0.0
    grad_scale: float = 1.0
    step: int = 1
    flags: int = 0


class Target(NamedTuple):
    """The destinations of one segment's step: an address for each array that it writes.

    0, or the segment's address, means in place. Some arrays may be in place and others not. The
    step reads an array that is not in place from the segment's address, and does not change it. It
    writes all of the segment's elements of the target, and nothing before or after them. A target
    overlaps no other array of the call. [Note: targets] of `stronghold.h` has the whole contract.

    A tuple in the order of the C structure, which is that of `States.kernel_arrays`.
    """

    weight: int = 0
    low: int = 0
    moment0: int = 0
    moment1: int = 0
    scale0: int = 0
    scale1: int = 0


_C_TYPES = {int: np.int64, float: np.float64}


def _row_dtype(structure: type) -> np.dtype[Any]:
    """The NumPy dtype of a C structure. `library` checks its size."""
    hints = get_type_hints(structure)
    return np.dtype([(name, _C_TYPES[hint]) for name, hint in hints.items()])


_ROW = _row_dtype(UpdateSegment)
_TARGET_ROW = _row_dtype(Target)

Rows = npt.NDArray[Any]
"""Segments or targets as a NumPy structured array [segments], with their fields."""

Segments = Sequence[UpdateSegment] | Rows
Targets = Sequence[Target] | Rows
"""A target for each segment of a call."""


def rows(segments: Segments) -> Rows:
    """A copy of `segments` as rows. A field can be assigned for all rows at once."""
    return np.array(segments, dtype=_ROW)


def target_rows(targets: Targets, num_segments: int) -> Rows:
    """A copy of `targets` as rows. ConfigError unless there is one for each segment."""
    if len(targets) != num_segments:
        raise ConfigError(f"targets: got {len(targets)}, expected one for each of {num_segments}")
    return np.array(targets, dtype=_TARGET_ROW)


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


def check_targets(
    optimizer: str,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    fields: Rows,
    targets: Rows,
) -> None:
    """ConfigError if a target overlaps an array of its segment, or another target of the segment.

    Kernels outside this library call it, for exact states. A pool checks its own calls.
    """
    check(
        library().sh_check_targets(
            optimizer.encode(),
            _dtype_code(weight_dtype),
            _dtype_code(grad_dtype),
            fields.ctypes.data,
            targets.ctypes.data,
            len(fields),
        )
    )


CloseableT = TypeVar("CloseableT", bound="Closeable")


class Closeable:
    """Base of objects that are closed at the end of a `with`, or with their last reference."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: CloseableT) -> CloseableT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


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
        targets: Targets | None = None,
    ) -> Callable[[float | None], None]:
        """Prepare one step of the optimizer on every segment, in place or to `targets`.

        `stronghold.h` has the optimizers and their formulas. `lean` means bf16 weights with lean
        states.

        Returns the function that performs the step. Its argument is one scale of the gradients for
        all segments, or None: each segment's `grad_scale`.

        ConfigError, before anything is written, for a segment that breaks its contract.
        """

    def update(
        self,
        optimizer: str,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: Segments,
        *,
        lean: bool = False,
        targets: Targets | None = None,
    ) -> None:
        """Prepare a step and perform it, with each segment's `grad_scale`."""
        perform = self.prepare_update(
            optimizer, weight_dtype, grad_dtype, segments, lean=lean, targets=targets
        )
        perform(None)

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


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


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


# -- files ----------------------------------------------------------------------------------------
class _Region(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_int64))


class _File(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_int32),
        ("direct", ctypes.c_int32),
        ("preallocated", ctypes.c_int32),
    )


class IoFile:
    """An open file of a queue.

    `direct`: transfers go past the page cache (O_DIRECT). `preallocated`: its bytes are reserved on
    the disk. Both are False also if the file system refuses them.
    """

    __slots__ = ("_number", "direct", "path", "preallocated", "queue", "size")

    def __init__(self, queue: IoQueue, path: str, size: int, opened: _File) -> None:
        self.queue = queue
        self._number: int | None = opened.file
        self.path = path
        self.size = size
        self.direct = bool(opened.direct)
        self.preallocated = bool(opened.preallocated)

    @property
    def number(self) -> int:
        """The file's number in the C ABI."""
        if self._number is None:
            raise StateError(f"the file is closed: {self.path}")
        return self._number

    def close(self) -> None:
        """Wait for the file's operations and close it. Their tickets stay valid. Twice is
        harmless."""
        number, self._number = self._number, None
        if number is not None and not self.queue.closed:
            check(library().sh_io_close(self.queue.handle, number))

    def __enter__(self) -> IoFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class IoQueue(Closeable):
    """A queue of asynchronous reads and writes (swap in, swap out) of files.

    depth        blocks that it keeps in flight
    block_bytes  size of a block; larger operations are cut
    engine       "io_uring" or "threads"; OSError if the system refuses it. None:
                 STRONGHOLD_IO_ENGINE, else "io_uring" if the kernel permits it
    registered   (address, nbytes) of memory that stays mapped as long as the queue. The kernel need
                 not pin its pages for each transfer

    Close the queue when no other call is running.
    """

    __slots__ = ("_handle",)

    def __init__(
        self,
        depth: int,
        block_bytes: int,
        engine: str | None = None,
        registered: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._handle: int | None = None
        handle = ctypes.c_void_p()
        regions = (_Region * len(registered))(*(_Region(*region) for region in registered))
        name = None if engine is None else engine.encode()
        with naming_threads("an I/O queue"):
            check(
                library().sh_io_create(
                    depth, block_bytes, name, regions, len(registered), ctypes.byref(handle)
                )
            )
        self._handle = handle.value

    @property
    def engine(self) -> str:
        """ "io_uring" or "threads"."""
        name: bytes = library().sh_io_engine(self.handle)
        return name.decode()

    @property
    def registered(self) -> bool:
        """True if the kernel accepted the memory of `registered`."""
        return bool(library().sh_io_registered(self.handle))

    @property
    def note(self) -> str:
        """The reason for which io_uring or the registration of memory was refused; "" if none
        was."""
        note: bytes = library().sh_io_note(self.handle)
        return note.decode(errors="replace")

    @property
    def handle(self) -> int:
        """The `sh_io*`."""
        if self._handle is None:
            raise StateError("the I/O queue is closed")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def open(
        self,
        path: str | os.PathLike[str],
        size: int,
        *,
        writable: bool = True,
        create: bool = True,
        preallocate: bool = True,
        direct: bool = True,
    ) -> IoFile:
        """Open a file. Operations may touch its first `size` bytes.

        No file is truncated. A created file is the owner's alone (0600). ConfigError for a path
        with a NUL. With `preallocate`, OSError (ENOSPC) if the disk is too small; a created file
        may remain then.
        """
        flags = _DIRECT if direct else 0
        if writable:
            flags |= _WRITABLE
            flags |= _CREATE if create else 0
            flags |= _PREALLOCATE if preallocate else 0
        opened = _File()
        name = os.fspath(path)
        raw = os.fsencode(name)
        if b"\0" in raw:
            raise ConfigError(f"path: got a NUL character in {name!r}")
        check(library().sh_io_open(self.handle, raw, flags, size, ctypes.byref(opened)))
        return IoFile(self, name, size, opened)

    def read(
        self, file: IoFile, offset: int, address: int, nbytes: int, *, commit: bool = True
    ) -> int:
        """Submit a read into memory that stays valid until its end. Returns its ticket.

        With `commit=False` the next operation starts it, or `commit`, `wait` or `close`.
        """
        return self._submit("sh_io_read", file, commit, offset, address, nbytes)

    def write(
        self, file: IoFile, offset: int, address: int, nbytes: int, *, commit: bool = True
    ) -> int:
        """Submit a write from memory to the file. The memory must not change until its end.

        Returns its ticket. `commit` is that of `read`.
        """
        return self._submit("sh_io_write", file, commit, offset, address, nbytes)

    def commit(self) -> None:
        """Start the operations that were submitted with `commit=False`."""
        check(library().sh_io_commit(self.handle))

    def wait(self, ticket: int) -> float:
        """Wait until the operation has ended, and forget its ticket.

        Returns the seconds from its issue to its end. OSError, with the operation in words, if it
        failed (ENODATA if the file ends too early). Then the contents of its memory, or of its
        range of the file, are undefined.
        """
        seconds = ctypes.c_double()
        check(library().sh_io_wait(self.handle, ticket, ctypes.byref(seconds)))
        return seconds.value

    def close(self) -> None:
        """Start all submitted operations, wait for their end, and close the files."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().sh_io_destroy(handle)

    def _submit(self, function: str, file: IoFile, commit: bool, *arguments: int) -> int:
        """Call a function of the C ABI that submits an operation. Returns the ticket.

        ConfigError for a file of another queue.
        """
        if file.queue is not self:
            raise ConfigError(f"the file was opened by another queue: {file.path}")
        ticket = ctypes.c_int64()
        call = getattr(library(), function)
        check(call(self.handle, file.number, *arguments, ctypes.byref(ticket)))
        if commit:
            self.commit()
        return ticket.value


# -- the library ----------------------------------------------------------------------------------
@contextlib.contextmanager
def naming_threads(whose: str) -> Iterator[None]:
    """Context manager around the start of threads, for a clear error if the system refuses one.

    The OSError (EAGAIN) names the owner of the thread. The system's message is only "Resource
    temporarily unavailable", and Python's names no cause.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        is_refused = isinstance(error, OSError) and error.errno == errno.EAGAIN
        is_pythons = type(error) is RuntimeError  # Python's error is no subclass
        if not is_refused and not is_pythons:
            raise
        raise OSError(
            errno.EAGAIN,
            f"{whose}: the system refused to start a thread ({error}). Raise the limit on "
            "processes and threads (ulimit -u, pids.max of the container), or end others of this "
            "user's",
        ) from error


def check(status: int) -> None:
    """Raise the error that a call of the C ABI reports: `ConfigError`, or `OSError` with errno."""
    if status == 0:
        return
    message = library().sh_last_error().decode(errors="replace")
    if status == _SH_INVALID:
        raise ConfigError(message)
    number = library().sh_last_errno()
    raise OSError(number, message) if number else OSError(message)


@functools.cache
def library() -> ctypes.CDLL:
    """Load libstronghold and declare its functions. StateError if it is of another version."""
    loaded = ctypes.CDLL(str(_library_path()))
    address, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    text = ctypes.c_char_p
    transfer = [address, int32, int64, address, int64, address]
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "sh_last_error": (text, []),
        "sh_last_errno": (int32, []),
        "sh_abi_version": (int32, []),
        "sh_segment_bytes": (int64, []),
        "sh_target_bytes": (int64, []),
        "sh_isa_at": (text, [int32]),
        "sh_optimizer_at": (text, [int32]),
        "sh_pool_create": (int32, [int32, address, int32, text, address]),
        "sh_pool_destroy": (None, [address]),
        "sh_pool_isa": (text, [address]),
        "sh_update": (int32, [address, text, int32, int32, address, address, int64]),
        "sh_check_targets": (int32, [text, int32, int32, address, address, int64]),
        "sh_update_traffic": (int32, [address, text, int32, int32, address, address, int64]),
        "sh_update_prefetch": (int32, [address, text, int32, int32, address]),
        "sh_update_constants": (int32, [text, address, int64, address, address]),
        "sh_accumulate": (int32, [address, int32, address, int64]),
        "sh_sum_squares": (int32, [address, int32, address, int64, address]),
        "sh_io_create": (int32, [int32, int64, text, address, int32, address]),
        "sh_io_destroy": (None, [address]),
        "sh_io_engine": (text, [address]),
        "sh_io_registered": (int32, [address]),
        "sh_io_note": (text, [address]),
        "sh_io_open": (int32, [address, text, int32, int64, address]),
        "sh_io_close": (int32, [address, int32]),
        "sh_io_read": (int32, transfer),
        "sh_io_write": (int32, transfer),
        "sh_io_commit": (int32, [address]),
        "sh_io_wait": (int32, [address, int64, address]),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise _of_another_version(loaded) from None
        function.restype = result
        function.argtypes = arguments
    sizes = loaded.sh_segment_bytes(), loaded.sh_target_bytes()
    if loaded.sh_abi_version() != _ABI_VERSION or sizes != (_ROW.itemsize, _TARGET_ROW.itemsize):
        raise _of_another_version(loaded)
    return loaded


def _of_another_version(loaded: ctypes.CDLL) -> StateError:
    return StateError(f"{loaded._name} is of another version than {__file__}; repeat `pip install`")


def _library_path() -> Path:
    # An editable install keeps the built library beside site-packages, not beside this file. The
    # package's search path has both.
    package = sys.modules["stronghold"]
    for root in package.__path__:
        path = Path(root) / "_native" / "libstronghold.so"
        if path.exists():
            return path
    raise ConfigError(
        "stronghold's compiled kernels are missing: install the package with "
        "`pip install .` (or `pip install -e .`), which needs a C++ compiler"
    )
