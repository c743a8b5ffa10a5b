"""The NVMe store: the files that hold state beyond RAM.

Owns the layout of extents in the files, and the open files with their queues. Before the run it
checks the disks: whether they can hold the files, and how fast they are. Never knows when an array
is used: callers order reads and writes of the same bytes by fences. Any thread may submit and wait,
several at once. Reads and writes have queues of their own, so that neither waits behind the other.

[Note: striping] All extents lie one after another in one linear space.
    1. The space is cut into units.
    2. The units go around the files in a fixed order that repeats (a period). A file of twice the
       rate has twice the units of a period, spread evenly.
    3. Units of one file are neighbours in it, without gaps.
So all disks transfer any long range at once, and each does its share in the same time. A single
file is simply the space itself.

[Note: unlinked] Each file is unlinked before it takes a block of the disk.
    1. The store creates the file, opens it for each direction, and unlinks it.
    2. The store reserves the file's blocks.
    3. No other process can open, truncate or copy the file by name.
    4. The kernel frees the bytes however the process ends. A forked child that lives on holds them
       until it ends.
A crash between creation and unlink leaves a name without bytes. The price: `du` and `ls` do not
show the files (`df` does), and a checkpoint reads them through the store. A hard link would not
help, because the files change in place.

[Note: truncation] Another process may shorten a file through /proc. Weights would then change
silently:
    1. A read past the file's end fails.
    2. But a later write at its end fills the gap with zeros.
So the store checks the file's length before every transfer, which takes a microsecond.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from stronghold.errors import BudgetError, ConfigError, ErrorPage, StateError, format_size
from stronghold.memory.neighbours import ALONE, Neighbours
from stronghold.memory.slab import MappedPart, map_files, map_slab
from stronghold.memory.stores import Extent, Verb
from stronghold.native import ALIGNMENT, Closeable, IoFile, IoQueue

PATH_KEY = "stronghold.nvme.path"
ENGINE_KEY = "stronghold.nvme.engine"
# tens of milliseconds of an NVMe disk, half a second of a spinning one
PROBE_BYTES = 64 << 20

# -- extents and stripes ---------------------------------------------------------------------------
# Units of a period: rates are matched to a 64th. Two paths of equal disks, measured a few percent
# apart, then differ by a unit or two, which costs as many percent.
PERIOD_UNITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSegment:
    """Neighbouring bytes of one file that belong to a range of the linear space.

    `file`: number of the file. `offset`: first byte in the file. `begin`: first byte in the range.
    """

    file: int
    offset: int
    begin: int
    nbytes: int


def lay_out(requests: Sequence[Extent]) -> dict[tuple[int, str], Extent]:
    """Lay the extents out one after another, as requested. Returns them by (layer, array).

    Raises StateError for an array that is requested twice, or a size that is no multiple of 4096.
    """
    extents: dict[tuple[int, str], Extent] = {}
    begin = 0
    for request in requests:
        key = (request.layer, request.array)
        if key in extents:
            raise StateError(f"extent {key}: requested twice")
        if request.nbytes < 0 or request.nbytes % ALIGNMENT:
            raise StateError(f"extent {key}: got {request.nbytes} bytes, expected n * {ALIGNMENT}")
        extents[key] = replace(request, begin=begin)
        begin += request.nbytes
    return extents


class Striping:
    """Maps the linear space to the files ([Note: striping]).

    `rates`: one per file, in any unit. `unit_bytes`: size of a stripe, a multiple of 4096. Raises
    ConfigError for other values.
    """

    def __init__(self, rates: Sequence[float], unit_bytes: int) -> None:
        if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ConfigError(f"rates: got {list(rates)}, expected a number > 0 for each path")
        if unit_bytes < ALIGNMENT or unit_bytes % ALIGNMENT:
            raise ConfigError(f"unit_bytes: got {unit_bytes}, expected n * {ALIGNMENT}")
        self._unit_bytes = unit_bytes
        self._weights = _weights(rates)
        self._period = _spread(self._weights)
        # Units of each file before the k-th unit of a period, for each k including the end.
        self._before = [[0] * len(rates)]
        for file in self._period:
            counts = list(self._before[-1])
            counts[file] += 1
            self._before.append(counts)

    def file_bytes(self, total_bytes: int) -> list[int]:
        """The size of each file if the space has `total_bytes`. The sizes add up to it."""
        num_units, last_bytes = divmod(total_bytes, self._unit_bytes)
        sizes = []
        for file in range(len(self._weights)):
            sizes.append(self._units_before(file, num_units) * self._unit_bytes)
        sizes[self._file_of(num_units)] += last_bytes
        return sizes

    def segments(self, begin: int, nbytes: int) -> Iterator[FileSegment]:
        """Yield the segments of `nbytes` from byte `begin` on, in order. Neighbours are joined."""
        if len(self._weights) == 1 and nbytes:
            yield FileSegment(file=0, offset=begin, begin=0, nbytes=nbytes)
            return
        position = begin
        end = begin + nbytes
        while position < end:
            first = position
            first_unit = unit = first // self._unit_bytes
            file = self._file_of(unit)
            while position < end and self._file_of(unit) == file:
                unit += 1
                position = min(end, unit * self._unit_bytes)
            unit_begin = self._units_before(file, first_unit) * self._unit_bytes
            yield FileSegment(
                file=file,
                offset=unit_begin + first % self._unit_bytes,
                begin=first - begin,
                nbytes=position - first,
            )

    def _file_of(self, unit: int) -> int:
        return self._period[unit % len(self._period)]

    def _units_before(self, file: int, unit: int) -> int:
        """Number of units of the file before a unit of the space."""
        num_periods, unit_in_period = divmod(unit, len(self._period))
        return num_periods * self._weights[file] + self._before[unit_in_period][file]


def _weights(rates: Sequence[float]) -> list[int]:
    """Small integers in proportion to the rates, at least 1 for every file."""
    total = math.fsum(rates)
    weights = [max(1, round(PERIOD_UNITS * rate / total)) for rate in rates]
    divisor = math.gcd(*weights)
    return [weight // divisor for weight in weights]


def _spread(weights: Sequence[int]) -> tuple[int, ...]:
    """A period in which file i occurs `weights[i]` times, as evenly as possible.

    The file that is farthest behind its share comes next.
    """
    behind = [0] * len(weights)
    period = []
    for _ in range(sum(weights)):
        behind = [debt + weight for debt, weight in zip(behind, weights, strict=True)]
        file = max(range(len(weights)), key=behind.__getitem__)
        behind[file] -= sum(weights)
        period.append(file)
    return tuple(period)


# -- one file --------------------------------------------------------------------------------------
class SpillFile:
    """An unlinked file of `nbytes` in `folder` ([Note: unlinked]).

    depth          blocks in flight, in each direction
    block_bytes    bytes of a block
    engine         as in `IoQueue`
    registered     memory to register with the kernel: (address, bytes), as in `IoQueue`

    `direct` and `preallocated` report what the system granted, as in `IoFile`. Raises BudgetError
    if the disk is full, ConfigError if `folder` cannot be written or the kernel refuses `engine`,
    and `OSError` if the system refuses otherwise.
    """

    def __init__(
        self,
        folder: Path,
        nbytes: int,
        *,
        depth: int,
        block_bytes: int,
        engine: str | None,
        registered: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.folder, self.nbytes = folder, nbytes
        with contextlib.ExitStack() as undo:
            queues = [open_queue(depth, block_bytes, engine, registered) for _ in range(2)]
            for queue in queues:
                undo.callback(queue.close)
            self._reading, self._writing = queues
            try:
                self.descriptor, name = tempfile.mkstemp(prefix="stronghold-spill-", dir=folder)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise unwritable_error(folder, error) from error
                raise
            undo.callback(os.close, self.descriptor)  # for length checks and mappings
            self.path = Path(name)
            # on file systems that keep the name of an open file
            undo.callback(self._unlink)
            os.truncate(self.descriptor, nbytes)
            written = self._writing.open(name, nbytes, create=False, preallocate=False)
            read = self._reading.open(name, nbytes, writable=False)
            self._unlink()
            self.preallocated = self._reserve()
            self._close = undo.pop_all()
        self.direct = written.direct
        self._sides: dict[Verb, tuple[IoQueue, IoFile]] = {
            "read": (self._reading, read),
            "write": (self._writing, written),
        }

    def _unlink(self) -> None:
        """Remove the file's name, unless another file has it by now."""
        with contextlib.suppress(OSError):
            named, opened = os.stat(self.path), os.fstat(self.descriptor)
            if os.path.samestat(named, opened):
                self.path.unlink()

    def _reserve(self) -> bool:
        """Reserve the file's blocks. Returns False if the file system cannot."""
        free = free_bytes(self.folder)
        try:
            nameless = f"/proc/self/fd/{self.descriptor}"
            with self._writing.open(nameless, self.nbytes, create=False) as file:
                return file.preallocated
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise ConfigError(
                    f"{PATH_KEY}: the file system of {self.folder} deletes an open file with its "
                    "name (FUSE with hard_remove). Name a directory on a local disk"
                ) from error
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = min(free, self.nbytes)  # others may have written since
            raise no_space_error([self.folder], self.nbytes, free) from error

    @property
    def registered(self) -> bool:
        """True if the kernel has registered the memory."""
        return self._reading.registered and self._writing.registered

    @property
    def engine(self) -> str:
        """Name of the engine, and the reason if it is not io_uring with registered memory."""
        note = self._writing.note
        return f"{self._writing.engine} ({note})" if note else self._writing.engine

    def submit(self, verb: Verb, segment: FileSegment, address: int) -> tuple[IoQueue, int]:
        """Queue one segment of a transfer whose memory begins at `address`.

        Returns the queue and the ticket. The caller commits the queue, which starts the transfer.
        """
        queue, file = self._sides[verb]
        start = queue.read if verb == "read" else queue.write
        ticket = start(file, segment.offset, address + segment.begin, segment.nbytes, commit=False)
        return queue, ticket

    def check_length(self, verb: str, segment: FileSegment) -> None:
        """Raise `OSError` if the file was truncated ([Note: truncation])."""
        length = os.fstat(self.descriptor).st_size
        if length < self.nbytes:
            raise OSError(
                errno.ENODATA,
                f"{verb} of {segment.nbytes} bytes at offset {segment.offset}: the file was "
                f"truncated during the run, to {length} of {self.nbytes} bytes",
                str(self.path),
            )

    def close(self) -> None:
        """Finish what was submitted, and free the file's bytes. Safe to call twice."""
        self._close.close()


