"""Lanes, fences, access records and raw buffers: the contract that every device fulfils.

Owns the lane threads, the fences that they issue, and the rule that orders operations. Never knows
what a layer is.

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

[Note: a new device] A device of another kind is written so:
1. a subclass of `Device`, with `torch_device`, `copy`, `copy_now` and `kernels`; its constructor
   sets `self.compute` and ends with `_open_lanes()`;
2. a subclass of `ComputeLane`, with `record` and `wait`;
3. a subclass of `DeviceMemory`, with `_allocate`;
4. `_make_lane`, if its lanes are streams: the default `HostLane` takes work that returns as done;
5. its place in `Stack._open_device`.
Pinning, side streams and counters of memory have defaults that do nothing.

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

import contextlib
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from stronghold.devices.first_touch import FirstTouch
from stronghold.devices.forks import check_not_forked, forked_from
from stronghold.devices.lane_name import THREAD_PREFIX, LaneName
from stronghold.devices.memory import DeviceMemory
from stronghold.devices.pinned import HostPinning
from stronghold.devices.side_streams import SideStreams
from stronghold.errors import LaneError, RankError, StateError, StrongholdError
from stronghold.native import Kernels, naming_threads
from stronghold.telemetry.trace import Trace


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


class OutOfMemoryError(StrongholdError, torch.OutOfMemoryError):
    """The device had no memory left in a forward or backward.

    The model is unchanged. The next forward has more room, if any plan leaves more. A handler of
    torch's `OutOfMemoryError` catches this error, too.
    """


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


def off_lanes(work: Callable[[], object]) -> None:
    """Run `work` on a thread that is no lane's, and drop its exceptions.

    The calling thread runs it, unless it belongs to this package. Then a new thread runs it, and
    the end of the process waits for that thread.
    """
    if threading.current_thread().name.startswith(THREAD_PREFIX):
        threading.Thread(target=_run_quietly, args=(work,), name=THREAD_PREFIX + "handover").start()
    else:
        _run_quietly(work)


def _run_quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        work()


Work = Callable[[], None]
Seconds = float | Callable[[], float] | None
"""A time in seconds, a function that returns it once it has passed, or None without a clock."""
_Item = tuple[str, Work, tuple[Fence, ...], int, Fence]
"""An operation's name, its work, the fences before it, its bytes, and its fence."""


class Lane(ABC):
    """An ordered queue of work: a stream, or a worker thread."""

    def __init__(self, name: LaneName) -> None:
        self.name = name

    def submit(
        self,
        operation: str,
        work: Work,
        after: Iterable[Fence] = (),
        *,
        reads: Sequence[Record] = (),
        writes: Sequence[Record] = (),
        nbytes: int = 0,
    ) -> Fence:
        """Queue `work` behind the lane's earlier operations. Never blocks.

        The operation waits for `after`, and for the fences that follow from the records that it
        reads and writes (`dependences`). On a stream `work` only enqueues, so the tensors that it
        names must live until the fence is done.

        Arguments:
            operation: a verb and its object, such as "fetch 3".
            work: the function to run.
            after: fences to wait for, beside those of the records.
            reads, writes: the records of the memory that `work` reads and writes.
            nbytes: the bytes that it moves over the resource that bounds its lane: the link, host
                memory or the disk. A paced device turns them into seconds.

        Returns the fence of the operation. Raises StateError after `close`.
        """
        fence = self._enqueue(operation, work, dependences(after, reads, writes), nbytes)
        return record_accesses(fence, reads, writes)

    @abstractmethod
    def _enqueue(self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int) -> Fence:
        """Queue an operation that waits for `after`, and return its fence."""

    def withdraw(self, fences: Sequence[Fence]) -> int:
        """Take back operations of this lane, the newest first, up to the first that has begun.

        A withdrawn operation never does its work. Its fence keeps its place: it is done in its
        turn, after all fences that the operation waits for. So records that name this fence still
        cover the hazards with earlier operations.

        Returns the number of withdrawn operations.
        """
        return 0

    def finish(self) -> None:  # noqa: B027 - a lane without a thread has nothing queued
        """Wait until all queued operations are done, well or badly."""

    def close(self) -> None:  # noqa: B027
        """Finish the queued operations. Safe to call twice."""


