"""Asynchronous files of the C ABI: queues, files and tickets.

[Note: files]

1. A queue has C threads, which Python does not see. They transfer blocks while no caller waits.
2. An operation returns a ticket. One thread waits for a ticket.
3. Offsets, lengths, addresses and sizes are multiples of `ALIGNMENT`.
4. Operations may overtake each other, also on the same bytes. The caller waits if order counts.

`kernels/include/stronghold_io.h` has the whole contract.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from stronghold.errors import ConfigError, StateError
from stronghold.native.loader import Closeable, check, library, naming_threads

ALIGNMENT = 4096  # [Note: files]
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