# -- the store -------------------------------------------------------------------------------------
# Blocks of 1 MiB are transferred at the disk's full rate by every engine; 16 in flight cover the
# latency of the fastest single disk (15 GB/s x 1 ms) with no more memory than a piece.
DEPTH = 16
BLOCK_BYTES = 1 << 20

logger = logging.getLogger("stronghold")


class InFlight:
    """The transfers of a store that are under way, and the bytes of those that have ended.

    It keeps the memory of transfers alive. Any thread may enter.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self._lock = threading.Lock()
        self._transfers: set[PendingTransfer] = set()

    def add(self, pending: PendingTransfer) -> None:
        """The transfer is about to be submitted."""
        with self._lock:
            self._transfers.add(pending)

    def remove(self, pending: PendingTransfer) -> None:
        """The transfer has ended. Its bytes count once, if it did not fail."""
        with self._lock:
            is_counted = pending not in self._transfers
            self._transfers.discard(pending)
            if is_counted or pending.error is not None:
                return
            if pending.verb == "read":
                self.bytes_read += pending.nbytes
            else:
                self.bytes_written += pending.nbytes

    def clear(self) -> None:
        """Every transfer has ended: drop their memory."""
        self._transfers.clear()


@dataclass(slots=True, eq=False)
class PendingTransfer:
    """A transfer under way, which keeps its memory alive. One thread waits for it.

    `tickets`: its parts that have not ended. `nbytes`: bytes submitted. `error`: its first failure
    by offset, once known.
    """

    in_flight: InFlight
    verb: Verb
    memory: torch.Tensor
    tickets: list[tuple[IoQueue, int]] = field(default_factory=list)
    nbytes: int = 0
    error: OSError | None = None

    def wait(self) -> None:
        """Block until the whole transfer has ended.

        Raises `OSError` with file, offset and length of a failed part, at every call. Nothing is in
        flight then. The memory of a failed read, or the extent's range of a failed write, is
        undefined.
        """
        while self.tickets:
            queue, ticket = self.tickets.pop()
            try:
                queue.wait(ticket)
            except OSError as error:
                self.error = error  # tickets end last to first: the lowest offset stays
        self.in_flight.remove(self)
        if self.error is not None:
            raise self.error


class NvmeStore(Closeable):
    """The store of files of one engine: extents in one file for each path.

    paths        directories, one per disk
    extents      arrays that the store keeps
    staging      memory that transfers use again and again, which the kernel registers
    rates        weights of the paths, in any unit. Left out: several paths are measured, each for a
                 fraction of a second
    engine       as in `IoQueue`
    depth        blocks in flight on each path, in each direction. Left out: 16
    block_bytes  bytes of a block. Left out: 1 MiB
    neighbours   the processes of this node. Each has files of its own, of equal sizes, and the
                 disks must have room for all of them. They open together. If one cannot, all raise

    Raises ConfigError for a path that cannot be used, and BudgetError if the files do not fit. Both
    come before a byte is written. Raises `OSError` for all other refusals of the system.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        extents: Sequence[Extent],
        staging: torch.Tensor | None = None,
        rates: Sequence[float] | None = None,
        engine: str | None = None,
        depth: int | None = None,
        block_bytes: int | None = None,
        neighbours: Neighbours = ALONE,
    ) -> None:
        self._process = os.getpid()
        self._stack = contextlib.ExitStack()
        self._is_closed = False
        self._in_flight = InFlight()
        self.paths = tuple(Path(path) for path in paths)
        self._staging = staging
        self._extents = lay_out(extents)
        self.file_bytes = sum(extent.nbytes for extent in self._extents.values())
        self._queue_options = (depth or DEPTH, block_bytes or BLOCK_BYTES, engine)
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            count = neighbours.count
            # One process probes the disks for all, before any process changes them.
            self.rates = neighbours.first(lambda: self._probe_disks(rates, count))
            self._striping = Striping(self.rates, self._queue_options[1])
            neighbours.together(self._open)
            if neighbours.index == 0:
                self._report()
            undo.pop_all()

    # ---- Opening and closing -------------------------------------------------------------------

    def _probe_disks(
        self, configured_rates: Sequence[float] | None, num_processes: int
    ) -> tuple[float, ...]:
        """The paths' rates. Raises an error if they cannot hold the files of all processes."""
        check_paths(self.paths)
        rates = self._rates(configured_rates)
        _, block_bytes, _ = self._queue_options
        sizes = Striping(rates, block_bytes).file_bytes(self.file_bytes)
        need_bytes = {}
        for path, size in zip(self.paths, sizes, strict=True):
            need_bytes[path] = size * num_processes
        check_space(need_bytes)
        return rates

    def _open(self) -> None:
        sizes = self._striping.file_bytes(self.file_bytes)
        pairs = zip(self.paths, sizes, strict=True)
        self._files = [self._file(path, size) for path, size in pairs]

    def _rates(self, rates: Sequence[float] | None) -> tuple[float, ...]:
        if rates is not None and len(rates) != len(self.paths):
            raise ConfigError(f"rates: got {len(rates)}, expected one for each of {self.paths}")
        if rates is not None:
            return tuple(rates)
        if len(self.paths) == 1:
            return (1.0,)
        check_space(dict.fromkeys(self.paths, PROBE_BYTES))
        depth, block_bytes, engine = self._queue_options
        return tuple(
            measure_rate(path, depth=depth, block_bytes=block_bytes, engine=engine)
            for path in self.paths
        )

    def _file(self, path: Path, nbytes: int) -> SpillFile:
        depth, block_bytes, engine = self._queue_options
        registered = []
        if self._staging is not None and self._staging.nbytes:
            registered.append((self._staging.data_ptr(), self._staging.nbytes))
        file = SpillFile(
            path, nbytes, depth=depth, block_bytes=block_bytes, engine=engine, registered=registered
        )
        self._stack.callback(file.close)
        return file

    def _report(self) -> None:
        logger.info("%d bytes of NVMe files, by %s", self.file_bytes, self._files[0].engine)
        cached = [str(file.folder) for file in self._files if not file.direct]
        if cached:
            logger.warning(
                "no O_DIRECT in %s: transfers pass through the page cache, which takes RAM and "
                "time. Name a local disk in %s",
                ", ".join(cached),
                PATH_KEY,
            )
        sparse = [str(file.folder) for file in self._files if file.nbytes and not file.preallocated]
        if sparse:
            logger.warning(
                "the file system of %s cannot reserve space: if others fill the disk, the run "
                "fails during training",
                ", ".join(sparse),
            )
        named = [str(file.path) for file in self._files if file.path.exists()]
        if named:
            logger.warning(
                "the file system keeps the names of open files: if this run is killed, remove %s",
                ", ".join(named),
            )

    def close(self) -> None:
        """Finish what was submitted, close the files and free their bytes.

        Safe to call twice. It does nothing in a forked child. No other call may be running.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._stack.close()
        self._in_flight.clear()

    @property
    def registered(self) -> bool:
        """True if the kernel has registered the staging memory, and need not pin its pages."""
        return all(file.registered for file in self._files)

    # ---- Transfers -----------------------------------------------------------------------------

    @property
    def bytes_read(self) -> int:
        return self._in_flight.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._in_flight.bytes_written

    def extent(self, layer: int, array: str) -> Extent:
        """The extent of one array of one layer. Raises StateError if none was requested."""
        extent = self._extents.get((layer, array))
        if extent is None:
            raise StateError(f"{array} of layer {layer} is not spilled")
        return extent

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The extent's pages as a flat uint8 tensor, valid also after `close`.

        [Note: coherence] of `slab` has the rule when they may be read. Raises `OSError` if the file
        system cannot map files.
        """
        extent = self.extent(extent.layer, extent.array)
        parts: list[MappedPart] = []
        for segment in self._striping.segments(extent.begin, extent.nbytes):
            parts.append(
                MappedPart(
                    descriptor=self._files[segment.file].descriptor,
                    offset=segment.offset,
                    nbytes=segment.nbytes,
                )
            )
        return map_files(parts, f"{extent} in {', '.join(map(str, self.paths))}")

    def check(self) -> None:
        """Raise `OSError` if a file was truncated: to read its mapping would end the process."""
        for file in self._files:
            whole = FileSegment(file=0, offset=0, begin=0, nbytes=file.nbytes)
            file.check_length("mapping", whole)

    def submit(
        self, verb: Verb, extent: Extent, begin: int, memory: torch.Tensor
    ) -> PendingTransfer:
        """Start to read the bytes of `extent` from byte `begin` on into all of `memory`, or to
        write them from there.

        `memory`: a contiguous CPU tensor of any dtype, which must not change until the wait. Its
        address, its bytes and `begin` are multiples of 4096. Bytes that were never written read as
        zeros. Raises `OSError` for a truncated file.
        """
        extent = self.extent(extent.layer, extent.array)
        if self._is_closed:
            raise StateError(f"{verb} of {extent}: the NVMe store is closed")
        check_range(verb, extent, begin, memory)
        segments = list(self._striping.segments(extent.begin + begin, memory.nbytes))
        for segment in segments:  # all checks come before the first transfer
            self._files[segment.file].check_length(verb, segment)
        pending = PendingTransfer(self._in_flight, verb, memory)
        self._in_flight.add(pending)
        try:
            for segment in segments:
                file = self._files[segment.file]
                pending.tickets.append(file.submit(verb, segment, memory.data_ptr()))
                pending.nbytes += segment.nbytes
        except BaseException:
            with contextlib.suppress(OSError):  # the first refusal is the one to report
                pending.wait()
            raise
        for queue in {queue for queue, _ in pending.tickets}:
            queue.commit()
        return pending