class _Turns:
    """Sets the interpreter's switch interval while lanes have threads.

    A lane's thread may wake while another thread runs pure Python (tokenising, collating). It then
    waits for the switch interval, by default 5 ms: ten kernels' time on a GPU. The end of the last
    lane restores the program's interval, unless the program has changed it meanwhile.
    """

    INTERVAL_S = 5e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_lanes = 0
        self._interval_before_s = 0.0
        self._interval_set_s = 0.0

    def begin(self) -> None:
        with self._lock:
            self._num_lanes += 1
            if self._num_lanes == 1:
                self._interval_before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._interval_before_s, self.INTERVAL_S))
                self._interval_set_s = sys.getswitchinterval()

    def end(self) -> None:
        with self._lock:
            self._num_lanes -= 1
            if self._num_lanes == 0 and sys.getswitchinterval() == self._interval_set_s:
                sys.setswitchinterval(self._interval_before_s)


_turns = _Turns()


def _nothing() -> None:
    """Do nothing: the work of a withdrawn operation."""


class ThreadLane(Lane):
    """A lane with a thread.

    To wake the thread and to get the interpreter's lock back takes longer than a short operation.
    So the submitting thread performs an operation if the lane is idle and the operation would begin
    at once and not block (`_is_short`). The order of operations stays the same.
    """

    def __init__(self, name: LaneName, device: Device) -> None:
        super().__init__(name)
        self._device = device
        self._newest = completed(name, "nothing was submitted yet")
        self._closed = False
        self._process = os.getpid()
        self._queue: queue.SimpleQueue[_Item | Fence | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=THREAD_PREFIX + name, daemon=True)
        with naming_threads(f"the {name} lane"):
            self._thread.start()
        _turns.begin()

    def _enqueue(self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int) -> Fence:
        check_not_forked(self._process, operation)
        if self._closed:
            raise StateError(f"{operation} was submitted to the {self.name} lane after its close")
        fence = Fence(self.name, operation)
        previous, self._newest = self._newest, fence
        if previous.issued and self._is_short(after, nbytes):
            fence.take_turn()
            self._perform(operation, work, after, nbytes, fence, handed_over=False)
        else:
            self._queue.put((operation, work, after, nbytes, fence))
        return fence

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        """Return whether the calling thread may perform an operation that moves `nbytes`.

        That holds if no fence of `after` blocks or has failed, and if the operation takes less time
        than its hand-over to the thread.
        """
        return False

    def withdraw(self, fences: Sequence[Fence]) -> int:
        for count, fence in enumerate(fences):
            if not fence.take_turn():
                return count
        return len(fences)

    def finish(self) -> None:
        """Wait until the lane's thread has run all queued operations.

        Errors stay with their fences.
        """
        if not self._closed and not forked_from(self._process):
            end_of_queue = Fence(self.name, "finish")
            self._queue.put(end_of_queue)
            end_of_queue.wait()

    def close(self) -> None:
        """Finish the queued operations and end the thread. Safe to call twice."""
        if forked_from(self._process):
            return  # the thread is the parent's
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            _turns.end()
        self._thread.join()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Fence):
                item.issue(None)
                continue
            operation, work, after, nbytes, fence = item
            if fence.take_turn():
                self._perform(*item, handed_over=True)
            else:  # it was withdrawn
                self._perform(operation, _nothing, after, 0, fence, handed_over=True)
            del operation, work, after, nbytes, fence
            # A closure holds tensors. It must not keep them alive while the queue is empty.
            del item

    def _perform(
        self,
        operation: str,
        work: Work,
        after: tuple[Fence, ...],
        nbytes: int,
        fence: Fence,
        *,
        handed_over: bool,
    ) -> None:
        try:
            if handed_over:
                self._device.enter_operation()
            fence.issue(self._run(operation, work, after, nbytes))
        except LaneError as error:  # an operation before this one failed: keep its name
            self._fail(fence, error)
        except BaseException as cause:
            if not handed_over and not isinstance(cause, Exception):
                # Ctrl-C in the caller's thread: the caller drops this step
                fence.issue(None)
                raise
            failure = LaneError(self.name, operation, cause)
            failure.__cause__ = cause
            self._fail(fence, failure)
            del failure

    def _fail(self, fence: Fence, error: LaneError) -> None:
        self._device.report(error)
        fence.fail(error)

    @abstractmethod
    def _run(
        self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int
    ) -> DeviceEvent | None:
        """Wait for `after` and run `work`.

        Returns the event that passes at the end of the work, or None if it is done.
        """


