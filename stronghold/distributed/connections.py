"""Why a collective has failed: which rank has gone, or for what each rank waits.

Owns a process group over gloo that is idle while all ranks are well. It never ends a process: a
launcher (torchrun, deepspeed) does. It has no heartbeat and no thread. Any thread may enter.

[Note: a rank that has gone]
1. A process ends. The kernel closes its connections, and the launcher ends the other processes.
2. Meanwhile a collective of another rank fails, since gloo sees a closed connection.
3. That rank tries its connections of this group one by one. The closed ones name the lost ranks.
4. If none is closed, a rank is stopped, or busy, or waits in another collective. The collective has
   then failed by its time-out, `stronghold.rank_timeout_s`.
5. The ranks that have failed meet in torch's `monitored_barrier`. Its error names those that do not
   come within `MEET_S`.
6. If all come, they wait for each other. Each sends the name of its collective, and the error of
   every rank lists them.
7. A rank that has failed closes the connections of all of its groups. So no lane of any rank waits
   for it, neither now nor when the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from stronghold.errors import RankError

logger = logging.getLogger("stronghold")

CLOSING_S = 0.5  # between the ends of two connections of one process, at most
MEET_S = 10.0
TAG = 7  # of messages that no rank receives
ADVICE = "Load the last checkpoint, on as many ranks as are left"


class Connections:
    """The connections to the ranks `members` (global numbers), over torch's group `handle`."""

    def __init__(self, members: Sequence[int], handle: Any) -> None:
        self._others = [rank for rank in members if rank != distributed.get_rank()]
        self.handle = handle
        self._lock = threading.Lock()
        self._sent: list[Any] = []  # gloo keeps a message that nothing receives
        self._endings: list[Callable[[], None]] = []  # of the other groups of this rank
        self._reason = ""
        self.failure: RankError | None = None  # no group is of use from then on

    def add(self, handle: Any, backend: str, rank: int) -> None:
        """Another group of this rank, of which `rank` is another one: it ends with this one."""
        close = partial(close_connections, handle, rank)
        self._endings.append(handle.abort if backend == "nccl" else close)

    def closed(self) -> list[int]:
        """Return the ranks whose connection is closed."""
        lost = []
        for rank in self._others:
            try:
                byte = torch.zeros(1, dtype=torch.uint8)
                self._sent.append(distributed.isend(byte, rank, group=self.handle, tag=TAG))
            except RuntimeError:
                lost.append(rank)
        return lost

    def check(self, operation: str) -> None:
        """Raise RankError when a rank has gone."""
        if lost := self.closed():
            raise RankError(f"{operation}: {_closed_by(lost)}. {ADVICE}")

    def explain(self, operation: str, error: BaseException) -> RankError:
        """Return the error to raise for a collective that has failed with `error`. Waits `MEET_S`
        for the other ranks where no connection is closed."""
        with self._lock:
            if not self._reason:
                self._reason = self._find_reason(operation)
        words = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
        result = RankError(f"{operation}: {self._reason} ({words}). {ADVICE}")
        logger.error("%s", result)  # before a launcher ends this process
        self.end(result)
        return result

    def end(self, error: RankError) -> None:
        """This rank cannot go on: end its groups for all of their ranks. Its next collective raises
        `error`, or the error before it."""
        if self.failure is None:
            self.failure = error
            self._reason = self._reason or str(error)
            self._endings.append(partial(close_connections, self.handle, self._others[0]))
            for end in self._endings:
                with contextlib.suppress(RuntimeError):  # ended by itself meanwhile
                    end()

    def _find_reason(self, operation: str) -> str:
        deadline = time.monotonic() + CLOSING_S
        while time.monotonic() < deadline:
            if lost := self.closed():
                return _closed_by(lost)
            time.sleep(0.02)
        operations: list[Any] = [""] * (len(self._others) + 1)
        try:
            meet = timedelta(seconds=MEET_S)
            distributed.monitored_barrier(self.handle, timeout=meet, wait_all_ranks=True)
            distributed.all_gather_object(operations, operation, group=self.handle)
        except RuntimeError as error:
            lost = self.closed()
            return _closed_by(lost) if lost else str(error).partition("\n")[0]
        waits = ", ".join(f"rank {rank} in {name}" for rank, name in enumerate(operations))
        return f"the ranks wait for each other: {waits}"

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        self._endings.clear()
        handle, self.handle = self.handle, None
        if handle is not None and distributed.is_initialized():
            distributed.destroy_process_group(handle)


def close_connections(handle: Any, rank: int) -> None:
    """End a group over gloo for all of its ranks, of which `rank` is another one. Raises
    RuntimeError: gloo closes all connections of a group in which a receive times out."""
    work = distributed.irecv(torch.zeros(1), rank, group=handle, tag=TAG + 1)
    if work is not None:
        work.wait(timedelta(milliseconds=1))


def _closed_by(ranks: Sequence[int]) -> str:
    return "connection closed by " + ", ".join(f"rank {rank}" for rank in ranks)
