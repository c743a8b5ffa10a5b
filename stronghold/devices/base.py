"""Lanes, fences, records and raw buffers: the contract that every device fulfils.

Owns the lane threads, the fences that they yield, and the rule by which operations are ordered:
every array and every buffer carries a `Record`, and nobody else keeps a fence for later. A reader
waits for the newest writer, a writer for the newest writer and for every reader since. Never knows
what a layer is. The training thread submits operations and waits; each lane's own thread runs them
in order, and issues or fails their fences. Records are entered by the training thread, and by
autograd's in backward, never by both at once, and by no lane's.

Two things are not derived, and are written down where they stand: memory that other processes
write, and user code that reads a parameter.

[Note: no deadlock] An operation may only wait for fences that exist when it is submitted, and every
fence belongs to an operation that was submitted before. The order of submission is therefore a
topological order of all waits, and since a lane is first in, first out, some lane can always go on.

[Note: issued and done] A GPU cannot wait for a host event. A fence is first *issued* (the lane's
thread has enqueued the work, after its host-side fences) and then *done* (the work has happened).
Host lanes do both at once. Work on a stream waits for another stream's fence by `event`, which
exists from the moment of issue.

[Note: surfaced] An error goes from fence to fence, for a lane passes on what it waited for. It has
surfaced when it is raised in a thread that is no lane's. One that never did is raised when the
engine closes, for after that nobody waits any more.

[Note: interrupts] Ctrl-C may end a wait at any bytecode. `threading.Event` holds a lock meanwhile,
which it may then leave held, and the lane that wants to tell of the operation's end hangs for good.
So each wait brings a lock of its own, which nobody else ever waits for.
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

from stronghold.devices.forks import check_not_forked, forked_from
from stronghold.devices.lane_name import LaneName
from stronghold.devices.memory import DeviceMemory
from stronghold.devices.pinned import HostPinning
from stronghold.devices.side_streams import SideStreams
from stronghold.errors import LaneError, StateError, StrongholdError
from stronghold.native import Kernels, naming_threads
from stronghold.telemetry.trace import Trace

THREAD_PREFIX = "stronghold:"


def surfacing(error: LaneError) -> LaneError:
    """`error`, which the calling thread is about to raise ([Note: surfaced])."""
    if not threading.current_thread().name.startswith(THREAD_PREFIX):
        error.surfaced = True
        if error.first is not None:  # whoever is told of one failure knows
            error.first.surfaced = True
    return error


class OutOfMemoryError(StrongholdError, torch.OutOfMemoryError):
    """The device had no memory left in a forward or backward. Nothing of the model is lost, and the
    next forward has more room, where any plan leaves more. Whatever catches
    torch's own error catches this one."""


class DeviceEvent(Protocol):
    """What a stream records: `torch.cuda.Event` has this shape."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Fence:
    """Marks the end of one operation. Made by `Lane.submit` and `ComputeLane.record` alone."""

    __slots__ = ("_error", "_event", "_turn", "_waiting", "issued", "lane", "operation")

    def __init__(self, lane: LaneName, operation: str) -> None:
        self.lane = lane
        self.operation = operation
        self._turn = [None]  # the first to empty it wins: the lane begins, or a caller withdraws
        self.issued = False  # whether `wait_issued` would not block
        self._waiting: list[threading.Lock] = []  # held, each until the fence is issued
        self._event: DeviceEvent | None = None
        self._error: LaneError | None = None

    def take_turn(self) -> bool:
        """True for the first caller alone, on any thread: the operation is that caller's."""
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True

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


def completed(lane: LaneName, operation: str) -> Fence:
    """A fence of work that is already done."""
    fence = Fence(lane, operation)
    fence.issue(None)
    return fence


MANY = 8  # readers, of which most have ended
_NOTHING = completed(LaneName.COMPUTE, "nothing was written yet")


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
        self._readers = [
            one for one in readers if one.lane is LaneName.COMPUTE or one.lane is not fence.lane
        ]
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