def check_range(verb: Verb, extent: Extent, begin: int, memory: torch.Tensor) -> None:
    """Raise StateError for a range outside of the extent: a bug of ours, not the user's."""
    nbytes, address = memory.nbytes, memory.data_ptr()
    if not memory.is_contiguous() or memory.device.type != "cpu":
        raise StateError(f"{verb} of {extent}: expected contiguous memory on the CPU")
    if begin % ALIGNMENT or nbytes % ALIGNMENT or address % ALIGNMENT:
        raise StateError(
            f"{verb} of {extent}: got {nbytes} bytes from byte {begin} at address {address:#x}, "
            f"expected multiples of {ALIGNMENT}"
        )
    if begin < 0 or begin + nbytes > extent.nbytes:
        raise StateError(
            f"{verb} of {extent}: got bytes {begin} to {begin + nbytes} of {extent.nbytes}"
        )


# -- disks -----------------------------------------------------------------------------------------
def measure_rate(path: Path, *, depth: int, block_bytes: int, engine: str | None = None) -> float:
    """Measure a disk with a probe of 64 MiB under `path`, past the page cache if that works.

    Returns 1e9 bytes/s of a piece that is read and then written, as moments are: the piece's bytes
    over the time of both. Raises as `SpillFile`.
    """
    pieces = map_slab(PROBE_BYTES, torch.uint8)
    pieces.fill_(0x5A)  # not zeros: some disks store those for nothing
    probe = SpillFile(path, PROBE_BYTES, depth=depth, block_bytes=block_bytes, engine=engine)
    with contextlib.closing(probe):
        # Twice: the first write of fresh blocks also pays for the file system's bookkeeping.
        _seconds(probe, "write", pieces)
        write_s = _seconds(probe, "write", pieces)
        read_s = _seconds(probe, "read", pieces)
    read_gbps, write_gbps = PROBE_BYTES / read_s / 1e9, PROBE_BYTES / write_s / 1e9
    logger.info("%s reads %.2f and writes %.2f GB/s", path, read_gbps, write_gbps)
    return 1 / (1 / read_gbps + 1 / write_gbps)


