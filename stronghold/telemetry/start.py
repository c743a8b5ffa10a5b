"""The start of a run: where its seconds go until the second step has ended.

The second step waits for the first updates, and these for new memory. The training thread enters.
"""

from __future__ import annotations

import time

import psutil

_STEPS = ("in the first step", "in the second")


class Start:
    """Seconds of the parts of a start, in their order. `initialize` begins now."""

    def __init__(self) -> None:
        process_s = time.time() - psutil.Process().create_time()
        self._seconds = {"before initialize (imports, the program's own work)": process_s}
        self._last_s = time.perf_counter()

    def end(self, part: str) -> None:
        """A part has ended now, and the next one begins."""
        now_s = time.perf_counter()
        self._seconds[part] = now_s - self._last_s
        self._last_s = now_s

    def end_step(self) -> bool:
        """A step has ended. Returns True if it was the second one."""
        is_second = _STEPS[0] in self._seconds
        self.end(_STEPS[is_second])
        return is_second

    def __str__(self) -> str:
        parts = ", ".join(f"{seconds:.1f} {part}" for part, seconds in self._seconds.items())
        return f"start: {sum(self._seconds.values()):.1f} s, of them {parts}"
