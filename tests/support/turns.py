"""Turns of tests that run in several processes: some need the machine to themselves.

A test that is `alone` (a law of time, a law of who waits for whom on a GPU, a count of what the
whole machine holds) waits until the tests of the other processes have ended, and they wait for it.
Nobody starves: whoever comes next keeps the gate until the turn is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the machine together with others or, `alone`, without them. All processes name the same
    folder; a process that dies gives its turn back.
    """
    gate, room = (os.open(folder / name, os.O_CREAT | os.O_RDWR) for name in ("gate", "room"))
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
    finally:
        os.close(room)
        os.close(gate)
