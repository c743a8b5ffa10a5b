"""Registers host slabs with a GPU's driver, and copies slabs that the system refuses to register.

Owns the registration of host slabs, and the rings of refused ones. The training thread enters, and
lanes do for copies.

[Note: registered] The driver makes `copy_(non_blocking=True)` one asynchronous copy if torch or we
have registered the host memory. From other memory it copies through its buffers, and blocks the
caller. One copy may not span registered and other memory: CUDA returns CUDA_ERROR_INVALID_VALUE.
Several ranks share weights of which each rank registers one range. So a copy has these steps:
1. `GpuPinning.copy` cuts the bytes where a registered region begins or ends (`cuts`).
2. It copies each piece, which is registered as a whole or not at all.

[Note: refused] Some systems register little memory or none: WSL2, containers, `ulimit -l`. The
lane's thread copies refused slabs through a small registered ring per stream. There is no race:
1. The lane's thread reads or writes the slab itself, not through the driver.
2. It has done so when the operation is issued.
3. A later operation waits at least for the issue. So it meets no copy that is still under way.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

from stronghold.devices.first_touch import touch_now
from stronghold.devices.kinds import DeviceKind
from stronghold.devices.numa import running_on
from stronghold.errors import ErrorPage, StateError, format_size, page_link

logger = logging.getLogger("stronghold")

_RING_BYTES = 8 << 20  # the most for one of a ring's two entries
_LEAST_RING_BYTES = 64 << 10


class HostPinning:
    """Registers host slabs. This class does nothing: the device's memory is the host's."""

    def pin(self, tensor: torch.Tensor) -> None:
        """Register a host slab for direct transfers, if the system allows it.

        A refused slab's transfers are slower. The slab must live until `unpin`.
        """

    def register(self, tensor: torch.Tensor) -> None:
        """Register a host slab. Raises OSError if the system refuses it."""
        self.pin(tensor)

    def unpin(self, tensor: torch.Tensor) -> None:
        """Undo `pin`."""


def cuts(regions: Sequence[tuple[int, int]], begin: int, end: int) -> list[int]:
    """Return the addresses between `begin` and `end` at which a region begins or ends.

    `regions` are pairs [begin, end) of addresses, in order, without overlaps.
    """
    addresses: list[int] = []
    first = bisect_left(regions, (begin, begin))
    for region in regions[max(0, first - 1) :]:
        if region[0] >= end:
            break
        for address in region:
            if begin < address < end and address not in addresses:
                addresses.append(address)
    return addresses


def _is_inside(regions: Sequence[tuple[int, int]], address: int) -> bool:
    """Return whether the address lies in one of `regions` (see `cuts`)."""
    index = bisect_right(regions, address, key=itemgetter(0)) - 1
    return index >= 0 and address < regions[index][1]


class _Ring:
    """Copies other memory of one stream through two registered entries, in turn."""

    def __init__(self, kind: DeviceKind, entries: Sequence[torch.Tensor]) -> None:
        self._kind = kind
        self.entries = entries
        self._free: list[Any] = [None, None]  # the event after which an entry is free

    def fetch(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes from the host to the device. Returns when the last copy is enqueued."""
        for turn, target_bytes, source_bytes in self._turns(target, source):
            event = self._free[turn]
            if event is not None:
                # the calling thread waits for the stream's read of the entry
                event.synchronize()
            entry = self.entries[turn][: source_bytes.numel()]
            entry.copy_(source_bytes)
            target_bytes.copy_(entry, non_blocking=True)
            self._free[turn] = self._kind.recorded(stream)

    def drain(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes from the device to the host. Returns when the last byte has arrived."""
        arriving: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        for turn, target_bytes, source_bytes in self._turns(target, source):
            if len(arriving) == len(self.entries):
                self._arrive(*arriving.popleft())
            entry = self.entries[turn][: target_bytes.numel()]
            entry.copy_(source_bytes, non_blocking=True)
            event = self._kind.recorded(stream)
            arriving.append((event, target_bytes, entry))
        while arriving:
            self._arrive(*arriving.popleft())

    @staticmethod
    def _arrive(event: Any, target: torch.Tensor, entry: torch.Tensor) -> None:
        # the calling thread waits for the stream's write of the entry
        event.synchronize()
        target.copy_(entry)

    def _turns(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the entry's number, and the target's and the source's bytes, of each turn."""
        size = self.entries[0].numel()
        for turn, begin in enumerate(range(0, target.numel(), size)):
            end = begin + size
            yield turn % 2, target[begin:end], source[begin:end]


class GpuPinning(HostPinning):
    """Registers host slabs with a GPU's driver, and copies between them and the GPU.

    `streams` are the streams that copy slabs. Each gets a ring when the system refuses a slab.
    `cores`: pages that registration commits lie next to these (`numa`). Empty: anywhere.
    """

    def __init__(
        self,
        kind: DeviceKind,
        device: torch.device,
        streams: Sequence[Any],
        cores: tuple[int, ...] = (),
    ) -> None:
        self._cores = cores
        self._kind = kind
        self._device = device
        self._streams = streams
        # The list is replaced and never changed: lanes may read it at any moment.
        self._registered: list[tuple[int, int]] = []
        # bytes of slabs that are not registered, by address
        self._refused: dict[int, int] = {}
        self._rings: dict[int, _Ring] = {}  # by stream; [Note: refused]

    @property
    def has_refused_slabs(self) -> bool:
        """True while a slab lives that the system refused to register."""
        return bool(self._refused)

    @property
    def pinned_bytes(self) -> int:
        """The registered bytes of slabs and rings."""
        return sum(end - begin for begin, end in self._registered)

    def pin(self, tensor: torch.Tensor) -> None:
        try:
            self.register(tensor)
        except OSError as error:
            pinned = self.pinned_bytes
            is_first = not self._refused
            self._refused[tensor.data_ptr()] = tensor.nbytes
            if is_first:
                self._make_rings()
                logger.warning(
                    "the system lets this process pin %s of host memory, and refuses %s more "
                    "(%s). Copies of other memory pass through %s that are pinned: exact, but "
                    "slower. Raise the limit: ulimit -l unlimited; in a container --ulimit "
                    "memlock=-1; under WSL2 more memory in .wslconfig\nSee %s",
                    format_size(pinned),
                    format_size(tensor.nbytes),
                    error,
                    format_size(self.pinned_bytes - pinned),
                    page_link(ErrorPage.PINNED_MEMORY),
                )

    def register(self, tensor: torch.Tensor) -> None:
        calls = self._kind.registration
        nbytes = tensor.numel() * tensor.element_size()
        if calls is None:
            raise OSError(f"{self._kind.name} has no call that registers host memory")
        with running_on(self._cores):
            touch_now(tensor)  # registration would commit the pages with one thread
            status = calls.register(tensor.data_ptr(), nbytes)
        if status != 0:
            self._forget_error()
            failure = f"{calls.register_name} of {nbytes} bytes failed with status {status}"
            if status == calls.already_registered:
                raise StateError(f"{failure}: a part of it is registered already")
            raise OSError(failure)
        registered = list(self._registered)
        insort(registered, (tensor.data_ptr(), tensor.data_ptr() + nbytes))
        self._registered = registered

    def _make_rings(self) -> None:
        """Make a ring for each stream, with the largest entries that the system allows.

        The system may have little memory left to register, and a stream may get no ring. Then the
        driver copies that stream's other memory through its buffers.
        """
        for stream in self._streams:
            nbytes = _RING_BYTES
            while nbytes >= _LEAST_RING_BYTES:
                # The mapping is shared: after a fork a write must not copy the page.
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
        """Launch a kernel that takes the error of a failed call.

        The runtime keeps such an error, and reports it at the next launch.
        """
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy contiguous bytes between host and device on `stream`, the current one.

        If the host side is not registered, the call returns when the bytes have arrived.
        """
        host = target if source.device == self._device else source
        address = host.data_ptr()
        edges = cuts(self._registered, address, address + host.nbytes)
        if not edges and not self._rings:
            target.copy_(source, non_blocking=True)
            return
        target_bytes = target.view(-1).view(torch.uint8)
        source_bytes = source.view(-1).view(torch.uint8)
        # [Note: registered]
        offsets = [0, *(edge - address for edge in edges), host.nbytes]
        for begin, end in pairwise(offsets):
            self._copy_bytes(
                target_bytes[begin:end], source_bytes[begin:end], address + begin, stream
            )

    def _copy_bytes(
        self, target: torch.Tensor, source: torch.Tensor, address: int, stream: Any
    ) -> None:
        """Copy bytes whose host memory, at `address`, is registered as a whole or not at all."""
        ring = self._rings.get(stream.stream_id)
        if ring is None or _is_inside(self._registered, address):
            target.copy_(source, non_blocking=True)
            return
        if target.device == self._device:  # [Note: refused]
            ring.fetch(target, source, stream)
        else:
            ring.drain(target, source, stream)

    def close(self) -> None:
        """Unregister the rings. Every copy has ended."""
        for ring in self._rings.values():
            self.unpin(ring.entries[0])
        self._rings.clear()
