"""Who of the node's ranks is alive, and how far each has come.

Owns a page of memory that the ranks of a node have in common, with a row for each, and the thread
that keeps this rank's row young. Never ends a process: whoever waits for other ranks asks `check`,
which raises RankError with the names of those that will not come. Entered by the beat's thread, the
lanes and the training thread; a row has one writer per field.

[Note: silence] A rank is silent for as long as this process has seen its counter stand still.
Clocks are not compared, and a pause of this process itself (a debugger, a suspended machine) starts
the observation anew: else all ranks would give each other up when they wake.

[Note: slow] A rank whose counter moves is alive. It may be slow for good reasons (a checkpoint, an
evaluation), so that who waits for it says its name now and then, and goes on waiting until the
process group's own time-out.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stronghold.device.beat import Beat
from stronghold.errors import RankError
from stronghold.memory.shared import Exchange, NodeMemory

logger = logging.getLogger("stronghold")

INTERVAL_S = 0.5
MESSAGE_BYTES = 400
ROW = np.dtype(
    [
        ("pid", np.int64),
        ("started", np.int64),  # of the process, in ticks since boot: its number may be used again
        ("beats", np.int64),
        ("left", np.int64),
        ("failed", np.int64),
        ("arrived", np.int64, 4),  # collectives begun, by group
        ("message", f"S{MESSAGE_BYTES}"),
    ]
)


class Watch:
    """`ranks[i]` is the global rank of process `index` i of the node; `silence_s` is how long one
    may be silent ([Note: silence]).
    """

    def __init__(self, ranks: list[int], index: int, silence_s: float, exchange: Exchange) -> None:
        self._ranks = ranks
        self._index = index
        self._silence_s = silence_s
        self._memory = NodeMemory("watch", len(ranks) * ROW.itemsize, index, exchange)
        self._rows: Any = self._memory.bytes.numpy().view(ROW)
        self._mine = self._rows[index]
        self._mine["pid"], self._mine["started"] = os.getpid(), _started(os.getpid()) or 0
        now = time.monotonic()
        self._own_s = now
        self._seen = [(-1, now)] * len(ranks)
        self.on_loss: Callable[[], None] | None = None  # called once, by the beat's thread
        exchange.barrier()
        self._beat = Beat("watch", INTERVAL_S, self._tick)
        atexit.register(_last_words, weakref.ref(self))

    def _tick(self) -> None:
        now = time.monotonic()
        paused = now - self._own_s > 4 * INTERVAL_S
        self._own_s = now
        self._mine["beats"] += 1
        for i, (beats, since_s) in enumerate(self._seen):
            found = int(self._rows[i]["beats"])
            if found != beats or paused:
                self._seen[i] = (found, now)
            else:
                self._seen[i] = (beats, since_s)
        on_loss = self.on_loss
        # One that has closed its engine took part in all that it was asked for.
        stayed = [i for i in self._others() if not self._rows[i]["left"]]
        if on_loss is not None and any(self._loss(i) for i in stayed):
            self.on_loss = None
            on_loss()

    # -- asked by whoever waits -------------------------------------------------------------------
    def begin(self, group: int) -> None:
        """This rank begins its next collective of the group."""
        self._mine["arrived"][group] += 1

    def check(self, operation: str) -> None:
        """RankError when a rank of the node has ended, failed or fallen silent."""
        lost = [found for i in self._others() if (found := self._loss(i))]
        if lost:
            raise RankError(
                f"{operation}: {'; '.join(lost)}. Load the last checkpoint, on as many ranks as "
                "are left"
            )

    def explain(self, operation: str, group: int, error: BaseException) -> RankError:
        """What a failed collective means: the rank that has gone, as far as it can be told."""
        deadline = time.monotonic() + 2.0  # a process that is killed takes a moment to be gone
        while time.monotonic() < deadline:
            try:
                self.check(operation)
            except RankError as found:
                return found
            time.sleep(0.05)
        behind = self.behind(group) or "unknown which"
        return RankError(f"{operation}: {error} (ranks that have not come: {behind})")

    def behind(self, group: int) -> str:
        """The ranks that have begun fewer collectives of the group than this one."""
        mine = int(self._mine["arrived"][group])
        return ", ".join(
            f"rank {self._ranks[i]} (process {self._rows[i]['pid']})"
            for i in self._others()
            if int(self._rows[i]["arrived"][group]) < mine
        )

    def _others(self) -> list[int]:
        return [i for i in range(len(self._ranks)) if i != self._index]

    def _loss(self, i: int) -> str:
        row = self._rows[i]
        name = f"rank {self._ranks[i]} (process {row['pid']})"
        if row["failed"]:
            return f"{name} failed: {row['message'].decode(errors='replace')}"
        if row["left"]:
            return f"{name} has closed its engine, and will not come"
        state = _state(int(row["pid"]), int(row["started"]))
        if state is None:
            return f"{name} has ended without a word: it was killed, perhaps for want of memory"
        silent_s = time.monotonic() - self._seen[i][1]
        if silent_s > self._silence_s:
            stopped = " and is stopped" if state in "Tt" else ""
            return f"{name} was silent for {silent_s:.0f} s{stopped}"
        return ""

    # -- what this rank says ----------------------------------------------------------------------
    def fail(self, message: str) -> None:
        """The others end with this message when they next wait."""
        self._mine["message"] = message.encode()[:MESSAGE_BYTES]
        self._mine["failed"] = 1

    def close(self) -> None:
        """This rank takes part no more. Safe to call twice."""
        self._mine["left"] = 1
        self._beat.close()
        self._memory.close()


def _last_words(watch: weakref.ref[Watch]) -> None:
    """The exception that ends the process, for the others' messages."""
    alive = watch()
    error = getattr(sys, "last_value", None)
    if alive is not None and error is not None:
        alive.fail(f"{type(error).__name__}: {error}")


def _state(pid: int, started: int) -> str | None:
    """The state of a process as the kernel says it; None when it has ended, reaped or not."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if int(fields[19]) == started and fields[0] not in "ZX":
            return fields[0]
    return None


def _started(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    return None
