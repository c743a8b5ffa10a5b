"""Mapped files: ranges of files as one tensor, whose memory is the page cache.

Owns the mappings; each lives as long as any tensor over it. Never knows what lies in a file. Any
thread may map and flush.

[Note: coherence] The same bytes are transferred past the page cache (O_DIRECT) and read here. The
kernel writes dirty pages back before such a transfer and drops the pages of what was written after
it, so that a mapping shows what is in the file; what it does not promise is the outcome of a race
between the two. Callers read a mapping between steps, when no transfer is under way, and `flush`
what they have written to it before the next transfer begins.

[Note: unreadable pages] A page that cannot be read, of a truncated file or a failing disk, ends the
process with SIGBUS: Python has no error for it. So `NvmeStore.check` comes before reads, and after
a failure weights are read back through the store, never here.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stronghold.errors import ConfigError

PAGE_BYTES = 4096
MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_MS_SYNC = 4
_FAILED = ctypes.c_void_p(-1).value


def map_shared(parts: Sequence[tuple[int, int, int]], what: str) -> torch.Tensor:
    """The parts, (descriptor, offset, nbytes) in multiples of pages, side by side as flat bytes.

    Writes go to the files. A descriptor may be closed and its file unlinked afterwards. `what`
    names the bytes in the OSError of a file system that cannot map.
    """
    total = sum(nbytes for _, _, nbytes in parts)
    if not total:
        return torch.empty(0, dtype=torch.uint8)
    libc = _libc()
    reserve = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    address = _checked(libc.mmap(None, total, _PROT_NONE, reserve, -1, 0), what)
    at = address
    try:
        for descriptor, offset, nbytes in parts:
            flags = _MAP_SHARED | _MAP_FIXED
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