def off_lanes(work: Callable[[], object]) -> None:
    """Run `work`: now, or from a thread of this package on a new one, which the end of the process
    waits for. Nobody hears what it raises."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    if threading.current_thread().name.startswith(THREAD_PREFIX):
        threading.Thread(target=run, name=THREAD_PREFIX + "handover").start()
    else:
        run()


Work = Callable[[], None]
Seconds = float | Callable[[], float] | None
"""A time, or where it can be read once it has passed; None: nobody measured it."""
_Item = tuple[str, Work, tuple[Fence, ...], int, Fence]


class Lane(ABC):
    """An ordered queue of work."""

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
        """Queue `work` behind the lane's earlier operations, and behind what it must wait for to
        read and write what it says (`after` beside that); never blocks.

        `operation` is a verb and what it is done to ("fetch 3"). `nbytes` are the bytes that it
        moves over what bounds its lane: the link, host memory, the disk; a paced or simulated
        device makes seconds of them. On a stream `work` only enqueues: the tensors that it names
        must live until the fence is done. StateError after `close`, since nothing would ever yield
        the fence.
        """
        fence = self._enqueue(operation, work, dependences(after, reads, writes), nbytes)
        return submitted(fence, reads, writes)

    @abstractmethod
    def _enqueue(
        self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int
    ) -> Fence: ...

    def withdraw(self, fences: Sequence[Fence]) -> int:
        """Take back operations of this lane, the newest first, up to the first one that has begun.
        Returns how many: their work will never run.

        A fence keeps its place: it is done in its turn, after all that its operation waits for.
        Records that name the fence, as a reader or as a writer, still stand for those before it.
        """
        return 0

    def finish(self) -> None:  # noqa: B027 - a lane without a thread has nothing queued
        """Wait until what is queued is done, well or badly."""

    def close(self) -> None:  # noqa: B027
        """Finish what is queued. Safe to call twice."""


class _Turns:
    """How soon Python's threads take turns while lanes have threads.

    A lane's thread that wakes beside a thread of pure Python (tokenising, collating) waits for the
    interpreter's switch interval, 5 ms unless it is set: ten kernels' time on a GPU. The program's
    own interval comes back when the last lane has ended, unless it was changed meanwhile.
    """

    INTERVAL_S = 5e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_lanes = 0
        self._before_s = 0.0
        self._set_s = 0.0

    def begin(self) -> None:
        with self._lock:
            self._num_lanes += 1
            if self._num_lanes == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, self.INTERVAL_S))
                self._set_s = sys.getswitchinterval()

    def end(self) -> None:
        with self._lock:
            self._num_lanes -= 1
            if self._num_lanes == 0 and sys.getswitchinterval() == self._set_s:
                sys.setswitchinterval(self._before_s)


_turns = _Turns()


def _nothing() -> None:
    """The work of an operation that was withdrawn."""


class ThreadLane(Lane):
    """A lane with a thread of its own.

    To wake it, and to have the interpreter's lock back from it, takes longer than many an operation
    takes. So whoever submits performs an operation that would begin at once and not block
    (`_is_short`) while the thread has nothing to do: nothing is ordered otherwise by that.
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
        before, self._newest = self._newest, fence
        if before.issued and self._is_short(after, nbytes):
            fence.take_turn()
            self._perform(operation, work, after, nbytes, fence, handed_over=False)
        else:
            self._queue.put((operation, work, after, nbytes, fence))
        return fence

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        """Whether the calling thread may perform the operation, which moves `nbytes`: nothing that
        it waits for holds it up, or has failed, and it takes less time than to hand it over."""
        return False

    def withdraw(self, fences: Sequence[Fence]) -> int:
        for count, fence in enumerate(fences):
            if not fence.take_turn():
                return count
        return len(fences)

    def finish(self) -> None:
        """Wait until the thread has nothing to do. Errors stay with their fences."""
        if not self._closed and not forked_from(self._process):
            reached = Fence(self.name, "finish")
            self._queue.put(reached)
            reached.wait()

    def close(self) -> None:
        """Finish what is queued and end the thread. Safe to call twice."""
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
            # Closures hold tensors: keep none alive while the queue is empty.
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
        except LaneError as error:  # an operation that this one waited for: keep its name
            self._fail(fence, error)
        except BaseException as cause:
            if not handed_over and not isinstance(cause, Exception):
                fence.issue(None)  # Ctrl-C is the caller's, who drops what was under way
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
        """Wait for `after`, run `work`, return the event that marks its end (None: it is done)."""


