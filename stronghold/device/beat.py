"""A clock's thread: calls something again and again, until it is closed.

Owns the thread. What it calls must not wait and must not raise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stronghold.device.fence import THREAD_PREFIX
from stronghold.native import naming_threads


class Beat:
    """Calls `work` now and every `interval_s` seconds, on a thread of its own."""

    def __init__(self, name: str, interval_s: float, work: Callable[[], None]) -> None:
        self._end = threading.Event()
        self._interval_s = interval_s
        self._work = work
        self._thread = threading.Thread(target=self._loop, name=THREAD_PREFIX + name, daemon=True)
        with naming_threads(f"the {name} of this rank"):
            self._thread.start()

    def _loop(self) -> None:
        self._work()
        while not self._end.wait(self._interval_s):
            self._work()

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._end.set()
        self._thread.join()
