"""Threads beside the caller's, for work that belongs to no device.

Owns no lane and no fence: a caller waits for the futures that it gets.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from stronghold.devices.lane_name import THREAD_PREFIX
from stronghold.native import naming_threads


def open_workers(name: str, num_threads: int) -> ThreadPoolExecutor:
    """Start threads that run submitted calls.

    The end of its `with` block waits for all calls. Raises what `naming_threads` raises if the
    system refuses a thread.
    """
    workers = ThreadPoolExecutor(num_threads, thread_name_prefix=THREAD_PREFIX + name)
    # The pool starts a thread for a call only if none is idle. So all first calls meet.
    meeting = threading.Barrier(num_threads)
    with naming_threads(f"the {name} threads"):
        try:
            for call in [workers.submit(meeting.wait) for _ in range(num_threads)]:
                call.result()
        except BaseException:
            meeting.abort()
            workers.shutdown()
            raise
    return workers