class HostLane(ThreadLane):
    """A lane whose work happens on the host: `work` returns when it is done."""

    def _run(self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int) -> None:
        for fence in after:
            fence.wait()
        begun_s = time.perf_counter()
        try:
            work()
        finally:
            ended_s = time.perf_counter()
            self._device.trace.record(self.name, operation, begun_s, ended_s, **moved(nbytes))


class ComputeLane(Lane):
    """Work that the calling thread enqueues itself, in order with forward and backward.

    What fails is a lane's failure, with the operation's name. `take_waits`: the times for which
    compute stood still since it was last asked.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(LaneName.COMPUTE)
        self._device = device
        self._waits: list[Seconds] = []

    def _enqueue(self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int) -> Fence:
        for fence in after:  # compute's own are in order with it
            if fence.lane is not LaneName.COMPUTE and (fence.failed or not fence.done):
                self._waits.append(self.wait(fence))
        begun = self.begin_span()
        try:
            work()
        except Exception as cause:
            error = LaneError(self.name, operation, cause)
            self._device.report(error)
            raise error from cause
        self.end_span(operation, begun)
        self.charge(nbytes)
        return self.record(operation)

    def take_waits(self) -> list[Seconds]:
        found, self._waits = self._waits, []
        return found

    def finish(self) -> None:
        """Wait until the device has done what was enqueued."""
        for stream in (None, *self._device.side_streams.streams):
            self.record("finish", stream).wait()

    @abstractmethod
    def record(self, operation: str, stream: object = None) -> Fence:
        """The fence of everything that was enqueued on this lane: on `stream`, or on the one that
        the calling thread is on."""

    @abstractmethod
    def wait(self, fence: Fence) -> Seconds:
        """Later compute runs after `fence`; returns the seconds for which compute stood still: on a
        stream they are known when it is traced, and later."""

    def wait_everywhere(self, fence: Fence) -> Seconds:
        """`wait` for every stream of this lane: memory that any of them may take is about to be
        dropped, or a slot that any of them reads was written."""
        return self.wait(fence)

    def stream(self) -> object:
        """The stream that the calling thread is on: blocks may use several."""
        return None

    def charge(self, nbytes: int) -> None:
        """What was just called on this lane moves `nbytes` of device memory: a simulated device
        makes seconds of them."""

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """The values of a small tensor on the device at this point of the lane. A call of the
        result waits for that point, and for nothing that was enqueued after it."""
        values: list[float] = tensor.tolist()
        return lambda: values

    def begin_span(self) -> object:
        """A mark of this lane's clock, for `end_span`."""
        return None

    def end_span(self, name: str, begun: object) -> None:
        """Record what compute has done since `begun`; nothing where a clock has recorded it."""


EVERY_DEVICE = (LaneName.FETCH, LaneName.DRAIN, LaneName.GRADIENTS, LaneName.UPDATE)


