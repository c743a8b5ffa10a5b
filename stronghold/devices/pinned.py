"""Host slabs that a GPU reads and writes directly, and the ring for those that it cannot.

Owns the registration of host slabs. The training thread enters, and lanes for copies.

[Note: registered] `copy_(non_blocking=True)` is one asynchronous copy, whether torch made the host
memory or we registered it; from memory that is not registered the driver copies through its own,
and holds the caller up. One copy may not span registered and other memory (on CUDA it fails with
CUDA_ERROR_INVALID_VALUE), which several ranks' weights do, of which each registers its own part:
such a copy is made in pieces.

[Note: refused] Some systems register little memory or none: WSL2, containers, `ulimit -l`. What
they refuse is copied by the lane's thread, through a small registered ring per stream. The thread
touches the slab itself, and is done with it when the operation is issued: a later one, which waits
for the issue at least, meets no copy of it that is still under way.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch

from stronghold.devices.kinds import DeviceKind
from stronghold.errors import StateError
from stronghold.native import available_cores

logger = logging.getLogger("stronghold")

_RING_BYTES = 8 << 20  # of one of a ring's two entries, at most
_LEAST_RING_BYTES = 64 << 10
_POPULATE_WRITE = 23  # madvise's, since Linux 5.14
_TOUCH_BYTES = 32 << 20  # that one thread commits at a time
_MAX_TOUCHING = 8  # threads: clearing pages is bound by memory


class HostPinning:
    """Registration of host slabs, on a device whose memory is the host's: nothing to do."""

    def pin(self, tensor: torch.Tensor) -> None:
        """Register a host slab for direct transfers, where the system allows it; where it does not,
        they take a longer way. The slab must outlive `unpin`."""

    def register(self, tensor: torch.Tensor) -> None:
        """As `pin`, but OSError where the system does not allow it."""
        self.pin(tensor)

    def unpin(self, tensor: torch.Tensor) -> None:
        """Undo `pin`."""


def cuts(regions: Sequence[tuple[int, int]], begin: int, end: int) -> list[int]:
    """The addresses between `begin` and `end` where one of `regions`, [begin, end) in order and
    apart, begins or ends."""
    found: list[int] = []
    first = bisect_left(regions, (begin, begin))
    for region in regions[max(0, first - 1) :]:
        if region[0] >= end:
            break
        found += [at for at in region if begin < at < end and at not in found]
    return found


def _is_inside(regions: Sequence[tuple[int, int]], address: int) -> bool:
    """Whether the address lies in one of `regions`, which are as for `cuts`."""
    at = bisect_right(regions, address, key=lambda region: region[0]) - 1
    return at >= 0 and address < regions[at][1]


def _touch(address: int, nbytes: int) -> None:
    """Commit a slab's pages by several threads: registration clears them with one. Where the kernel
    or a limit on threads does not let us, registration does it all."""
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + nbytes
    end -= end % mmap.PAGESIZE
    if end - begin <= _TOUCH_BYTES:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    starts = range(begin, end, _TOUCH_BYTES)
    sizes = [min(_TOUCH_BYTES, end - start) for start in starts]
    num_threads = min(available_cores(), _MAX_TOUCHING)
    with contextlib.suppress(RuntimeError), ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(madvise, starts, sizes, [_POPULATE_WRITE] * len(sizes)))