class HostLane(ThreadLane):
    """A lane whose work happens on the host: `work` returns when it is done."""

    def _run(self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int) -> None:
        for fence in after:  # the lane's thread waits for operations of other lanes
            fence.wait()
        begun_s = time.perf_counter()
        try:
            work()
        finally:
            ended_s = time.perf_counter()
            self._device.trace.record(self.name, operation, begun_s, ended_s, **bytes_moved(nbytes))


class ComputeLane(Lane):
    """The lane of forward and backward: the calling thread enqueues the work itself, in order.

    An exception of the work becomes a LaneError with the operation's name.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(LaneName.COMPUTE)
        self._device = device

    def _enqueue(self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int) -> Fence:
        for fence in after:
            if fence.lane is LaneName.COMPUTE:
                continue  # earlier compute is in order with this work
            if fence.failed or not fence.done:
                self.wait(fence)
        begun = self.begin_span()
        try:
            work()
        except Exception as cause:
            error = LaneError(self.name, operation, cause)
            self._device.report(error)
            raise error from cause
        self.end_span(operation, begun)
        return self.record(operation)

    def finish(self) -> None:
        """Block the calling thread until the device has done all enqueued work."""
        for stream in (None, *self._device.side_streams.streams):
            self.record("finish", stream).wait()

    @abstractmethod
    def record(self, operation: str, stream: object = None) -> Fence:
        """Return the fence of all work that was enqueued on this lane so far.

        The work is that on `stream`, or on the calling thread's stream (None).
        """

    @abstractmethod
    def wait(self, fence: Fence) -> Seconds:
        """Let later compute, on the calling thread's stream, run after `fence`.

        Returns the seconds for which compute stood still. A stream's are known later, and only if
        the trace records.
        """

    def wait_everywhere(self, fence: Fence) -> Seconds:
        """Let later compute on every stream of this lane run after `fence`.

        A caller needs that before it drops memory that any stream may then take, and before any
        stream reads a slot that the operation of `fence` has written.
        """
        return self.wait(fence)

    def stream(self) -> object:
        """Return the calling thread's stream. Blocks may use several."""
        return None

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Copy a small tensor of the device, as it is at this point of the lane.

        Returns a function that waits for this point, and for no later work, and returns the values.
        """
        return DelayedRead(tensor.clone(), completed(LaneName.COMPUTE, "read"))

    def begin_span(self) -> object:
        """Return a mark of this lane's clock, for `end_span`."""
        return None

    def end_span(self, name: str, begun: object) -> None:
        """Enter the time since `begun` in the trace, unless the device's clock has entered it."""


class DelayedRead:
    """Values of a small tensor, which are copied to the host. A call waits and returns them."""

    def __init__(self, values: torch.Tensor, copied: Fence) -> None:
        """`values` is the copy in host memory. It is complete when `copied` is done."""
        self._values = values
        self._copied = copied

    def __call__(self) -> list[float]:
        self._copied.wait()
        values: list[float] = self._values.tolist()
        return values


EVERY_DEVICE = (LaneName.FETCH, LaneName.OFFLOAD, LaneName.GRADIENTS, LaneName.UPDATE)