def _seconds(file: SpillFile, verb: Verb, pieces: torch.Tensor) -> float:
    """Seconds of one transfer of the whole file."""
    begin = time.perf_counter()
    whole = FileSegment(file=0, offset=0, begin=0, nbytes=file.nbytes)
    queue, ticket = file.submit(verb, whole, pieces.data_ptr())
    queue.wait(ticket)
    return max(time.perf_counter() - begin, 1e-9)


def open_queue(
    depth: int, block_bytes: int, engine: str | None, registered: Sequence[tuple[int, int]] = ()
) -> IoQueue:
    """Open an `IoQueue`. Raises ConfigError if the kernel refuses the engine of the config."""
    try:
        return IoQueue(depth, block_bytes, engine, registered)
    except OSError as error:
        if engine is None:
            raise
        raise ConfigError(
            f'{ENGINE_KEY}: got "{engine}", which the kernel refuses ({error.strerror}). '
            'Remove it, or set "threads".'
        ) from error


def check_paths(paths: Sequence[Path]) -> None:
    """Raise ConfigError for a path that is missing, no directory, read-only, or named twice."""
    if not paths:
        raise ConfigError(f"{PATH_KEY}: got no path, expected a directory on an NVMe disk.")
    for path in paths:
        if not path.is_dir():
            problem = "is not a directory" if path.exists() else "does not exist"
            raise ConfigError(
                f'{PATH_KEY}: "{path}" {problem}, expected a directory on an NVMe disk. '
                "Make it (and mount the disk), or name another."
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise unwritable_error(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))
    if len({path.resolve() for path in paths}) < len(paths):
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{PATH_KEY}: got one directory twice in {names}. Name each once.")


