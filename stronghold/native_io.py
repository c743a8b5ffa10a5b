"""Asynchronous file I/O of `kernels/`, for Python: queues, files and tickets by address.

Owns queues and their open files, never memory, paths or what lies where in a file. A queue has
threads of its own (in C, invisible to Python) that transfer without anybody's waiting. Any thread
may enter; a ticket is waited for by one. The interpreter lock is released in every call, so a
waiting thread stops nobody.

Offsets, lengths, addresses and sizes are multiples of `ALIGNMENT`. Operations may overtake each
other, also on the same bytes: wait where order counts. `kernels/include/stronghold_io.h` has the
whole contract.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

from stronghold.errors import ConfigError, StateError
from stronghold.native import Closing, check, declare, library, naming_threads

ALIGNMENT = 4096
_WRITABLE, _CREATE, _PREALLOCATE, _DIRECT = 1, 2, 4, 8


class _Region(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_int64))


class _File(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_int32),
        ("direct", ctypes.c_int32),
        ("preallocated", ctypes.c_int32),
    )


class IoFile:
    """An open file of a queue; `IoQueue.open` makes it.

    `direct`: transfers go past the page cache. False where that was not asked for, and where the
    file system cannot (tmpfs, some overlays and network mounts). `preallocated`: its bytes are
    reserved on the disk; False also where the file system refused that.
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
        """Waits for the operations on it; their tickets stay valid. Twice is harmless."""
        number, self._number = self._number, None
        if number is not None and not self.queue.closed:
            check(_library().sh_io_close(self.queue.handle, number))

    def __enter__(self) -> IoFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class IoQueue(Closing):
    """Keeps up to `depth` blocks in flight; cuts larger operations into `block_bytes`.

    `engine` is "io_uring" or "threads"; without it the environment variable STRONGHOLD_IO_ENGINE
    decides, and else "io_uring" where the kernel permits it. A named engine that is refused raises
    `OSError`. `registered` lists (address, nbytes) of memory that stays mapped as long as the
    queue: requests inside it spare the kernel the pinning of their pages. Close it when no other
    call is running.
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
                _library().sh_io_create(
                    depth, block_bytes, name, regions, len(registered), ctypes.byref(handle)
                )
            )
        self._handle = handle.value

    @property
    def engine(self) -> str:
        """ "io_uring" or "threads"."""
        name: bytes = _library().sh_io_engine(self.handle)
        return name.decode()

    @property
    def registered(self) -> bool:
        """Whether the kernel took the memory that was to be registered."""
        return bool(_library().sh_io_registered(self.handle))

    @property
    def note(self) -> str:
        """Why io_uring or the registration of memory was refused; "" when nothing was."""
        note: bytes = _library().sh_io_note(self.handle)
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
        """Opens a file of which operations may touch the first `size` bytes.

        `writable=False` opens it for reading and ignores `create` and `preallocate`. A created
        file is the owner's alone (0600); none is truncated or shortened. With `preallocate` a disk
        too small is an `OSError` (ENOSPC) here, which may leave a created file behind. See
        `IoFile.direct` and `IoFile.preallocated` for what was granted.
        """
        flags = _DIRECT if direct else 0
        if writable:
            flags |= _WRITABLE | (_CREATE if create else 0) | (_PREALLOCATE if preallocate else 0)
        opened, name = _File(), os.fspath(path)
        raw = os.fsencode(name)
        if b"\0" in raw:
            raise ConfigError(f"path: got a NUL character in {name!r}")
        check(_library().sh_io_open(self.handle, raw, flags, size, ctypes.byref(opened)))
        return IoFile(self, name, size, opened)

    def read(
        self, file: IoFile, offset: int, address: int, nbytes: int, *, commit: bool = True
    ) -> int:
        """Submits a read from the file into memory; returns its ticket.

        The memory must stay valid until the operation has ended. With `commit=False` it is started
        by the next operation with it, by `commit`, `wait`, `poll` or `close`: one wake-up for many.
        """
        return self._submit("sh_io_read", file, commit, offset, address, nbytes)

    def write(
        self, file: IoFile, offset: int, address: int, nbytes: int, *, commit: bool = True
    ) -> int:
        """Submits a write from memory to the file; the memory must not change until its end."""
        return self._submit("sh_io_write", file, commit, offset, address, nbytes)

    def sync(self, file: IoFile, *, data_only: bool = True, commit: bool = True) -> int:
        """Submits an fdatasync (or fsync) after all that was submitted to the file before it."""
        return self._submit("sh_io_sync", file, commit, int(data_only))

    def commit(self) -> None:
        """Starts what was submitted with `commit=False`."""
        check(_library().sh_io_commit(self.handle))

    def poll(self) -> list[int]:
        """Tickets of operations that have ended, well or badly, and were not waited for yet.

        Returns at once; `wait` for a listed ticket does too, and raises what went wrong.
        """
        count, capacity = ctypes.c_int64(), 64
        while True:
            tickets = (ctypes.c_int64 * capacity)()
            check(_library().sh_io_poll(self.handle, tickets, capacity, ctypes.byref(count)))
            if count.value <= capacity:
                return sorted(tickets[: count.value])
            capacity = 2 * count.value

    def wait(self, ticket: int) -> float:
        """Waits until the operation has ended and forgets it; seconds from its issue to its end.

        Raises `OSError` when it failed: the errno (ENODATA where the file ends too early), and in
        words the operation, length, offset and path. Nothing of it is in flight then, and what its
        memory (of a read) or its range of the file (of a write) holds is undefined.
        """
        seconds = ctypes.c_double()
        check(_library().sh_io_wait(self.handle, ticket, ctypes.byref(seconds)))
        return seconds.value

    def close(self) -> None:
        """Starts and awaits everything that was submitted, and closes the files."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _library().sh_io_destroy(handle)

    def _submit(self, function: str, file: IoFile, commit: bool, *arguments: int) -> int:
        if file.queue is not self:
            raise ConfigError(f"the file was opened by another queue: {file.path}")
        ticket = ctypes.c_int64()
        call = getattr(_library(), function)
        check(call(self.handle, file.number, *arguments, ctypes.byref(ticket)))
        if commit:
            self.commit()
        return ticket.value


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = library()
    address, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    transfer = [address, int32, int64, address, int64, address]
    declare(
        loaded,
        {
            "sh_io_create": (int32, [int32, int64, ctypes.c_char_p, address, int32, address]),
            "sh_io_destroy": (None, [address]),
            "sh_io_engine": (ctypes.c_char_p, [address]),
            "sh_io_registered": (int32, [address]),
            "sh_io_note": (ctypes.c_char_p, [address]),
            "sh_io_open": (int32, [address, ctypes.c_char_p, int32, int64, address]),
            "sh_io_close": (int32, [address, int32]),
            "sh_io_read": (int32, transfer),
            "sh_io_write": (int32, transfer),
            "sh_io_sync": (int32, [address, int32, int32, address]),
            "sh_io_commit": (int32, [address]),
            "sh_io_poll": (int32, [address, address, int64, address]),
            "sh_io_wait": (int32, [address, int64, address]),
        },
    )
    return loaded
