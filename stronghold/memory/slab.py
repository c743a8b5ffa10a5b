"""Slabs: anonymous mappings of exact size, and what becomes of them in a forked process.

Owns the mappings' advice and the handler that runs after `os.fork`. Never knows what lies in a
slab. Any thread may map one.

[Note: fork] Data loaders fork. A copy-on-write child would make every later write of the parent
copy its page: twice the host memory, and pinned pages that the device no longer reaches. So slabs
are not inherited (MADV_DONTFORK). But the child inherits the Python objects that will unmap them,
at addresses where its own allocator may have mapped something else by then. The handler therefore
puts an empty reservation at each address, first thing in the child: unmapping that is harmless, and
reading a slab there ends the child rather than giving it zeros.

[Note: distance] Slabs that are mapped one after the other lie side by side, so that arrays of a
layer would lie exactly their size apart. Where that is 2^28 or 2^29 bytes, an AMD EPYC (Zen) runs
Adam over them at 14 to 20 GB/s rather than the 32 to 49 that it has with one page of addresses
between them, which nobody touches (fp32, two threads). With a page or two more a mapping's number
of pages is odd: any two of 256 neighbours lie no multiple of 2^20 bytes apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import torch

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


def map_shared(descriptor: int, nbytes: int) -> torch.Tensor:
    """The first `nbytes` of a file of memory, as bytes that other processes see too; otherwise as
    `map_slab`.
    """
    return _slab(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED), torch.uint8, nbytes)


def _slab(mapping: mmap.mmap, dtype: torch.dtype, numel: int) -> torch.Tensor:
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)
    if len(mapping) >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # 10 to 27 % of Adam's bandwidth
    slab = torch.frombuffer(mapping, dtype=dtype, count=numel)
    _live[mapping] = slab.data_ptr()
    return slab


def _reserve_in_child() -> None:
    """Occupy the addresses of the slabs that this child did not inherit."""
    reserve = ctypes.CDLL(None).mmap
    reserve.restype = ctypes.c_void_p
    reserve.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for mapping, address in list(_live.items()):
        reserve(address, len(mapping), _PROT_NONE, flags, -1, 0)


if hasattr(os, "register_at_fork") and hasattr(mmap, "MADV_DONTFORK"):
    os.register_at_fork(after_in_child=_reserve_in_child)
