"""Fences and records: what an operation yields, and what a later one must wait for.

Owns the state of one operation (queued, issued, done or failed: [Note: issued and done] of `base`)
and the rule by which it is ordered: every array and every buffer carries a `Record`, and nobody
else keeps a fence for later. A reader waits for the newest writer, a writer for the newest writer
and for every reader since. A lane's thread issues or fails a fence, once; any thread may wait.
Records are entered by the training thread, and by autograd's in backward, never by both at once,
and by no lane's.

Two things are not derived, and are written down where they stand: memory that other processes
write, and user code that reads a parameter.

[Note: surfaced] An error goes from fence to fence, for a lane passes on what it waited for. It has
surfaced when it is raised in a thread that is no lane's. One that never did is raised when the
engine closes, for after that nobody waits any more.

[Note: interrupts] Ctrl-C may end a wait at any bytecode. `threading.Event` holds a lock meanwhile,
which it may then leave held, and the lane that wants to tell of the operation's end hangs for good.
So each wait brings a lock of its own, which nobody else ever waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from stronghold.errors import LaneError

THREAD_PREFIX = "stronghold:"


def surfacing(error: LaneError) -> LaneError:
    """`error`, which the calling thread is about to raise ([Note: surfaced])."""
    if not threading.current_thread().name.startswith(THREAD_PREFIX):
        error.surfaced = True
        if error.first is not None:  # whoever is told of one failure knows
            error.first.surfaced = True
    return error


class DeviceEvent(Protocol):
    """What a stream records: `torch.cuda.Event` has this shape."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Fence:
    """Marks the end of one operation. Made by `Lane.submit` and `Device.record_compute` alone."""

    __slots__ = ("_error", "_event", "_waiting", "issued", "lane", "operation")

    def __init__(self, lane: str, operation: str) -> None:
        self.lane = lane
        self.operation = operation
        self.issued = False  # whether `wait_issued` would not block
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
        self.issued = True
        while self._waiting:
            self._waiting.pop().release()

    def wait_issued(self) -> DeviceEvent | None:
        """Block the calling thread until issued; raise the operation's error if it failed."""
        if not self.issued:
            mine = threading.Lock()  # [Note: interrupts]
            mine.acquire()
            self._waiting.append(mine)
            if not self.issued:
                mine.acquire()
        if self._error is not None:
            raise surfacing(self._error)
        return self._event

    def wait(self) -> None:
        """Block the calling thread until done; raise the operation's error if it failed."""
        event = self.wait_issued()
        if event is not None:
            event.synchronize()

    @property
    def done(self) -> bool:
        return self.issued and (self._event is None or self._event.query())

    @property
    def failed(self) -> bool:
        """Whether `wait` would raise; False as long as that is not known."""
        return self._error is not None


def completed(lane: str, operation: str) -> Fence:
    """A fence of work that is already done."""
    fence = Fence(lane, operation)
    fence.issue(None)
    return fence


MANY = 8  # readers, of which most have ended
_NOTHING = completed("compute", "nothing was written yet")


class Record:
    """Who wrote some memory last, and who has read it since. `writer`: the newest writer's fence,
    what a reader waits for."""

    __slots__ = ("_readers", "writer")

    def __init__(self) -> None:
        self.writer = _NOTHING
        self._readers: list[Fence] = []

    @property
    def users(self) -> tuple[Fence, ...]:
        """The newest writer's fence and those of its readers: what a writer waits for."""
        return (self.writer, *self._readers)

    def read(self, fence: Fence) -> None:
        """An operation that reads was submitted. A lane is first in, first out, so that its newest
        reader stands for those before; compute may run on several streams."""
        readers = self._readers
        self._readers = [one for one in readers if one.lane == "compute" or one.lane != fence.lane]
        if len(self._readers) > MANY:
            self._readers = [one for one in self._readers if not one.done]
        self._readers.append(fence)

    def write(self, fence: Fence) -> None:
        """An operation that writes was submitted."""
        self.writer = fence
        self._readers = []

    def wait(self) -> None:
        """Block until what was submitted has written and read; raises what failed."""
        for fence in self.users:
            fence.wait()


def dependences(
    after: Iterable[Fence], reads: Iterable[Record], writes: Iterable[Record]
) -> tuple[Fence, ...]:
    """What an operation waits for that reads and writes these, and `after` beside that."""
    found = dict.fromkeys(after)
    for record in reads:
        found[record.writer] = None
    for record in writes:
        found.update(dict.fromkeys(record.users))
    found.pop(_NOTHING, None)
    return tuple(found)


def submitted(fence: Fence, reads: Iterable[Record], writes: Iterable[Record]) -> Fence:
    """The operation of `fence` reads and writes these: write that down."""
    for record in reads:
        record.read(fence)
    for record in writes:
        record.write(fence)
    return fence