def unwritable_error(path: Path, error: OSError) -> ConfigError:
    """The error for a path in which no file can be created."""
    return ConfigError(
        f'{PATH_KEY}: "{path}" cannot be written ({error.strerror}). Give this user the right to '
        "write there (or mount it read-write), or name another directory."
    )


def check_space(need_bytes: Mapping[Path, int]) -> None:
    """Raise BudgetError if a file system has less room than the paths on it need together."""
    by_device: dict[int, list[Path]] = {}
    for path in need_bytes:
        by_device.setdefault(path.stat().st_dev, []).append(path)
    for paths in by_device.values():
        need = sum(need_bytes[path] for path in paths)
        have = free_bytes(paths[0])
        if need > have:
            raise no_space_error(paths, need, have)


def no_space_error(paths: Sequence[Path], need_bytes: int, have_bytes: int) -> BudgetError:
    """The error for a disk that is too small."""
    names = ", ".join(f'"{path}"' for path in paths)
    need = format_size(need_bytes, round_up=True)
    have = format_size(have_bytes)
    missing = format_size(need_bytes - have_bytes, round_up=True)
    return BudgetError(
        f"{PATH_KEY}: state that spills to {names} needs {need}, and the disk has {have} free. "
        f"Free {missing}, add a path on another disk, or give more to stronghold.host_memory so "
        "that less spills.",
        need_bytes=need_bytes,
        page=ErrorPage.DISK,
    )


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write under `path`, in whole pages."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize // ALIGNMENT * ALIGNMENT
