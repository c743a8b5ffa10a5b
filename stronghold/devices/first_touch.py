"""First touch: commits the pages of host memory before their first use.

Linux commits a page, and clears it, at its first touch: 0.4 to 12 GiB/s for one thread. An update
or a transfer that meets new pages waits for each. Owns the threads that touch them instead. Memory
may be in use meanwhile, since a touch changes no byte.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch

from stronghold.devices.lane_name import THREAD_PREFIX
from stronghold.native import available_cores, touch

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
        if self._threads:  # else nobody would take the pieces, and they would keep the slab alive
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
