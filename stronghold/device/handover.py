"""Work that a thread of this package may not do itself.

Owns the thread that does it instead. Entered by whoever the interpreter's collector comes upon: it
frees what was forgotten on any thread, a lane's too, and a lane that ends its engine would wait for
operations that come after its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from stronghold.device.fence import THREAD_PREFIX


def off_lanes(work: Callable[[], object]) -> None:
    """Run `work`: now, or from a thread of this package on a new one, which the end of the process
    waits for. Nobody hears what it raises.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    if threading.current_thread().name.startswith(THREAD_PREFIX):
        threading.Thread(target=run, name=THREAD_PREFIX + "handover").start()
    else:
        run()
