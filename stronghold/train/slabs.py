"""Host memory from the system: slabs, files as memory, and a pinned pool.

Owns the mappings, their advice to the kernel, and their fate in a forked process. A mapping lives
as long as a tensor over it. Never knows what lies in a mapping. Any thread may enter.

[Note: fork] Data loaders fork. A child that inherited slabs copy-on-write would make every later
write of the parent copy its page: twice the host memory, and pinned pages that the device no longer
reaches. So:
    1. The parent maps each slab with MADV_DONTFORK: the child does not inherit it.
    2. The child inherits the Python objects that will unmap the slab. Its own allocator may have
       mapped other memory at that address by then.
    3. The fork handler runs first in the child. It puts an empty reservation at each address. To
       unmap that is harmless. To read a slab there ends the child, and never gives zeros.

[Note: distance] Slabs that are mapped one after the other lie side by side. Arrays of a layer would
then lie exactly their size apart. If that is 2^28 or 2^29 bytes, an AMD EPYC (Zen) runs updates
over them at 14 to 20 GB/s. It runs them at 32 to 49 GB/s with one page of addresses between them,
which is never touched (fp32, two threads). A mapping has an odd number of pages: one or two more
than the slab. So any two of 256 neighbours lie no multiple of 2^20 bytes apart.

[Note: coherence] A mapped file is also read and written past the page cache (O_DIRECT).
    1. The kernel writes dirty pages back before such a transfer.
    2. The kernel drops the pages of written bytes after the transfer. So the mapping shows the
       file's bytes.
    3. The kernel does not order a mapping's access and a transfer that race. So callers access a
       mapping between steps, when no transfer is under way.

[Note: unreadable pages] A page that cannot be read (a truncated file, a failing disk) ends the
process with SIGBUS: Python has no error for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stronghold.devices.device import Device
from stronghold.errors import BudgetError, ConfigError, ErrorPage, format_size
from stronghold.limits import available_host_bytes
from stronghold.train.processes import RankGroup

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
# an address that the child has taken already stays the child's
_MAP_FIXED_NOREPLACE = 0x100000

_live: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()


def map_slab(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a flat tensor of `numel` zeros on its own anonymous mapping.

    The mapping has the exact size and is page-aligned. The system commits a page at its first
    touch. Forked processes do not inherit it ([Note: fork]). It lies no multiple of a large power
    of two from the one mapped before ([Note: distance]). Torch's pinned allocator is not used: it
    rounds up to powers of two.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    # Private: the default is shared memory, which gets huge pages only by a system setting.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    slab_pages = -(-numel * dtype.itemsize // mmap.PAGESIZE)
    num_pages = slab_pages + 1 | 1  # the next odd number: [Note: distance]
    mapping = mmap.mmap(-1, num_pages * mmap.PAGESIZE, flags=flags)
    return _slab(mapping, dtype, numel)


def _slab(mapping: mmap.mmap, dtype: torch.dtype, numel: int) -> torch.Tensor:
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)
    if len(mapping) >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # 10 to 27 % of an update's bandwidth
    slab = torch.frombuffer(mapping, dtype=dtype, count=numel)
    _live[mapping] = slab.data_ptr()
    return slab


def _reserve_in_child() -> None:
    """Occupy the addresses of the slabs that this child did not inherit."""
    libc = _libc()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for mapping, address in list(_live.items()):
        libc.mmap(address, len(mapping), _PROT_NONE, flags, -1, 0)


if hasattr(os, "register_at_fork") and hasattr(mmap, "MADV_DONTFORK"):
    os.register_at_fork(after_in_child=_reserve_in_child)


def trim_heap() -> None:
    """Give the free pages of the C library's heap back to the system. Needs glibc, else nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# -- files as tensors ------------------------------------------------------------------------------
_PROT_READ_WRITE = 3
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPart:
    """Bytes [offset, offset + nbytes) of an open file. Both are multiples of pages."""

    descriptor: int
    offset: int
    nbytes: int


def map_files(parts: Sequence[MappedPart], name: str) -> torch.Tensor:
    """Map parts of files side by side, and return them as one flat uint8 tensor.

    `name`: of the bytes, for errors. Writes to the tensor go to the files. A descriptor may be
    closed afterwards, and its file unlinked. Raises `OSError` if the file system cannot map files.
    """
    total = sum(part.nbytes for part in parts)
    if not total:
        return torch.empty(0, dtype=torch.uint8)
    libc = _libc()
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    begin = _checked(libc.mmap(None, total, _PROT_NONE, reserve, -1, 0), name)
    address = begin
    try:
        for part in parts:
            if not part.nbytes:
                continue
            flags = _MAP_FIXED | mmap.MAP_SHARED
            mapped = libc.mmap(
                address, part.nbytes, _PROT_READ_WRITE, flags, part.descriptor, part.offset
            )
            _checked(mapped, name)
            address += part.nbytes
    except OSError:
        libc.munmap(begin, total)
        raise
    memory = (ctypes.c_byte * total).from_address(begin)
    weakref.finalize(memory, libc.munmap, begin, total).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _checked(address: int | None, name: str) -> int:
    if address == _FAILED or address is None:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} cannot be mapped: {os.strerror(number)}")
    return address


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number, offset = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long)
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, offset]
    libc.munmap.argtypes = [pointer, size]
    return libc


# -- pinned memory that is taken in turn -----------------------------------------------------------
PIECE_BYTES = 512  # pieces begin at multiples of it
# pinned memory grows by an eighth at least: a call to pin takes time, and cuts copies
GROWTH = 8


