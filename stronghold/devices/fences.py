"""Fences and access records: what waits for what.

Owns the rule that orders operations. Never knows what a layer is.

A lane is an ordered queue of work: a stream, or a worker thread. Two operations on the same memory,
of which at least one writes, are a hazard. A hazard without an order is a race. Every array and
every buffer carries an access record (`Record`), from which `dependences` derives the order:

1. A reader waits for the newest writer (read after write).
2. A writer waits for the newest writer (write after write).
3. A writer waits for every reader since that writer (write after read).

Nothing else keeps a fence for later. Two hazards cannot be derived, and are written down where they
occur: memory that other processes write, and user code that reads a parameter.

Threads: the training thread submits operations and waits for fences. Each lane's thread runs its
operations in order, and issues or fails their fences. The training thread enters accesses in
records. In backward autograd's thread does it instead. A lane's thread never does.

[Note: no deadlock]
1. The caller submits an operation. It waits only for fences that exist at this moment.
2. Every fence belongs to an operation that was submitted before. So the order of submission is a
   topological order of all waits.
3. A lane is first in, first out. So the lane with the oldest unfinished operation can always go on.

[Note: issued and done] A GPU cannot wait for a host event. So a fence ends in two steps:
1. The lane's thread waits for the host-side fences and enqueues the work. The fence is *issued*.
2. The device performs the work. The fence is *done*.
A host lane takes both steps at once. A stream waits for another stream's fence by `event`, which
exists from the moment of issue.

[Note: surfaced]
1. An operation fails. Its lane fails the operation's fence.
2. A lane that waits for this fence fails its operation's fence with the same error.
3. A thread of the program waits for one of these fences and raises the error. It has surfaced.
4. The closing engine raises an error that has not surfaced: no later wait would raise it.

[Note: interrupts]
1. Ctrl-C can end a wait at any bytecode of the waiting thread.
2. `threading.Event` holds a lock during a wait. The interrupted thread can leave this lock held.
3. The lane that sets the event would then hang for good.
So each wait makes a new lock, for which no other thread ever waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from stronghold.devices.threads import THREAD_PREFIX
from stronghold.errors import LaneError, RankError


class LaneName(str, Enum):
    """The lane of a device. Traces, errors and names of threads have its value."""

    COMPUTE = "compute"  # forward, backward, and updates on the device
    FETCH = "fetch"  # weights, host to device (prefetch, unshard)
    OFFLOAD = "offload"  # gradients, device to host
    GRADIENTS = "gradients"  # sums, merges and norms of gradients on the host
    UPDATE = "update"  # optimizer steps on the host
    LOAD = "load"  # files to host, ahead of updates (swap in)
    STAGE = "stage"  # files to host, ahead of fetches (swap in)
    SPILL = "spill"  # host to files (swap out)
    IO = "io"  # checkpoints
    REDUCE = "reduce"  # gradients between ranks
    EXCHANGE = "exchange"  # updated weights between nodes

    def __str__(self) -> str:
        return self.value


# The lanes for which a GPU has a stream.
STREAM_LANES = (LaneName.FETCH, LaneName.OFFLOAD, LaneName.REDUCE)


def surfacing(error: LaneError) -> LaneError | RankError:
    """Return what the calling thread is about to raise ([Note: surfaced]).

    A thread of the program gets the error about a rank itself, and not the lane's.
    """
    if threading.current_thread().name.startswith(THREAD_PREFIX):
        return error
    error.surfaced = True
    if error.first is not None:  # a caller that got one failure needs no second one
        error.first.surfaced = True
    cause = error.__cause__
    return cause if isinstance(cause, RankError) else error


class DeviceEvent(Protocol):
    """An event that a stream records. `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Block the calling thread until the event has passed."""
        ...

    def query(self) -> bool:
        """Return whether the event has passed."""
        ...


class Fence:
    """Marks the end of one operation. `Lane.submit` and `ComputeLane.record` alone make fences."""

    __slots__ = ("_error", "_event", "_turn", "_waiting", "issued", "lane", "operation")

    def __init__(self, lane: LaneName, operation: str) -> None:
        self.lane = lane
        self.operation = operation
        # The thread that empties it first owns the operation: a lane performs it, or a caller
        # withdraws it.
        self._turn = [None]
        self.issued = False  # once it is true, `wait_issued` does not block
        self._waiting: list[threading.Lock] = []  # one held lock per waiting thread
        self._event: DeviceEvent | None = None
        self._error: LaneError | None = None

    def take_turn(self) -> bool:
        """Return True for the first caller alone, on any thread. The operation is that caller's."""
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True

    def issue(self, event: DeviceEvent | None) -> None:
        """Mark the work as enqueued, with the event that passes at its end, or as done (None)."""
        self._event = event
        self._wake()

    def fail(self, error: LaneError) -> None:
        """Mark the operation as failed. Every wait for it raises `error`."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        # The race with `wait_issued`: that thread first appends its lock, then reads `issued`. This
        # one first sets `issued`, then empties the list. So a thread that is not woken reads True.
        self.issued = True
        while self._waiting:
            self._waiting.pop().release()

    def wait_issued(self) -> DeviceEvent | None:
        """Block the calling thread until issued; raise the operation's error if it failed."""
        if not self.issued:
            waiter = threading.Lock()  # [Note: interrupts]
            waiter.acquire()
            self._waiting.append(waiter)
            if not self.issued:
                waiter.acquire()
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
        """True once the work has happened, well or badly."""
        return self.issued and (self._event is None or self._event.query())

    @property
    def failed(self) -> bool:
        """True once the operation has failed: `wait` would raise."""
        return self._error is not None


def completed(lane: LaneName, operation: str) -> Fence:
    """Return a fence of work that is already done."""
    fence = Fence(lane, operation)
    fence.issue(None)
    return fence


MANY_READERS = 8  # beyond this number a record drops readers that have ended
_NOTHING = completed(LaneName.COMPUTE, "nothing was written yet")


class Record:
    """The access record of some memory: its newest writer, and the readers since.

    It tracks the hazards of this memory (see the module). `writer` is the newest writer's fence,
    for which a reader waits.
    """

    __slots__ = ("_readers", "writer")

    def __init__(self) -> None:
        self.writer = _NOTHING
        self._readers: list[Fence] = []

    @property
    def users(self) -> tuple[Fence, ...]:
        """The fences for which a writer waits: the newest writer's, and those of its readers."""
        return (self.writer, *self._readers)

    def read(self, fence: Fence) -> None:
        """Enter an operation that reads.

        A lane is first in, first out, so its newest reader stands for its earlier ones. Compute may
        run on several streams, so all its readers stay.
        """
        self._readers = [
            reader
            for reader in self._readers
            if reader.lane is LaneName.COMPUTE or reader.lane is not fence.lane
        ]
        if len(self._readers) > MANY_READERS:
            self._readers = [reader for reader in self._readers if not reader.done]
        self._readers.append(fence)

    def write(self, fence: Fence) -> None:
        """Enter an operation that writes."""
        self.writer = fence
        self._readers = []

    def wait(self) -> None:
        """Block the calling thread until the writer and all readers are done.

        Raises the error of an operation that failed.
        """
        for fence in self.users:
            fence.wait()


def dependences(
    after: Iterable[Fence], reads: Iterable[Record], writes: Iterable[Record]
) -> tuple[Fence, ...]:
    """Return the fences for which an operation waits.

    Arguments:
        after: fences for which it waits in any case.
        reads: records of the memory that it reads: it waits for the newest writers.
        writes: records of the memory that it writes: it waits for the newest writers and for the
            readers since.
    """
    fences = dict.fromkeys(after)
    for record in reads:
        fences[record.writer] = None
    for record in writes:
        fences.update(dict.fromkeys(record.users))
    fences.pop(_NOTHING, None)
    return tuple(fences)


def record_accesses(fence: Fence, reads: Iterable[Record], writes: Iterable[Record]) -> Fence:
    """Enter the accesses of the operation of `fence` in the records, and return the fence."""
    for record in reads:
        record.read(fence)
    for record in writes:
        record.write(fence)
    return fence
