"""Spill file: one file on one disk, its queue for reading and its queue for writing.

Owns the open file, both queues and the file's length; never what lies where in it, nor the memory
of transfers. Any thread may submit; a ticket is waited for at its queue.

[Note: unlinked] Each file is unlinked as soon as it is open. Its bytes then belong to this process:
nobody else opens, truncates or copies them by name, and the kernel frees them however the process
ends, without waiting for the next run to tidy up. The price is that `du` and `ls` do not show them
(`df` does, and the directory's owner file says whose they are), and that a checkpoint reads them
through the store; a link would be wrong anyway, because the files change in place. What a crash
between open and unlink leaves, and what network file systems keep of unlinked files, lies in the
run's directory, which the next run reclaims.

[Note: truncation] A file that was shortened (through /proc) must not come back as zeros: a read
past its end fails, but a later write at its end would fill the gap with zeros, and weights would
change silently. So its length is looked at before every transfer, for a microsecond.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stronghold.memory import disks
from stronghold.memory.extents import Segment
from stronghold.native_io import IoFile, IoQueue

Verb = Literal["read", "write"]


class SpillFile:
    """A file of `nbytes` in the run's directory `folder`: created, reserved, opened for each
    direction, unlinked ([Note: unlinked]).

    Each direction keeps up to `depth` blocks of `block_bytes` in flight; `engine` and `registered`
    as in `IoQueue`. BudgetError where the disk is full, ConfigError where the kernel refuses
    `engine`, `OSError` where the system refuses otherwise.
    `direct` and `preallocated` say what was granted, as in `IoFile`.
    """

    def __init__(
        self,
        folder: Path,
        nbytes: int,
        *,
        depth: int,
        block_bytes: int,
        engine: str | None,
        registered: Sequence[tuple[int, int]],
    ) -> None:
        self.folder = folder
        self.path = folder / "spill"
        self.nbytes = nbytes
        with contextlib.ExitStack() as undo:
            queues = [disks.open_queue(depth, block_bytes, engine, registered) for _ in range(2)]
            for queue in queues:
                undo.callback(queue.close)
            self._reading, self._writing = queues
            written = self._create()
            read = self._reading.open(self.path, nbytes, writable=False)
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)  # to look at and to map
            undo.callback(os.close, self.descriptor)
            with contextlib.suppress(OSError):  # where open files have names: it goes with `folder`
                self.path.unlink()
            self._close = undo.pop_all()
        self.direct = written.direct
        self.preallocated = written.preallocated
        self._sides: dict[Verb, tuple[IoQueue, IoFile]] = {
            "read": (self._reading, read),
            "write": (self._writing, written),
        }

    def _create(self) -> IoFile:
        free = disks.free_bytes(self.folder)
        try:
            return self._writing.open(self.path, self.nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = min(free, self.nbytes)  # others may have written since
            raise disks.no_space([self.folder.parent], self.nbytes, free) from error

    @property
    def registered(self) -> bool:
        """Whether the kernel took the memory that was to be registered."""
        return self._reading.registered and self._writing.registered

    @property
    def engine(self) -> str:
        """The engine, and why it is not io_uring with registered memory where it is not."""
        note = self._writing.note
        return f"{self._writing.engine} ({note})" if note else self._writing.engine

    def submit(self, verb: Verb, segment: Segment, address: int) -> tuple[IoQueue, int]:
        """Submit the segment of a transfer whose memory begins at `address`, without starting it:
        the caller commits. Its queue and ticket."""
        queue, file = self._sides[verb]
        start = queue.read if verb == "read" else queue.write
        ticket = start(file, segment.offset, address + segment.begin, segment.nbytes, commit=False)
        return queue, ticket

    def check_length(self, verb: str, segment: Segment) -> None:
        """`OSError` when the file was truncated ([Note: truncation])."""
        length = os.fstat(self.descriptor).st_size
        if length < self.nbytes:
            raise OSError(
                errno.ENODATA,
                f"{verb} of {segment.nbytes} bytes at offset {segment.offset}: the file was "
                f"truncated during the run, to {length} of {self.nbytes} bytes",
                str(self.path),
            )

    def close(self) -> None:
        """Finish what was submitted and give the file's bytes back. Twice is harmless."""
        self._close.close()