class Device(ABC):
    """Lanes `fetch`, `drain`, `gradients` and `update`, the compute lane of the training thread,
    others by name, and copies. It owns its `memory`, the `pinning` of host slabs and the
    `side_streams` of compute.

    `gradients` merges and sums gradients on the host and takes their norms; `update` has the
    optimizer's steps. They are two lanes because the gate waits for norms, and must not wait behind
    updates that began before it.

    Those of files are made by the training thread or by autograd's in backward: `load` reads ahead
    of updates, `stage` ahead of fetches, `spill` writes, `io` is for checkpoints. Those between
    ranks by the training thread alone: `gather` of weights, `reduce` of gradients, `exchange` of
    weights between nodes, from host memory to host memory, where updates left them. Each has a
    thread of its own, so that none of them waits behind another.
    """

    fetch: Lane
    drain: Lane
    gradients: Lane
    update: Lane
    compute: ComputeLane

    def __init__(self, name: str, memory: DeviceMemory, trace: Trace | None) -> None:
        self.name = name
        self.memory = memory
        self.pinning = HostPinning()
        self.side_streams = SideStreams()
        self.trace = trace or Trace(recording=False)
        self.alone = True  # no operation waits for another process
        self._failure: LaneError | None = None
        self._process = os.getpid()
        self._lanes: dict[LaneName, Lane] = {}  # those that wait for others last

    def _open_lanes(self) -> None:
        """Make the lanes that every device has, or none where the system refuses a thread."""
        with contextlib.ExitStack() as undo:
            for name in EVERY_DEVICE:
                undo.callback(self.lane(name).close)
            undo.pop_all()
        self.fetch, self.drain, self.gradients, self.update = map(self.lane, EVERY_DEVICE)

    def lane(self, name: LaneName) -> Lane:
        """The lane, made when it is first asked for."""
        if name not in self._lanes:
            self._lanes[name] = self._make_lane(name)
        return self._lanes[name]

    def _make_lane(self, name: LaneName) -> Lane:
        return HostLane(name, self)

    # -- errors ---------------------------------------------------------------------------------
    def report(self, error: LaneError) -> None:
        """Remember the first failure of any lane (called by lane threads)."""
        if self._failure is None:
            self._failure = error
        elif error is not self._failure:
            error.first = self._failure

    def check(self) -> None:
        """Raise the first failure of any lane; the training thread calls it at every trigger.
        ConfigError in a forked child, which has no lanes."""
        check_not_forked(self._process, "a use of the model")
        if self._failure is not None:
            raise surfacing(self._failure)

    def check_unheard(self) -> None:
        """Raise the first failure of any lane, if no thread of the program was told of it."""
        if self._failure is not None and not self._failure.surfaced:
            raise surfacing(self._failure)

    # -- bytes ----------------------------------------------------------------------------------
    @property
    @abstractmethod
    def torch_device(self) -> torch.device: ...

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes between host and device; called from a lane's work alone."""

    @abstractmethod
    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes between host and device, outside of every lane, and return when
        they are there: for what is rare (adoption, checkpoints, the end). Any thread; the caller
        has waited for what writes `source` and for what uses `target`."""

    @property
    @abstractmethod
    def kernels(self) -> Kernels:
        """The update's arithmetic on this device's memory, in order with compute. Made when it is
        first asked for; entered by whoever calls hooks."""

    # -- life ------------------------------------------------------------------------------------
    def enter_operation(self) -> None:  # noqa: B027 - only a real device has threads to prepare
        """Called by a lane's thread before an operation waits for its fences."""

    def record_spans(self, recording: bool) -> None:
        """Switch the trace on or off, between two steps."""
        self.trace.recording = recording

    def settle(self) -> None:  # noqa: B027
        """Resolve spans that are still on the device; called between steps when tracing."""

    def finish(self) -> None:
        """Wait until the lanes have done what is queued, well or badly; they go on living."""
        for lane in list(self._lanes.values()):
            lane.finish()

    def close(self) -> None:
        """Finish the lanes' work and end their threads. Safe to call twice."""
        for lane in list(self._lanes.values()):
            lane.close()


def moved(nbytes: int) -> dict[str, int]:
    """What a span tells beside its times: the bytes that its operation moved, if it did."""
    return {"nbytes": nbytes} if nbytes else {}


def timed(wait: Callable[[], object]) -> float:
    """Seconds that `wait` took."""
    start = time.perf_counter()
    wait()
    return time.perf_counter() - start
