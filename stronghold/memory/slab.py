"""Host memory from the system: slabs, files as memory, and a pinned pool.

Owns the mappings, their advice, and what becomes of them in a forked process; each lives as long as
a tensor over it. Never knows what lies in it. Any thread may enter.

[Note: fork] Data loaders fork. A copy-on-write child would make every later write of the parent
copy its page: twice the host memory, and pinned pages that the device no longer reaches. So slabs
are not inherited (MADV_DONTFORK). But the child inherits the Python objects that will unmap them,
at addresses where its own allocator may have mapped something else by then. The handler therefore
puts an empty reservation at each address, first thing in the child: unmapping that is harmless, and
reading a slab there ends the child rather than giving it zeros.

[Note: distance] Slabs that are mapped one after the other lie side by side, so that arrays of a
layer would lie exactly their size apart. Where that is 2^28 or 2^29 bytes, an AMD EPYC (Zen) runs
updates over them at 14 to 20 GB/s, and at 32 to 49 with one page of addresses between them, which
is never touched (fp32, two threads). With a page or two more a mapping's number
of pages is odd: any two of 256 neighbours lie no multiple of 2^20 bytes apart.

[Note: coherence] The bytes of a mapped file are also transferred past the page cache (O_DIRECT).
The kernel writes dirty pages back before such a transfer and drops the pages of what was written
after it, so that a mapping shows what is in the file; what it does not promise is the outcome of a
race between the two. Callers read a mapping between steps, when no transfer is under way, and
`flush` what they have written to it before the next transfer begins.

[Note: unreadable pages] A page that cannot be read, of a truncated file or a failing disk, ends the
process with SIGBUS: Python has no error for it. So `NvmeStore.check` comes before reads, and after
a failure weights are read back through the store, never here.
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
from pathlib import Path
from typing import Any

import torch

from stronghold.device.base import Device
from stronghold.errors import BudgetError, ConfigError, format_size
from stronghold.limits import available_host_bytes
from stronghold.process import Neighbours

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000  # an address that the child has taken already stays the child's

_live: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()


def map_slab(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat zero tensor on its own anonymous mapping: exact size, page-aligned, committed page by
    page at first touch, not inherited by forked processes ([Note: fork]), and no multiple of a
    large power of two from the one mapped before ([Note: distance]).

    Never torch's pinned allocator, which rounds up to powers of two.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    # Private: the default is shared memory, which gets no huge pages unless the system is told to.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = -(-numel * dtype.itemsize // mmap.PAGESIZE) + 1 | 1  # [Note: distance]
    return _slab(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=flags), dtype, numel)


def meta_slab(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of `numel` elements on torch's meta device: a size without bytes."""
    return torch.empty(numel, dtype=dtype, device="meta")


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
    """Give the free pages of the C library's heap back to the system; nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# -- files as tensors ------------------------------------------------------------------------------
MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_PROT_READ_WRITE = 3
_MAP_FIXED = 0x10
_MS_SYNC = 4
_FAILED = ctypes.c_void_p(-1).value


def map_files(parts: Sequence[tuple[int, int, int]], what: str) -> torch.Tensor:
    """The parts, (descriptor, offset, nbytes) in multiples of pages, side by side as flat bytes.

    Writes go to the files. A descriptor may be closed and its file unlinked afterwards. `what`
    names the bytes in the OSError of a file system that cannot map.
    """
    total = sum(nbytes for _, _, nbytes in parts)
    if not total:
        return torch.empty(0, dtype=torch.uint8)
    libc = _libc()
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _checked(libc.mmap(None, total, _PROT_NONE, reserve, -1, 0), what)
    at = address
    try:
        for descriptor, offset, nbytes in parts:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _checked(libc.mmap(at, nbytes, _PROT_READ_WRITE, flags, descriptor, offset), what)
            at += nbytes
    except OSError:
        libc.munmap(address, total)
        raise
    memory = (ctypes.c_byte * total).from_address(address)
    weakref.finalize(memory, libc.munmap, address, total).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def check_mappings(nbytes: int, num_files: int, unit_bytes: int) -> None:
    """ConfigError when `nbytes` striped over the files need more mappings than a process gets."""
    limit = int(MAX_MAPPINGS.read_text()) // 2 if MAX_MAPPINGS.exists() else 1 << 15
    need = -(-nbytes // unit_bytes)
    if num_files > 1 and need > limit:
        least = -(-nbytes // limit // PAGE_BYTES) * PAGE_BYTES
        raise ConfigError(
            f"stronghold.nvme.block: got {unit_bytes} bytes, but weights on {num_files} disks are "
            f"mapped block by block, and {need} blocks are more than the {limit} that the system "
            f"lets us map (half of vm.max_map_count); raise block to at least {least}, or name one "
            "path in stronghold.nvme.path"
        )


def flush(mapped: torch.Tensor) -> None:
    """Write what was changed in the mapping to its files. OSError when a disk refuses."""
    if mapped.nbytes and _libc().msync(mapped.data_ptr(), mapped.nbytes, _MS_SYNC):
        number = ctypes.get_errno()
        raise OSError(number, f"msync of {mapped.nbytes} bytes: {os.strerror(number)}")


def _checked(address: int | None, what: str) -> int:
    if address == _FAILED or address is None:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} cannot be mapped: {os.strerror(number)}")
    return address


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.msync.argtypes = [pointer, size, ctypes.c_int]
    return libc


# -- pinned memory that is taken in turn -----------------------------------------------------------
PIECE_BYTES = 512  # pieces begin at multiples of it
GROWTH = 8  # what is pinned grows by an eighth at least: pinning takes a call, and cuts copies


class PinnedPool:
    """Pinned memory that is taken in turn, at most `room_bytes` (None: what the system has when the
    first piece is taken). `expected_bytes`, 0 where unknown, are pinned with the first piece, in
    one call; what is needed beyond them is pinned in steps.

    Pieces are given first fit by address, so that what comes and goes as a stack (activations:
    forward saves, backward takes back) leaves no holes, whatever its sizes are: what is pinned is
    the most that was ever taken at once, or what was expected. Entered by the training thread and
    by autograd's in backward; `give` by any.
    """

    def __init__(self, device: Device, room_bytes: int | None, *, expected_bytes: int = 0) -> None:
        self._device = device
        self._room_bytes = room_bytes
        self._expected_bytes = expected_bytes
        self._arena: torch.Tensor | None = None
        self._pinned: list[torch.Tensor] = []
        self._free: list[tuple[int, int]] = []  # [begin, end) in order and apart, all of it pinned
        # Pieces come back at any moment, also in the middle of `take`: a deque is enough of a lock.
        self._returned: deque[tuple[int, int]] = deque()
        self.num_bytes = 0  # pinned

    def take(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of it, contents undefined, until `give`; BudgetError where there is no room."""
        size = -(-nbytes // PIECE_BYTES) * PIECE_BYTES
        self._merge_returned()
        place = next((k for k, (begin, end) in enumerate(self._free) if end - begin >= size), None)
        if place is None:
            self._grow(size)
            place = len(self._free) - 1
        begin, end = self._free.pop(place)
        if end - begin > size:
            self._free.insert(place, (begin + size, end))
        assert self._arena is not None
        return self._arena[begin : begin + nbytes]

    def give(self, piece: torch.Tensor) -> None:
        """Nobody will use the piece any more, or only what is ordered before its next user."""
        begin = int(piece.storage_offset())
        self._returned.append((begin, begin + -(-piece.numel() // PIECE_BYTES) * PIECE_BYTES))

    def close(self) -> None:
        """Unpin everything. Safe to call twice."""
        for part in self._pinned:
            self._device.pinning.unpin(part)
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
        """Pin more, behind what is pinned: the last free range then has `size` bytes at least."""
        if self._arena is None:
            if self._room_bytes is None:
                self._room_bytes = available_host_bytes()
            pages = max(0, self._room_bytes) // PAGE_BYTES
            # Addresses, not memory: pages are committed when they are pinned or written.
            self._arena = map_slab(pages * PAGE_BYTES, torch.uint8)
        begin = self.num_bytes
        last = self._free[-1] if self._free and self._free[-1][1] == begin else (begin, begin)
        missing = size - (last[1] - last[0])
        room = self._arena.numel() - begin
        if missing > room:
            raise BudgetError(
                f"offloaded activations need {format_size(begin + missing)} of host memory at "
                f"once, {format_size(self._arena.numel())} are left beside the plan's; raise "
                'stronghold.host_memory or add RAM, set stronghold.activations to "recompute", or '
                "lower the micro-batch"
            )
        ahead = self._expected_bytes if begin == 0 else begin // GROWTH
        more = -(-max(missing, ahead) // PAGE_BYTES) * PAGE_BYTES
        more = min(more, room)
        part = self._arena[begin : begin + more]
        self._device.pinning.pin(part)
        self._pinned.append(part)
        self.num_bytes += more
        if last[1] > last[0]:
            self._free.pop()
        self._free.append((last[0], begin + more))


# -- memory that processes have in common ----------------------------------------------------------
class NodeMemory:
    """Memory that the processes of one node have in common: `nbytes` of zeros in a file of memory
    without a name, which the first of them makes and the others open. The kernel frees it with the
    last process that has it open or mapped, however that ends: nothing is left behind, and the size
    of /dev/shm does not matter. ConfigError where a process cannot open another's memory: in
    containers of their own."""

    def __init__(self, name: str, nbytes: int, neighbours: Neighbours) -> None:
        self._descriptor = -1
        path = ""
        if neighbours.index == 0:
            self._descriptor = os.memfd_create(f"stronghold {name}")
            os.ftruncate(self._descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        path = neighbours.of_node(path)[0]
        problem = ""
        if neighbours.index:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        problems = [problem for problem in neighbours.of_all(problem) if problem]
        if problems:
            raise ConfigError(
                f"the ranks of a node cannot share memory ({problems[0]}): start them as one user, "
                "in one container, or give ranks that cannot share it different values of the "
                "environment variable STRONGHOLD_NODE: they are nodes of their own then"
            )
        mapping = mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED)
        self.bytes = _slab(mapping, torch.uint8, nbytes)

    def part(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements from byte `begin` on."""
        return self.bytes[begin : begin + numel * dtype.itemsize].view(dtype)

    def make_private(self) -> None:
        """From now on writes stay in this process: pages are copied when they are written."""
        address, nbytes = self.bytes.data_ptr(), self.bytes.numel()
        flags, descriptor = mmap.MAP_PRIVATE | _MAP_FIXED, self._descriptor
        found = _libc().mmap(address, nbytes, _PROT_READ_WRITE, flags, descriptor, 0)
        _checked(found, "the node's weights, as this process's own,")

    def close(self) -> None:
        """Close the file; tensors over it keep the mapping. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
