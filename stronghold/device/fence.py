"""Fences: what an operation on a lane yields, and what a later one waits for.

Owns the state of one operation: queued, issued, done or failed ([Note: issued and done] of `base`).
A lane's thread issues or fails it, once; any thread may wait.

[Note: heard] An error goes from fence to fence, for a lane passes on what it waited for. Somebody
has heard it when it is raised in a thread that is no lane's. What nobody has heard is raised when
the engine closes, for after that nobody waits any more.

[Note: interrupts] Ctrl-C may end a wait at any bytecode. `threading.Event` holds a lock meanwhile,
which it may then leave held, and the lane that wants to tell of the operation's end hangs for good.
So each wait brings a lock of its own, which nobody else ever waits for.
"""

from __future__ import annotations

import threading
from typing import Protocol

from stronghold.errors import LaneError

THREAD_PREFIX = "stronghold:"


def told(error: LaneError) -> LaneError:
    """`error`, which the calling thread is about to raise ([Note: heard])."""
    if not threading.current_thread().name.startswith(THREAD_PREFIX):
        error.heard = True
    return error


class DeviceEvent(Protocol):
    """What a stream records: `torch.cuda.Event` has this shape."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Fence:
    """Marks the end of one operation. Made by `Lane.submit` and `Device.record_compute` alone."""

    __slots__ = ("_error", "_event", "_issued", "_waiting", "lane", "operation")

    def __init__(self, lane: str, operation: str) -> None:
        self.lane = lane
        self.operation = operation
        self._issued = False
        self._waiting: list[threading.Lock] = []  # held, each until the fence is issued
        self._event: DeviceEvent | None = None
        self._error: LaneError | None = None

    def issue(self, event: DeviceEvent | None) -> None:
        """The work is enqueued (`event` fires when it is done) or, without an event, done."""
        self._event = event
        self._wake()

    def fail(self, error: LaneError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        # In this order, and the reverse in `wait_issued`: who is not woken here finds it issued.
        self._issued = True
        while self._waiting:
            self._waiting.pop().release()

    def wait_issued(self) -> DeviceEvent | None:
        """Block the calling thread until issued; raise the operation's error if it failed."""
        if not self._issued:
            mine = threading.Lock()  # [Note: interrupts]
            mine.acquire()
            self._waiting.append(mine)
            if not self._issued:
                mine.acquire()
        if self._error is not None:
            raise told(self._error)
        return self._event

    def wait(self) -> None:
        """Block the calling thread until done; raise the operation's error if it failed."""
        event = self.wait_issued()
        if event is not None:
            event.synchronize()

    @property
    def done(self) -> bool:
        return self._issued and (self._event is None or self._event.query())

    @property
    def failed(self) -> bool:
        """Whether `wait` would raise; False as long as that is not known."""
        return self._error is not None


def completed(lane: str, operation: str) -> Fence:
    """A fence of work that is already done."""
    fence = Fence(lane, operation)
    fence.issue(None)
    return fence