class _Ring:
    """Two registered entries, through which one stream's copies of other memory pass in turn."""

    def __init__(self, kind: DeviceKind, entries: Sequence[torch.Tensor]) -> None:
        self._kind = kind
        self.entries = entries
        self._free: list[Any] = [None, None]  # the event after which an entry is free

    def fetch(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        for entry, there, here in self._turns(target, source):
            event = self._free[entry]
            if event is not None:
                event.synchronize()
            passing = self.entries[entry][: here.numel()]
            passing.copy_(here)
            there.copy_(passing, non_blocking=True)
            self._free[entry] = self._kind.recorded(stream)

    def drain(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Returns when the last byte is there."""
        arriving: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        for entry, here, there in self._turns(target, source):
            if len(arriving) == len(self.entries):
                self._arrive(*arriving.popleft())
            passing = self.entries[entry][: here.numel()]
            passing.copy_(there, non_blocking=True)
            event = self._kind.recorded(stream)
            arriving.append((event, here, passing))
        while arriving:
            self._arrive(*arriving.popleft())

    @staticmethod
    def _arrive(event: Any, target: torch.Tensor, passing: torch.Tensor) -> None:
        event.synchronize()
        target.copy_(passing)

    def _turns(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        size = self.entries[0].numel()
        for turn, begin in enumerate(range(0, target.numel(), size)):
            yield turn % 2, target[begin : begin + size], source[begin : begin + size]


class GpuPinning(HostPinning):
    """Registration of host slabs with a GPU's driver, and copies between them and the GPU.
    `streams`: those on which slabs are copied, of which each has a ring where slabs are refused."""

    def __init__(self, kind: DeviceKind, device: torch.device, streams: Sequence[Any]) -> None:
        self._kind = kind
        self._device = device
        self._streams = streams
        self._registered: list[tuple[int, int]] = []  # replaced, since lanes read it meanwhile
        self._refused: dict[int, int] = {}  # address -> bytes, of slabs that are not registered
        self._rings: dict[int, _Ring] = {}  # by stream; [Note: refused]

    @property
    def refuses(self) -> bool:
        """Whether a slab lives that the system refused to register."""
        return bool(self._refused)

    @property
    def pinned_bytes(self) -> int:
        """What is registered now, of slabs and of rings."""
        return sum(end - begin for begin, end in self._registered)

    def pin(self, tensor: torch.Tensor) -> None:
        try:
            self.register(tensor)
        except OSError as error:
            pinned = self.pinned_bytes
            first = not self._refused
            self._refused[tensor.data_ptr()] = tensor.nbytes
            if first:
                self._make_rings()
                logger.warning(
                    "the system lets this process pin %d bytes of host memory, and refuses %d more "
                    "(%s). What is not pinned passes through %d bytes that are: right, but slower. "
                    "Raise the limit: ulimit -l unlimited; in a container --ulimit memlock=-1; "
                    "under WSL2 more memory in .wslconfig",
                    pinned,
                    tensor.nbytes,
                    error,
                    self.pinned_bytes - pinned,
                )

    def register(self, tensor: torch.Tensor) -> None:
        calls, nbytes = self._kind.registration, tensor.numel() * tensor.element_size()
        if calls is None:
            raise OSError(f"{self._kind.name} has no call that registers host memory")
        _touch(tensor.data_ptr(), nbytes)
        status = calls.register(tensor.data_ptr(), nbytes)
        if status != 0:
            self._forget_error()
            what = f"{calls.register_name} of {nbytes} bytes failed with status {status}"
            if status == calls.already_registered:
                raise StateError(f"{what}: a part of it is registered already")
            raise OSError(what)
        registered = list(self._registered)
        insort(registered, (tensor.data_ptr(), tensor.data_ptr() + nbytes))
        self._registered = registered

    def _make_rings(self) -> None:
        """What is left may be little: entries as large as the system lets them be. A stream without
        a ring leaves copies of other memory to the driver, which has its own."""
        for stream in self._streams:
            nbytes = _RING_BYTES
            while nbytes >= _LEAST_RING_BYTES:
                # Shared, so that a forked process does not make a write here copy its page.
                slab = torch.frombuffer(mmap.mmap(-1, 2 * nbytes), dtype=torch.uint8)
                try:
                    self.register(slab)
                except OSError:
                    nbytes //= 2
                    continue
                self._rings[stream.stream_id] = _Ring(self._kind, (slab[:nbytes], slab[nbytes:]))
                break

    def unpin(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if self._refused.pop(address, None) is not None:
            return
        calls = self._kind.registration
        if calls is None:
            raise StateError("unpin: this slab was never pinned")
        status = calls.unregister(address)
        if status != 0:
            self._forget_error()
            raise StateError(f"{calls.unregister_name} failed with status {status}: never pinned?")
        self._registered = [region for region in self._registered if region[0] != address]

    def _forget_error(self) -> None:
        """The runtime keeps a failed call's error for the next kernel launch, which would report it
        as its own: launch one."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy contiguous bytes between host and device on `stream`, the current one. The call
        returns when they are there where the host side is not registered."""
        host = target if source.device == self._device else source
        address = host.data_ptr()
        inside = cuts(self._registered, address, address + host.nbytes)
        if not inside and not self._rings:
            target.copy_(source, non_blocking=True)
            return
        there, here = (flat.view(-1).view(torch.uint8) for flat in (target, source))
        ends = [0, *(at - address for at in inside), host.nbytes]  # [Note: registered]
        for begin, end in pairwise(ends):
            self._copy_bytes(there[begin:end], here[begin:end], address + begin, stream)

    def _copy_bytes(
        self, target: torch.Tensor, source: torch.Tensor, address: int, stream: Any
    ) -> None:
        """Of memory that is registered from its address on, or not at all."""
        ring = self._rings.get(stream.stream_id)
        if ring is None or _is_inside(self._registered, address):
            target.copy_(source, non_blocking=True)
            return
        if target.device == self._device:  # [Note: refused]
            ring.fetch(target, source, stream)
        else:
            ring.drain(target, source, stream)

    def close(self) -> None:
        """Give the rings back. Every copy has ended."""
        for ring in self._rings.values():
            self.unpin(ring.entries[0])
        self._rings.clear()
