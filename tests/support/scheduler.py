"""A scheduler that is against every race: now and then threads of running processes, chosen at
random, get time only when nobody else wants it. What depends on which thread comes first shows,
also in code that no injected delay reaches.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator, Sequence

STARVED = 0.4  # of all threads, at any time
TURNS_S = (0.02, 0.1, 0.3)


@contextlib.contextmanager
def hostile_scheduler(pids: Sequence[int], seed: int) -> Iterator[None]:
    """While this is entered, of the processes `pids` and of what they start as threads."""
    end, random_ = threading.Event(), random.Random(seed)

    def turn() -> None:
        for pid in pids:
            for thread in os.listdir(f"/proc/{pid}/task"):
                policy = os.SCHED_IDLE if random_.random() < STARVED else os.SCHED_OTHER
                with contextlib.suppress(OSError):  # it has ended
                    os.sched_setscheduler(int(thread), policy, os.sched_param(0))

    def loop() -> None:
        while not end.wait(random_.choice(TURNS_S)):
            with contextlib.suppress(OSError):
                turn()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
