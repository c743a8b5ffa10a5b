"""Lanes and devices: the contract that every device fulfils.

Owns the lanes and their threads. A lane's thread runs its operations in order, and issues or fails
their fences (`devices.fences`). Never knows what a layer is.

`docs/develop/add_device.md` says how to write a device of another kind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from stronghold.devices.fences import (
    DeviceEvent,
    Fence,
    LaneName,
    Record,
    completed,
    dependences,
    record_accesses,
    surfacing,
)
from stronghold.devices.host_memory import FirstTouch, HostPinning
from stronghold.devices.memory import DeviceMemory
from stronghold.devices.threads import THREAD_PREFIX, check_not_forked, forked_from, switch_interval
from stronghold.errors import LaneError, StateError, StrongholdError
from stronghold.native import Kernels, naming_threads
from stronghold.telemetry.trace import Trace


class OutOfMemoryError(StrongholdError, torch.OutOfMemoryError):
    """The device had no memory left in a forward or backward.

    The model is unchanged. The next forward has more room, if any plan leaves more. A handler of
    torch's `OutOfMemoryError` catches this error, too.
    """


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
        switch_interval.begin()

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
            switch_interval.end()
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


class SideStreams:
    """The side streams of a device whose compute is one stream: there are none."""

    def __init__(self) -> None:
        self.streams: Sequence[Any] = ()

    def open(self, count: int) -> None:
        """Make `count` side streams; none for 1."""

    def forked(self) -> AbstractContextManager[object]:
        """Context manager: the side streams run beside the calling thread's stream.

        At entry the side streams wait for this stream. At exit it waits for them. The manager
        returns this stream.
        """
        return nullcontext()

    def beside(self, number: int, name: str) -> AbstractContextManager[None]:
        """Context manager: the calling thread is on side stream `number` modulo their count."""
        return nullcontext()

    def follow(self, main: object) -> None:
        """Let `main`, the stream of `forked`, wait for the calling thread's stream."""

    def on_main(self) -> AbstractContextManager[None]:
        """Context manager: the calling thread is on the stream that forked last. Nothing waits."""
        return nullcontext()

    def joined(self) -> AbstractContextManager[None]:
        """Context manager: the calling thread is on the stream that forked last.

        At entry this stream waits for all side streams, so it runs after all chunks of a layer.
        """
        return nullcontext()


EVERY_DEVICE = (LaneName.FETCH, LaneName.OFFLOAD, LaneName.GRADIENTS, LaneName.UPDATE)


class Device(ABC):
    """One device: its lanes, its copies, its `memory`, and the `pinning` of host slabs.

    Every device has these lanes:
        fetch: weights, host to device (prefetch).
        offload: gradients, device to host.
        gradients: merges, sums and norms of gradients on the host.
        update: optimizer steps on the host. It is apart from `gradients`, because `step`
            waits for norms and must not wait behind updates that began before it.
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


class ComputeSpan:
    """Records one span for each use of a layer. At most one span is open.

    A wait inside a span ends it, and begins a further span of the same name after the wait. So the
    row shows compute alone. The thread that calls hooks enters.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: tuple[str, object] | None = None

    def begin(self, name: object) -> None:
        """Open a span, if a trace is recorded."""
        if self._device.trace.recording:
            self._open = (str(name), self._device.compute.begin_span())

    def end(self) -> None:
        """Close the open span, if there is one."""
        if self._open is not None:
            name, begun = self._open
            self._device.compute.end_span(name, begun)
            self._open = None

    def drop(self) -> None:
        """The pass failed: do not record the open span."""
        self._open = None

    @contextmanager
    def waiting(self, fence: Fence) -> Iterator[None]:
        """Context manager around the compute lane's wait for `fence`."""
        name = self._open[0] if self._open is not None and not fence.done else None
        if name is not None:
            self.end()
        yield
        if name is not None:
            self.begin(name)


def _ignore(error: LaneError) -> None:
    """Do nothing: the failure is kept."""


def bytes_moved(nbytes: int) -> dict[str, int]:
    """Return the span's argument for the bytes that its operation moved; none for 0."""
    return {"nbytes": nbytes} if nbytes else {}


def timed(wait: Callable[[], object]) -> float:
    """Call `wait` and return the seconds that it took."""
    start_s = time.perf_counter()
    wait()
    return time.perf_counter() - start_s


# -- random numbers ------------------------------------------------------------------------------
_WITHOUT_GENERATOR = ("cpu", "meta")  # devices that use torch's CPU generator


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's generator, or None if it uses torch's CPU generator."""
    if device.type in _WITHOUT_GENERATOR:
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore the state that `random_state` returned, if the device has a generator."""
    if device.type not in _WITHOUT_GENERATOR:
        torch.get_device_module(device).set_rng_state(state, device)
