"""Files for the arrays that RAM has no room for: one space of bytes, striped over the folders.

[Note: past the page cache]
1. A transfer goes past the page cache (O_DIRECT), if the file system can do that. Else it goes
   through the page cache.
2. A mapping shows the same bytes. The kernel writes the changed pages of a mapping back before a
   transfer, and drops the pages that a transfer has written.
3. The kernel does not order a mapping's access and a transfer at the same time. So a mapping is
   read and written while no transfer of these bytes is queued.

[Note: without a name] A file loses its name when it is made. No other process can open or cut it,
and the kernel frees its bytes however the process ends. `df` shows them, `ls` and `du` do not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from stronghold.devices.threads import Workers
from stronghold.errors import BudgetError, ConfigError, ErrorPage, format_size
from stronghold.optim.states import PAGE_BYTES
from stronghold.train.slabs import MappedPart, map_files

logger = logging.getLogger("stronghold")

# Reads, writes, and both at once had the rate of io_uring. With blocks of 1 MiB they had 0.90 to
# 0.95 of it. The disk read 2.8 GB/s and wrote 6 GB/s.
NUM_THREADS, BLOCK_BYTES = 8, 4 << 20
# Neighbouring bytes on one of several disks. Each unit of mapped weights takes one of the 65,530
# mappings that a process may have.
UNIT_BYTES = 8 << 20
PATH_KEY = "stronghold.nvme.path"

Transfer = tuple[int, Tensor]
"""The first byte in the space, and the memory. Both begin at a page, and have whole pages."""


class Extent(NamedTuple):
    """Neighbouring bytes of one file. `begin`: where they lie in the bytes that were asked for."""

    file: int
    offset: int
    begin: int
    num_bytes: int


class Files:
    """A space of `num_bytes`, in one file for each of `folders`, unit by unit in turn (round
    robin). Bytes that were never written are zeros.

    Raises BudgetError if a disk is too small, and ConfigError for a folder in which no file can be
    made.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]], num_bytes: int) -> None:
        self.folders = [Path(folder) for folder in folders]
        self._unit_bytes = UNIT_BYTES if len(folders) > 1 else max(num_bytes, PAGE_BYTES)
        row_bytes = self._unit_bytes * len(folders)
        file_bytes = -(-num_bytes // row_bytes) * self._unit_bytes
        with contextlib.ExitStack() as undo:
            self._descriptors = [_open(folder, file_bytes, undo) for folder in self.folders]
            self._pool = undo.enter_context(Workers("files", NUM_THREADS))
            self._close = undo.pop_all()

    @property
    def is_direct(self) -> bool:
        """True if transfers go past the page cache."""
        flags = (fcntl.fcntl(descriptor, fcntl.F_GETFL) for descriptor in self._descriptors)
        return all(one & os.O_DIRECT for one in flags)

    # -- transfers --------------------------------------------------------------------------------
    def read(self, transfers: Sequence[Transfer]) -> None:
        """Fill each memory. Blocks a lane's thread until all transfers have ended. Raises `OSError`
        with the folder, the offset and the size of one that failed."""
        self._transfer("read", os.preadv, transfers)

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Write each memory. Blocks and raises as `read`."""
        self._transfer("write", os.pwritev, transfers)

    def _transfer(self, verb: str, call: Callable[..., int], transfers: Sequence[Transfer]) -> None:
        blocks = []
        for begin, memory in transfers:
            view = memory.numpy().data
            for extent in self._extents(begin, memory.nbytes):
                of_extent = view[extent.begin : extent.begin + extent.num_bytes]
                for first in range(0, extent.num_bytes, BLOCK_BYTES):
                    block = of_extent[first : first + BLOCK_BYTES]
                    place = extent.file, extent.offset + first
                    blocks.append(self._pool.submit(self._move, verb, call, *place, block))
        # All end before the first error is raised: then nothing uses the memory any more.
        for error in [block.exception() for block in blocks]:
            if error is not None:
                raise error

    def _move(
        self, verb: str, call: Callable[..., int], file: int, offset: int, block: memoryview
    ) -> None:
        """Work of a thread of the pool: one block."""
        done = 0
        try:
            while done < len(block):
                moved = call(self._descriptors[file], [block[done:]], offset + done)
                if not moved:
                    raise OSError(errno.ENODATA, "the file ends before")
                done += moved
        except OSError as error:
            what = f"{verb} of {len(block)} bytes at offset {offset}: {error.strerror}"
            raise OSError(error.errno, what, str(self.folders[file])) from error

    def _extents(self, begin: int, num_bytes: int) -> Iterator[Extent]:
        """The places of bytes of the space in the files, in order."""
        first, end = begin, begin + num_bytes
        while first < end:
            unit, within = divmod(first, self._unit_bytes)
            row, file = divmod(unit, len(self.folders))
            size = min(self._unit_bytes - within, end - first)
            yield Extent(file, row * self._unit_bytes + within, first - begin, size)
            first += size

    # -- as memory --------------------------------------------------------------------------------
    def map(self, begin: int, num_bytes: int) -> Tensor:
        """Whole pages of the space as a flat uint8 tensor, valid also after `close` ([Note: past
        the page cache]). Raises `OSError` if the file system cannot map files."""
        extents = [
            MappedPart(descriptor=self._descriptors[file], offset=offset, nbytes=size)
            for file, offset, _, size in self._extents(begin, num_bytes)
        ]
        return map_files(extents, f"a file in {', '.join(map(str, self.folders))}")

    def close(self) -> None:
        """End the threads, and free the bytes that nothing maps. No transfer may be under way."""
        self._close.close()


def _open(folder: Path, num_bytes: int, undo: contextlib.ExitStack) -> int:
    """Make a file of `num_bytes` in `folder` ([Note: without a name]), and return its descriptor,
    which `undo` closes."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="stronghold-", dir=folder)
        undo.callback(os.close, descriptor)
        os.unlink(name)
        os.posix_fallocate(descriptor, 0, max(num_bytes, PAGE_BYTES))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(
                f'{PATH_KEY}: no file can be made in "{folder}": {error.strerror}. Name a '
                "directory on a local disk that you may write"
            ) from error
        undo.close()  # it gives back what it got
        status = os.statvfs(folder)
        free = format_size(status.f_bavail * status.f_frsize)
        raise BudgetError(
            f"{PATH_KEY}: what lies in files needs {format_size(num_bytes, round_up=True)} in "
            f'"{folder}", and the disk has {free} free. Free some, add a path on another disk, or '
            "give more to stronghold.host_memory, so that less lies in files",
            need_bytes=num_bytes,
            page=ErrorPage.DISK,
        ) from error
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        logger.warning(
            "no O_DIRECT in %s: transfers pass through the page cache, which takes RAM and time. "
            "Name a local disk in %s",
            folder,
            PATH_KEY,
        )
    return descriptor