class Device(ABC):
    """One device: its lanes, its copies, its `memory`, and the `pinning` of host slabs.

    Every device has these lanes:
        fetch: weights, host to device (prefetch).
        offload: gradients, device to host.
        gradients: merges, sums and norms of gradients on the host.
        update: optimizer steps on the host. It is apart from `gradients`, because the gate waits
            for norms and must not wait behind updates that began before it.
        compute: forward and backward, on the training thread, with `side_streams`.

    `lane` makes others when they are first used. Each has a thread, so that none of them waits
    behind another. The training thread makes the lanes of files, or autograd's thread in backward:
        load: files to host, ahead of updates (swap in).
        stage: files to host, ahead of fetches (swap in).
        spill: host to files (swap out).
        io: checkpoints.

    The training thread alone makes the lanes between ranks:
        reduce: gradients, to the rank that owns the layer.
        exchange: updated weights between nodes, from host memory to host memory.
    """

    fetch: Lane
    offload: Lane
    gradients: Lane
    update: Lane
    compute: ComputeLane

    def __init__(self, name: str, memory: DeviceMemory, trace: Trace | None) -> None:
        self.name = name
        self.memory = memory
        self.pinning = HostPinning()
        self.first_touch = FirstTouch()
        self.side_streams = SideStreams()
        self.trace = trace or Trace(recording=False)
        self.is_single_process = True  # no operation waits for another process
        self.on_failure: Callable[[LaneError], None] = _ignore
        self._failure: LaneError | None = None
        self._process = os.getpid()
        # In the order in which they were made: a lane that waits for others comes later.
        self._lanes: dict[LaneName, Lane] = {}

    def _open_lanes(self) -> None:
        """Make the lanes that every device has. Make none if the system refuses a thread."""
        with contextlib.ExitStack() as undo:
            for name in EVERY_DEVICE:
                undo.callback(self.lane(name).close)
            undo.pop_all()
        self.fetch, self.offload, self.gradients, self.update = map(self.lane, EVERY_DEVICE)

    def lane(self, name: LaneName) -> Lane:
        """Return the lane. The first call makes it."""
        if name not in self._lanes:
            self._lanes[name] = self._make_lane(name)
        return self._lanes[name]

    def _make_lane(self, name: LaneName) -> Lane:
        return HostLane(name, self)

    # -- errors ---------------------------------------------------------------------------------
    def report(self, error: LaneError) -> None:
        """Keep the first failure of any lane. Lane threads call it."""
        if self._failure is None:
            self._failure = error
            self.on_failure(error)
        elif error is not self._failure:
            error.first = self._failure

    def check(self) -> None:
        """Raise the first failure of any lane, if there is one.

        The training thread calls it at every use of the model. Raises ConfigError in a forked
        child, which has no lanes.
        """
        check_not_forked(self._process, "a use of the model")
        if self._failure is not None:
            raise surfacing(self._failure)

    def check_unsurfaced(self) -> None:
        """Raise the first failure of any lane, if it has not surfaced ([Note: surfaced])."""
        if self._failure is not None and not self._failure.surfaced:
            raise surfacing(self._failure)

    # -- bytes ----------------------------------------------------------------------------------
    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The device as torch names it."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes between host and device. Only a lane's work may call it."""

    @abstractmethod
    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes between host and device outside of every lane, and wait for them.

        It is for rare copies: adoption, checkpoints, the end. Any thread may call it. No record
        tracks its hazards: the caller has waited for the writers of `source` and for all users of
        `target`.
        """

    @property
    @abstractmethod
    def kernels(self) -> Kernels:
        """The optimizer's kernels on this device's memory, in order with compute.

        The first use makes them. The thread that runs hooks enters them.
        """

    # -- life ------------------------------------------------------------------------------------
    def enter_operation(self) -> None:  # noqa: B027 - only a real device has threads to prepare
        """Prepare the calling lane thread, before its operation waits for fences."""

    def settle(self) -> None:  # noqa: B027
        """Enter spans whose times the device still holds. Called between steps of a trace."""

    def finish(self) -> None:
        """Wait until the lanes have done all queued operations, well or badly. They stay open."""
        for lane in list(self._lanes.values()):
            lane.finish()

    def close(self) -> None:
        """Finish all queued operations and end the lanes' threads. Safe to call twice."""
        self.first_touch.close()
        for lane in list(self._lanes.values()):
            lane.close()


def _ignore(error: LaneError) -> None:
    """Nobody else need know that a lane has failed."""


def bytes_moved(nbytes: int) -> dict[str, int]:
    """Return the span's argument for the bytes that its operation moved; none for 0."""
    return {"nbytes": nbytes} if nbytes else {}


def timed(wait: Callable[[], object]) -> float:
    """Call `wait` and return the seconds that it took."""
    start_s = time.perf_counter()
    wait()
    return time.perf_counter() - start_s
