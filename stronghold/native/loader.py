"""Loads libstronghold, declares its functions, and turns its status codes into exceptions.

Any thread may enter. A call of the library releases the interpreter lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from stronghold.errors import ConfigError, ErrorPage, StateError
from stronghold.native.segments import ROW, TARGET_ROW

_ABI_VERSION = 9
_SH_INVALID = 1
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


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


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
        "sh_update_traffic": (int32, [address, text, int32, int32, address, address, int64]),
        "sh_update_prefetch": (int32, [address, text, int32, int32, address]),
        "sh_update_constants": (int32, [text, address, int64, address, address]),
        "sh_touch": (None, [address, int64]),
        "sh_store": (None, [address, int64]),
        "sh_load": (int64, [address]),
        "sh_accumulate": (int32, [address, int32, address, int64]),
        "sh_sum_squares": (int32, [address, int32, address, int64, address]),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise _of_another_version(loaded) from None
        function.restype = result
        function.argtypes = arguments
    sizes = loaded.sh_segment_bytes(), loaded.sh_target_bytes()
    rows = ROW.itemsize, TARGET_ROW.itemsize
    if loaded.sh_abi_version() != _ABI_VERSION or sizes != rows:
        raise _of_another_version(loaded)
    return loaded


def _of_another_version(loaded: ctypes.CDLL) -> StateError:
    return StateError(
        f"{loaded._name} is of another version than {__file__}; repeat `pip install`",
        page=ErrorPage.KERNELS,
    )


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
        "`pip install .` (or `pip install -e .`), which needs a C++ compiler",
        page=ErrorPage.KERNELS,
    )