class PinnedPool:
    """A pool of pinned (page-locked) memory, of at most `room_bytes`.

    room_bytes      None: what the system has when the first piece is taken
    expected_bytes  pinned with the first piece, in one call; 0 if unknown. Further memory is pinned
                    in steps

    Pieces are given first fit by address. Activations come and go as a stack: forward saves,
    backward takes back. So they leave no holes, whatever their sizes are, and the pool pins no more
    than was expected, or than was ever taken at once. The training thread takes pieces, and
    autograd's thread in backward. Any thread may give them back.
    """

    def __init__(self, device: Device, room_bytes: int | None, *, expected_bytes: int = 0) -> None:
        self._device = device
        self._room_bytes = room_bytes
        self._expected_bytes = expected_bytes
        self._arena: torch.Tensor | None = None
        self._pinned: list[torch.Tensor] = []
        # [begin, end) in order and apart, all of it pinned
        self._free: list[tuple[int, int]] = []
        # Pieces come back at any moment, also in the middle of `take`: a deque is enough of a lock.
        self._returned: deque[tuple[int, int]] = deque()
        self.num_bytes = 0  # pinned

    def take(self, nbytes: int) -> torch.Tensor:
        """Take a piece until `give`: a flat uint8 tensor of `nbytes`, with undefined contents.

        Raises BudgetError if the pool has no room.
        """
        size = _padded(nbytes)
        self._merge_returned()
        number = self._first_fit(size)
        if number is None:
            self._grow(size)
            number = len(self._free) - 1
        begin, end = self._free.pop(number)
        if end - begin > size:
            self._free.insert(number, (begin + size, end))
        assert self._arena is not None
        return self._arena[begin : begin + nbytes]

    def _first_fit(self, size: int) -> int | None:
        """Number of the first free range of at least `size` bytes, or None."""
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                return number
        return None

    def give(self, piece: torch.Tensor) -> None:
        """Give a piece back.

        Operations that still use it are ordered before those of the next user.
        """
        begin = int(piece.storage_offset())
        self._returned.append((begin, begin + _padded(piece.numel())))

    def close(self) -> None:
        """Unpin everything. Safe to call twice."""
        for memory in self._pinned:
            self._device.pinning.unpin(memory)
        self._pinned.clear()
        self._free.clear()
        self._arena = None

    def _merge_returned(self) -> None:
        if not self._returned:
            return
        while self._returned:
            insort(self._free, self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for begin, end in self._free:
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged

    def _grow(self, size: int) -> None:
        """Pin more memory behind the pinned part: the last free range then has `size` bytes."""
        if self._arena is None:
            if self._room_bytes is None:
                self._room_bytes = available_host_bytes()
            num_pages = max(0, self._room_bytes) // PAGE_BYTES
            # Addresses, not memory: pages are committed when they are pinned or written.
            self._arena = map_slab(num_pages * PAGE_BYTES, torch.uint8)
        begin = self.num_bytes
        ends_free = bool(self._free) and self._free[-1][1] == begin
        free_begin = self._free[-1][0] if ends_free else begin
        missing = size - (begin - free_begin)
        room = self._arena.numel() - begin
        if missing > room:
            raise BudgetError(
                f"offloaded activations need {format_size(begin + missing)} of host memory at "
                f"once, and {format_size(self._arena.numel())} are left beside the plan's. Raise "
                'stronghold.host_memory or add RAM, set stronghold.activations to "recompute", or '
                "lower the micro-batch",
                page=ErrorPage.HOST_MEMORY,
            )
        ahead = self._expected_bytes if begin == 0 else begin // GROWTH
        wanted = -(-max(missing, ahead) // PAGE_BYTES) * PAGE_BYTES
        added = min(wanted, room)
        memory = self._arena[begin : begin + added]
        self._device.pinning.pin(memory)
        self._pinned.append(memory)
        self.num_bytes += added
        if free_begin < begin:
            self._free.pop()
        self._free.append((free_begin, begin + added))


def _padded(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pieces of the pool."""
    return -(-nbytes // PIECE_BYTES) * PIECE_BYTES


# -- memory that processes have in common ----------------------------------------------------------
class NodeMemory:
    """Memory that the processes of one node share: `nbytes` of zeros.

    It is a file of memory without a name. The first process makes it, and the others open it. The
    kernel frees it with the last process that has it open or mapped, however that ends. The size of
    /dev/shm does not matter. Raises ConfigError if a process cannot open another's memory, as in
    containers of their own.
    """

    def __init__(self, name: str, nbytes: int, ranks: RankGroup) -> None:
        self._descriptor = -1
        path = ""
        if ranks.index == 0:
            self._descriptor = os.memfd_create(f"stronghold {name}")
            os.ftruncate(self._descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        path = ranks.of_node(path)[0]
        problem = ""
        if ranks.index:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        problems = [problem for problem in ranks.of_all(problem) if problem]
        if problems:
            raise ConfigError(
                f"the ranks of a node cannot share memory ({problems[0]}): start them as one user, "
                "in one container, or give ranks that cannot share it different values of the "
                "environment variable STRONGHOLD_NODE: they are nodes of their own then"
            )
        mapping = mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED)
        self.bytes = _slab(mapping, torch.uint8, nbytes)

    def part(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat view of `numel` elements from byte `begin` on."""
        return self.bytes[begin : begin + numel * dtype.itemsize].view(dtype)

    def make_private(self) -> None:
        """Keep writes in this process from now on: it copies a page when it writes it."""
        address, nbytes = self.bytes.data_ptr(), self.bytes.numel()
        flags, descriptor = mmap.MAP_PRIVATE | _MAP_FIXED, self._descriptor
        mapped = _libc().mmap(address, nbytes, _PROT_READ_WRITE, flags, descriptor, 0)
        _checked(mapped, "the node's weights, as this process's own,")

    def close(self) -> None:
        """Close the file. Tensors over it keep the mapping. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
