"""Threads beside the caller's, for work that belongs to no device.

Owns no lane and no fence: a caller waits for the futures that it gets.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from stronghold.devices.lane_name import THREAD_PREFIX
from stronghold.native import naming_threads


def open_worker(name: str, num_threads: int = 1) -> ThreadPoolExecutor:
    """Start threads that run submitted calls. One thread runs them in their order.

    The end of its `with` block waits for all of them. Raises what `naming_threads` raises if the
    system refuses a thread.
    """
    worker = ThreadPoolExecutor(num_threads, thread_name_prefix=THREAD_PREFIX + name)
    with naming_threads(f"the {name} thread"):
        worker.submit(_nothing).result()
    return worker


def _nothing() -> None:
    return None
