"""What is still owed to the disk when the process ends.

Owns the list of what lives, weakly, and the call at the interpreter's exit, before it takes modules
down. Programs whose framework made the engine never destroy it: their last checkpoint and their
trace are finished here. The training thread alone enters.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

logger = logging.getLogger("stronghold")


class Owing(Protocol):
    """Whoever has work that outlasts the program's last line."""

    def finish(self) -> None:
        """Do it, once. May be called after everything was done already."""
        ...


_living: weakref.WeakSet[Owing] = weakref.WeakSet()


def finish_at_exit(owing: Owing) -> None:
    """Call its `finish` when the process ends, if it lives then. What that raises is logged."""
    _living.add(owing)


@atexit.register
def _finish_all() -> None:
    for owing in list(_living):
        try:
            owing.finish()
        except Exception:
            logger.exception("the process ends with work unfinished")
