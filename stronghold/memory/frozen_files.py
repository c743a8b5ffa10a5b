"""Frozen weights in files that no run writes: the files of a prepared base.

`FrozenFiles` is the store of the layers whose frozen weights lie in a base. It has three places:

1. A layer's trainable ranges come first in its array of weights. They lie in memory of the store.
2. The frozen ranges lie in the base's files. Each pass reads them there. They take no room on the
   disk and wear nothing. Any number of processes may read one file.
3. All other arrays lie in the engine's spill files (`memory.nvme`), if it has some.

So these layers' weights cause no write at all. A layer's memory and its ranges in files are mapped
side by side: that is the layer at rest.

Owns the descriptors and the queue of the base's files. So the files may be renamed, replaced or
removed while the store is open. A piece lies in one range (`memory.tiers`, [Note: a piece]), so
each transfer has one place. Any thread may submit and wait, several at once. Callers order reads
and writes of the same bytes.

[Note: changed files] The base belongs to all runs, and a run that writes it changes the weights of
the others:
    1. The store opens the files for reading alone. A write of frozen bytes is a StateError.
    2. Mappings are private: a program's write to a parameter at rest copies the page. `restore`
       drops the copy.
    3. Another process may shorten a file, or write to it. A read past the end would fail, but a
       read of new bytes would not. So the store compares size and time of the last change before
       each transfer, which takes a microsecond.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Mapping, Sequence

import torch

from stronghold.errors import StateError, format_size
from stronghold.memory.nvme import (
    BLOCK_BYTES,
    DEPTH,
    InFlight,
    PendingTransfer,
    check_range,
    open_queue,
)
from stronghold.memory.slab import NO_FILE, MappedPart, discard_changes, map_files
from stronghold.memory.stores import Extent, Store, Transfer, Verb
from stronghold.model.file_ranges import FileRange, FrozenFile
from stronghold.native import IoFile, IoQueue

WEIGHTS = "weights"

logger = logging.getLogger("stronghold")


class _OpenFile:
    """One open file of a base."""

    def __init__(self, file: FrozenFile, queue: IoQueue) -> None:
        self._file = file
        self.io: IoFile = queue.open(file.opened, file.num_bytes, writable=False)
        self.descriptor = os.open(file.opened, os.O_RDONLY | os.O_CLOEXEC)
        self._modified_ns = os.fstat(self.descriptor).st_mtime_ns

    def check(self, what: str) -> None:
        """Raise `OSError` if the file changed since it was opened ([Note: changed files])."""
        status = os.fstat(self.descriptor)
        if status.st_size < self._file.num_bytes:
            raise OSError(
                errno.ENODATA,
                f"{what}: the prepared base was truncated during the run, to {status.st_size} of "
                f"{self._file.num_bytes} bytes",
                self._file.path,
            )
        if status.st_mtime_ns != self._modified_ns:
            raise OSError(
                errno.ESTALE,
                f"{what}: the prepared base was written to during the run, so its weights may be "
                "others now. Prepare it again",
                self._file.path,
            )

    def close(self) -> None:
        os.close(self.descriptor)


class _Copied:
    """A transfer between two places in memory: it has ended when it was submitted."""

    def wait(self) -> None:
        """Return at once."""


class FrozenFiles:
    """The store of files of an engine over a prepared base.

    spilled      the store of all other arrays. It is closed with this store
    ranges       by layer: its frozen ranges, in order, up to the end of its array of weights
    staging      memory that transfers use again and again, which the kernel registers
    engine, depth, block_bytes  as in `NvmeStore`

    `bytes_read` counts both kinds of files. `bytes_written` and `file_bytes` are those of
    `spilled`: the base is not the engine's. Raises `OSError` if a file of the base cannot be opened
    or mapped.
    """

    def __init__(
        self,
        spilled: Store,
        ranges: Mapping[int, Sequence[FileRange]],
        *,
        staging: torch.Tensor | None = None,
        engine: str | None = None,
        depth: int | None = None,
        block_bytes: int | None = None,
    ) -> None:
        self._process = os.getpid()
        self._spilled = spilled
        self._ranges = {layer: tuple(of_layer) for layer, of_layer in ranges.items()}
        self._in_flight = InFlight()
        self._is_closed = False
        self._files: dict[FrozenFile, _OpenFile] = {}
        registered = []
        if staging is not None and staging.nbytes:
            registered.append((staging.data_ptr(), staging.nbytes))
        with contextlib.ExitStack() as undo:
            undo.callback(spilled.close)
            queue = open_queue(depth or DEPTH, block_bytes or BLOCK_BYTES, engine, registered)
            undo.callback(queue.close)
            self._queue: IoQueue = queue
            for of_layer in self._ranges.values():
                for file_range in of_layer:
                    self._open(file_range.file, undo)
            self._mapped = {layer: self._map(layer) for layer in self._ranges}
            self._stack = undo.pop_all()
        self._report()

    def _open(self, file: FrozenFile, undo: contextlib.ExitStack) -> None:
        if file not in self._files:
            self._files[file] = opened = _OpenFile(file, self._queue)
            undo.callback(opened.close)

    def _report(self) -> None:
        num_bytes = sum(
            file_range.num_stored for of_layer in self._ranges.values() for file_range in of_layer
        )
        logger.info(
            "the frozen weights of %d layers (%s) are read from the prepared base in each pass, "
            "and never written",
            len(self._ranges),
            format_size(num_bytes),
        )
        cached = [file.path for file, opened in self._files.items() if not opened.io.direct]
        if cached:
            logger.warning(
                "no O_DIRECT for %s: reads of the prepared base pass through the page cache, which "
                "takes RAM and time. Put the base on a local disk",
                ", ".join(cached),
            )

    def close(self) -> None:
        """Finish what was submitted, close the base's files, and free the spilled bytes.

        Safe to call twice. It does nothing in a forked child. No other call may be running.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._stack.close()
        self._in_flight.clear()
        self._mapped.clear()

    @property
    def bytes_read(self) -> int:
        return self._spilled.bytes_read + self._in_flight.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._spilled.bytes_written

    @property
    def file_bytes(self) -> int:
        return self._spilled.file_bytes

    def submit(self, verb: Verb, extent: Extent, begin: int, memory: torch.Tensor) -> Transfer:
        """Start a transfer as `NvmeStore.submit` does, from or to the place of the bytes.

        Bytes in memory are copied before the call returns, and count as no transfer.

        Raises StateError for a write of frozen bytes, and for bytes of two places. Raises `OSError`
        for a file that changed ([Note: changed files]).
        """
        ranges = self._frozen_ranges(extent)
        if not ranges:
            return self._spilled.submit(verb, extent, begin, memory)
        if self._is_closed:
            raise StateError(f"{verb} of {extent}: the files of the prepared base are closed")
        check_range(verb, extent, begin, memory)
        end = begin + memory.nbytes
        if end <= ranges[0].begin:
            return self._copy(verb, self._mapped[extent.layer][begin:end], memory)
        file_range = _range_of(ranges, begin, end)
        if verb == "write" or file_range is None:
            raise StateError(
                f"{verb} of bytes {begin} to {end} of {extent}: expected a read of one of the "
                f"ranges {[(r.begin, r.end) for r in ranges]}, which lie in a prepared base"
            )
        return self._read(extent, file_range, begin, memory)

    @staticmethod
    def _copy(verb: Verb, stored: torch.Tensor, memory: torch.Tensor) -> _Copied:
        caller_bytes = memory.view(-1).view(torch.uint8)
        if verb == "read":
            caller_bytes.copy_(stored)
        else:
            stored.copy_(caller_bytes)
        return _Copied()

    def _read(
        self, extent: Extent, file_range: FileRange, begin: int, memory: torch.Tensor
    ) -> PendingTransfer:
        position = begin - file_range.begin
        offset = file_range.offset + position
        num_stored = max(0, min(memory.nbytes, file_range.num_stored - position))
        opened = self._files[file_range.file]
        opened.check(f"read of {num_stored} bytes at offset {offset}, {extent}")
        padding = memory.view(-1).view(torch.uint8)[num_stored:]
        padding.zero_()
        pending = PendingTransfer(self._in_flight, "read", memory)
        self._in_flight.add(pending)
        if num_stored:
            try:
                ticket = self._queue.read(opened.io, offset, memory.data_ptr(), num_stored)
            except BaseException:
                self._in_flight.remove(pending)
                raise
            pending.tickets.append((self._queue, ticket))
            pending.nbytes = num_stored
        return pending

    def _frozen_ranges(self, extent: Extent) -> tuple[FileRange, ...]:
        """The extent's frozen ranges. Empty for an array that lies in the spill files."""
        return self._ranges.get(extent.layer, ()) if extent.array == WEIGHTS else ()

    def mapped(self, extent: Extent) -> torch.Tensor:
        """Return the array as flat bytes, valid also after `close`.

        A layer's trainable ranges are the store's memory. Writes of frozen ranges stay in this
        process, until `restore`.
        """
        if not self._frozen_ranges(extent):
            return self._spilled.mapped(extent)
        self.check()
        return self._mapped[extent.layer]

    def _map(self, layer: int) -> torch.Tensor:
        """Map a layer's weights: memory for its trainable ranges, and its ranges in files."""
        ranges = self._ranges[layer]
        parts = [MappedPart(descriptor=NO_FILE, offset=0, nbytes=ranges[0].begin)]
        for file_range in ranges:
            opened = self._files[file_range.file]
            parts.append(
                MappedPart(
                    descriptor=opened.descriptor,
                    offset=file_range.offset,
                    nbytes=file_range.num_stored,
                    is_private=True,
                )
            )
            num_padding = file_range.end - file_range.begin - file_range.num_stored
            parts.append(MappedPart(descriptor=NO_FILE, offset=0, nbytes=num_padding))
        return map_files(parts, f"the weights of layer {layer} in {ranges[0].file.path}")

    def restore(self, layer: int) -> None:
        """Drop what a program wrote into the frozen bytes of a layer at rest.

        They show the file's bytes again. No operation may read them meanwhile.
        """
        discard_changes(self._mapped[layer][self._ranges[layer][0].begin :])

    def check(self) -> None:
        """Raise `OSError` if a file was truncated: to read its mapping would end the process.

        Raises it also if a file of the base was written to.
        """
        self._spilled.check()
        for opened in self._files.values():
            opened.check("mapping")


def _range_of(ranges: Sequence[FileRange], begin: int, end: int) -> FileRange | None:
    """The range that has the bytes [begin, end), or None."""
    for file_range in ranges:
        if file_range.begin <= begin and end <= file_range.end:
            return file_range
    return None
