"""Host memory: touches new pages ahead of their use, registers slabs with a GPU's driver.

Linux commits a page, and clears it, at its first touch: 0.4 to 12 GiB/s for one thread. An update
or a transfer that meets new pages waits for each. Owns the threads that touch them instead, and the
registration of slabs. Memory may be in use meanwhile, since a touch changes no byte. The training
thread enters, and lanes do for copies.

[Note: registered] The driver makes `copy_(non_blocking=True)` one asynchronous copy if torch or we
have registered the host memory. The system may refuse that (WSL2, containers, `ulimit -l`). The
driver copies such memory through its own buffers, in the stream's order, and blocks the caller.
One copy may not span registered and other memory: CUDA returns CUDA_ERROR_INVALID_VALUE. Several
ranks share weights of which each rank registers one range. So a copy has these steps:
1. `GpuPinning.copy` cuts the bytes where a registered region begins or ends (`cuts`).
2. It copies each piece, which is registered as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import Empty, SimpleQueue

import torch

from stronghold.devices.threads import THREAD_PREFIX
from stronghold.errors import ErrorPage, StateError, format_size, page_link
from stronghold.native import available_cores, touch

logger = logging.getLogger("stronghold")

_PORTABLE = 1  # the flag cudaHostRegisterPortable
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_PIECE_BYTES = 32 << 20  # one thread takes so many bytes at a time
_NICENESS = 19  # compute and copies go first: they are waited for


def touch_now(slab: torch.Tensor) -> None:
    """Commit a slab's pages with all cores of the caller.

    If the system refuses threads, the slab's first use commits its pages.
    """
    pieces = slab.view(-1).view(torch.uint8).split(_PIECE_BYTES)
    num_threads = min(available_cores(), len(pieces))
    with contextlib.suppress(RuntimeError), ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(touch, pieces))


class FirstTouch:
    """Touches slabs in the background with all cores, in the order in which they come.

    nbytes   of these slabs
    seconds  from the first slab until now, or until all were touched
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._begun_s = 0.0
        self._pieces: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, slab: torch.Tensor) -> None:
        """Touch a slab of bytes soon. It may be used at once, and lives until it was touched."""
        if not self._threads:
            self._begun_s = time.perf_counter()
            self._start()
        if self._threads:  # else pieces that no thread takes keep the slab alive
            self.nbytes += slab.nbytes
            for piece in slab.split(_PIECE_BYTES):
                self._pieces.put(piece)

    def _start(self) -> None:
        with contextlib.suppress(RuntimeError):  # as in `touch_now`
            for _ in range(available_cores()):
                # a daemon: the end of the process waits for no touch
                thread = threading.Thread(
                    target=self._run, name=THREAD_PREFIX + "touch", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # Linux has a niceness for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (piece := self._pieces.get()) is not None:
            touch(piece)
            self.seconds = time.perf_counter() - self._begun_s

    def close(self) -> None:
        """Touch nothing more. Safe to call twice."""
        with contextlib.suppress(Empty):
            while True:
                self._pieces.get_nowait()
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


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


class GpuPinning(HostPinning):
    """Registers host slabs with a GPU's driver, and copies between them and the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The list is replaced and never changed: lanes may read it at any moment.
        self._registered: list[tuple[int, int]] = []
        # bytes of slabs that are not registered, by address
        self._refused: dict[int, int] = {}

    @property
    def has_refused_slabs(self) -> bool:
        """True while a slab lives that the system refused to register."""
        return bool(self._refused)

    @property
    def pinned_bytes(self) -> int:
        """The registered bytes of slabs."""
        return sum(end - begin for begin, end in self._registered)

    def pin(self, tensor: torch.Tensor) -> None:
        try:
            self.register(tensor)
        except OSError as error:
            is_first = not self._refused
            self._refused[tensor.data_ptr()] = tensor.nbytes
            if is_first:
                logger.warning(
                    "the system lets this process pin %s of host memory, and refuses %s more "
                    "(%s). The driver copies other memory through its own buffers: exact, but "
                    "slower. Raise the limit: ulimit -l unlimited; in a container --ulimit "
                    "memlock=-1; under WSL2 more memory in .wslconfig\nSee %s",
                    format_size(self.pinned_bytes),
                    format_size(tensor.nbytes),
                    error,
                    page_link(ErrorPage.PINNED_MEMORY),
                )

    def register(self, tensor: torch.Tensor) -> None:
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        touch_now(tensor)  # registration would commit the pages with one thread
        status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if status != 0:
            self._forget_error()
            failure = f"cudaHostRegister of {nbytes} bytes failed with status {status}"
            if status == _ALREADY_REGISTERED:
                raise StateError(f"{failure}: a part of it is registered already")
            raise OSError(failure)
        registered = list(self._registered)
        insort(registered, (address, address + nbytes))
        self._registered = registered

    def unpin(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if self._refused.pop(address, None) is not None:
            return
        status = int(torch.cuda.cudart().cudaHostUnregister(address))
        if status != 0:
            self._forget_error()
            raise StateError(f"cudaHostUnregister failed with status {status}: never pinned?")
        self._registered = [region for region in self._registered if region[0] != address]

    def _forget_error(self) -> None:
        """Launch a kernel that takes the error of a failed call.

        The runtime keeps such an error, and reports it at the next launch.
        """
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes between host and device on the current stream.

        Blocks the caller if the host side is not registered ([Note: registered]).
        """
        host = target if source.device == self._device else source
        address = host.data_ptr()
        edges = cuts(self._registered, address, address + host.nbytes)
        if not edges:
            target.copy_(source, non_blocking=True)
            return
        target_bytes = target.view(-1).view(torch.uint8)
        source_bytes = source.view(-1).view(torch.uint8)
        # [Note: registered]
        offsets = [0, *(edge - address for edge in edges), host.nbytes]
        for begin, end in pairwise(offsets):
            target_bytes[begin:end].copy_(source_bytes[begin:end], non_blocking=True)
