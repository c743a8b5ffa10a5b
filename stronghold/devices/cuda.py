"""A CUDA GPU: its streams, events and memory.

Owns the transfer streams. Compute is the current stream of the calling thread: the user's.
Overlaps:
  fetch stream   prefetches weights, host -> device, beside compute
  offload stream   gradients, device -> host, beside compute and, on a full-duplex link, fetches
  reduce stream  gradients, to the rank that owns the layer, beside all streams above
  update lane    host threads only; it waits for the offload stream's events

Each transfer lane has a host thread, because a GPU cannot wait for a host event. The thread waits
for the host-side fences, enqueues the copy and records the event (see [Note: issued and done] in
`fences`). The submitting thread enqueues a copy that waits for no host event.

[Note: side streams] Chunks of a layer take turns on side streams, so that kernels of several chunks
run at once. One layer, in forward:
1. The side streams wait for the main stream (fork).
2. Each chunk runs on its side stream.
3. The main stream waits for the side streams (join).
One layer, in backward:
1. Autograd runs a chunk's nodes on the chunk's stream again. The first node waits for the main
   stream, by autograd's events.
2. The main stream waits for each chunk's last node (`follow`).
There are three hazards between the main stream and the side streams. None is a race:
  memory  Torch's allocator gives freed memory to the stream that took it, at once. Between fork and
          join only side streams run, and the main stream takes no memory. The exception are
          autograd's sums: they wait for their chunk and come after the earlier chunks. So memory
          that a side stream reads of the main stream is overwritten after the join. Memory that the
          main stream reads of a side stream is overwritten after the next fork. No tensor needs
          `record_stream`.
  waits   All streams wait (`ComputeLane.wait_everywhere`) for a lane that still reads memory,
          before that memory is dropped. They wait for a lane that has written a slot, before any
          stream reads the slot.
  sums    A chunk's stream adds the chunk's gradients to a slot after the earlier chunks' additions
          (`train.gradients`), in the order of chunks. The main stream does the work after the
          last addition, after all chunks: rounding, drains, updates on the device.
Autograd records gradients that change streams on both streams. Their memory is free once the host
has seen these events. So in backward the host runs at most two layers ahead of the device. Torch
gives cuBLAS one workspace per stream: the same kernels, the same bits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from stronghold.devices.device import (
    ComputeLane,
    DelayedRead,
    Device,
    HostLane,
    Lane,
    Seconds,
    SideStreams,
    ThreadLane,
    Work,
    bytes_moved,
)
from stronghold.devices.fences import STREAM_LANES, DeviceEvent, Fence, LaneName
from stronghold.devices.host_memory import GpuPinning
from stronghold.devices.memory import DeviceMemory
from stronghold.devices.threads import forked_from
from stronghold.devices.triton_kernels import TritonKernels
from stronghold.errors import ConfigError, StateError
from stronghold.telemetry.trace import Trace

TRIAL_BYTES = 64 << 20
PCI_NUMBERS = ("pci_domain_id", "pci_bus_id", "pci_device_id")
_QUERY_EVERY_S = 1e-3
_LAYERS_AHEAD = 2  # [Note: side streams]


def available() -> bool:
    """Return whether this process can use a GPU."""
    return torch.cuda.is_available()


def device_of(local_rank: int) -> torch.device:
    """Return the GPU of a rank. Raises ConfigError if the rank has none."""
    if not available():
        raise ConfigError(
            'stronghold.device: got "cuda", but torch finds no CUDA device; install a CUDA '
            'build of torch and a driver, or set "device": "emulated" to run on CPU memory'
        )
    if local_rank >= num_devices():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: torch finds {num_devices()}; lower --num_gpus"
        )
    return torch.device("cuda", local_rank)


def _recorded(stream: Any) -> Any:
    """Record an event for a fence on `stream`, and return it.

    A host lane that waits for the event sleeps, and leaves its core to updates.
    """
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def wait_for_queued(index: int, look: Callable[[], None]) -> None:
    """Block the calling thread until the GPU has done the work of this thread's stream.

    `look` is called repeatedly during the wait, and may raise.
    """
    end_of_work = torch.cuda.current_stream(index).record_event()
    while not end_of_work.query():
        look()
        time.sleep(_QUERY_EVERY_S)


def free_bytes(index: int) -> int:
    """Return the bytes that this process can take now.

    These are the device's free bytes, and those that torch's allocator keeps of dropped tensors.
    """
    return reachable_bytes(index) - torch.accelerator.memory_allocated(index)


def reachable_bytes(index: int) -> int:
    """Return the bytes that this process's tensors can have together: the present and free ones.

    `set_per_process_memory_fraction` limits them.
    """
    _, total = torch.accelerator.get_memory_info(index)
    limit = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return min(physical_bytes(index), limit)


def physical_bytes(index: int) -> int:
    """Return the device's free bytes, and those of torch's allocator, together.

    The other bytes of the device belong to libraries and to other processes.
    """
    free, _ = torch.accelerator.get_memory_info(index)
    return int(free) + torch.accelerator.memory_reserved(index)


def identity(index: int) -> tuple[str, int, str]:
    """Return the device's name, its bytes of memory, and its PCI address as sysfs names it.

    The address is "" if torch does not know it.
    """
    device: Any = torch.cuda.get_device_properties(index)
    domain, bus, slot = (getattr(device, name, None) for name in PCI_NUMBERS)
    address = "" if None in (domain, bus, slot) else f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return str(device.name), int(device.total_memory), address


def shares_memory(index: int) -> bool:
    """Return whether the device's memory is the host's (Jetson, GB10)."""
    device: Any = torch.cuda.get_device_properties(index)
    return bool(device.is_integrated)


def num_devices() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.accelerator.device_count()


def _seconds_between(begun: Any, end: Any) -> float:
    """Return the seconds between two timed events, and wait until the second has passed."""
    end.synchronize()
    return float(begun.elapsed_time(end)) * 1e-3


class ElapsedTime:
    """The seconds between two timed events on streams. A call waits for the second event."""

    def __init__(self, begun: Any, end: Any) -> None:
        self._begun = begun
        self._end = end

    def __call__(self) -> float:
        return _seconds_between(self._begun, self._end)


class EventClock:
    """Converts timed events to the host's time.

    Event times are relative, in milliseconds as fp32. Their error is some microseconds after a
    minute, and a hundred microseconds after a thousand seconds. So a later event, whose time is
    known by then, replaces the origin after `KEEP_S` seconds. Spans that began before the new
    origin count from the origin before.
    """

    KEEP_S = 30.0

    def __init__(self, event: Any, at_s: float) -> None:
        self._earlier = self._origin = (event, at_s)

    def at(self, event: Any) -> float:
        """Return the time (`time.perf_counter()`) at which an event passed.

        The event has passed. Events come in order, except for those of the last seconds.
        """
        origin, at_s = self._earlier
        seconds = at_s + _seconds_between(origin, event)
        if seconds >= self._origin[1]:
            origin, at_s = self._origin
            seconds = at_s + _seconds_between(origin, event)
        if seconds > self._origin[1] + self.KEEP_S:
            self._earlier, self._origin = self._origin, (event, seconds)
        return seconds


class StreamLane(ThreadLane):
    """A lane whose work enqueues copies on the lane's stream.

    The submitting thread enqueues a copy at once if the copy waits for nothing on the host.
    """

    def __init__(self, name: LaneName, device: CudaDevice) -> None:
        self._gpu = device
        self.stream: Any = torch.cuda.Stream(device.torch_device)
        super().__init__(name, device)

    def finish(self) -> None:
        super().finish()  # now all copies are enqueued
        if not forked_from(self._process):
            self.stream.synchronize()

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        if nbytes == 0 or not self._gpu.only_enqueues:
            return False
        return all(fence.issued and not fence.failed for fence in after)

    def _run(
        self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int
    ) -> DeviceEvent:
        gpu = self._gpu
        for fence in after:
            # the lane's thread waits for the other lane's issue
            event = fence.wait_issued()
            if event is not None:
                # the lane's stream waits for the other stream
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            begun = gpu.spans.mark(self.stream)
            work()
            gpu.spans.end(self.name, operation, begun, self.stream, nbytes)
            event_of_work: DeviceEvent = _recorded(self.stream)
        return event_of_work


class GpuMemory(DeviceMemory):
    """The GPU's memory.

    `budget_bytes` limits slots alone. Activations come from torch's allocator, which counts them.
    """

    def __init__(self, owner: CudaDevice, device: torch.device, budget_bytes: int | None) -> None:
        super().__init__(str(device), budget_bytes)
        self._owner = owner
        self._device = device

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # A buffer is never freed before close, so it need not be recorded on the lanes' streams.
        # But the allocator may return memory that kernels of the caller's stream still use. The
        # host waits for these kernels, so that the fetch stream cannot race with them.
        buffer = torch.empty(numel, dtype=dtype, device=self._device)
        self._wait_for_caller()
        return buffer

    def _wait_for_caller(self) -> None:
        self._owner.current_stream().synchronize()

    def keep_for_lane(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._owner.current_stream())

    def free_bytes(self) -> int:
        return free_bytes(self._device.index) + self.allocated_bytes

    def has_room(self, nbytes: int, beside_bytes: int) -> bool:
        if not super().has_room(nbytes, beside_bytes):
            return False
        # The trial takes separate tensors, for the plan's buffers need not be neighbours either.
        trials: list[torch.Tensor] = []
        try:
            for begin in range(0, nbytes + beside_bytes, TRIAL_BYTES):
                size = min(TRIAL_BYTES, nbytes + beside_bytes - begin)
                trials.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        except torch.OutOfMemoryError:
            return False
        finally:
            # The allocator would keep these tensors' memory in fragments, and larger buffers of
            # either plan would not fit in mid-step.
            trials.clear()
            self.trim()
        return True

    def trim(self) -> None:
        self._owner.drop_tables()
        torch.accelerator.empty_cache()

    def restart_process_peak(self) -> None:
        self.trim()
        torch.accelerator.reset_peak_memory_stats(self._device)

    def process_peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device))


class GpuSpans:
    """Timed events around work on streams, and the spans of the trace that they become."""

    def __init__(self, device: torch.device, trace: Trace) -> None:
        self._device = device
        self._trace = trace
        # A deque, which is safe to enter: lanes append while the training thread pops on the left.
        self._open: deque[tuple[str, str, Any, Any, int]] = deque()
        self._clock = self._make_clock() if trace.recording else None

    @property
    def num_open(self) -> int:
        """The number of spans whose events were not read yet."""
        return len(self._open)

    def mark(self, stream: Any) -> Any:
        """Record a timed event on `stream` and return it. None while the trace is off."""
        if not self._trace.recording:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def end(self, lane: str, name: str, begun: Any, stream: Any, nbytes: int = 0) -> Any:
        """Close the span that `begun` opened, and return its last event.

        `settle` reads the times. Returns None while the trace is off.
        """
        end = self.mark(stream)
        if begun is None or end is None:
            return None
        self._open.append((lane, name, begun, end, nbytes))
        return end

    def settle(self) -> None:
        """Enter the spans whose events have passed in the trace."""
        if self._clock is None:
            return
        for _ in range(len(self._open)):
            lane, name, begun, end, nbytes = self._open.popleft()
            if not end.query():
                self._open.append((lane, name, begun, end, nbytes))
                continue
            start_s = self._clock.at(begun)
            end_s = start_s + _seconds_between(begun, end)
            self._trace.record(lane, name, start_s, end_s, **bytes_moved(nbytes))

    def _make_clock(self) -> EventClock:
        """Make a clock from an event before every span, and the host's time of this event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()
        return EventClock(event, time.perf_counter())


class GpuCompute(ComputeLane):
    """The compute lane: the current stream of the calling thread."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._gpu = device
        self.sides = GpuSideStreams(self)

    def stream(self) -> Any:
        return self._gpu.current_stream()

    def new_stream(self) -> Any:
        """Make a stream beside the program's."""
        return torch.cuda.Stream(self._gpu.torch_device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Context manager: the calling thread is on `stream`."""
        context: AbstractContextManager[None] = torch.cuda.stream(stream)
        return context

    def record(self, operation: str, stream: object = None) -> Fence:
        event = _recorded(stream or self.stream())
        fence = Fence(LaneName.COMPUTE, operation)
        fence.issue(event)
        return fence

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        # Torch's pinned allocator keeps the bytes of `values` until the copy is done.
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        return DelayedRead(values, self.record("read"))

    def wait(self, fence: Fence) -> Seconds:
        stream, spans = self.stream(), self._gpu.spans
        begun = spans.mark(stream)
        event = fence.wait_issued()  # the calling thread waits for the lane's issue
        if event is not None:
            # the calling thread's stream waits for the lane's stream
            stream.wait_event(event)
        end = spans.end("wait", fence.operation, begun, stream)
        # The host goes on at once. The stream's clock has the time for which the stream waited.
        return None if end is None else ElapsedTime(begun, end)

    def wait_everywhere(self, fence: Fence) -> Seconds:
        seconds = self.wait(fence)
        event = fence.wait_issued()
        if event is not None:
            for stream in self.sides.all_streams:
                # the main and side streams wait for the lane's stream
                stream.wait_event(event)
        return seconds

    def begin_span(self) -> object:
        stream = self.stream()
        return stream, self._gpu.spans.mark(stream)

    def end_span(self, name: str, begun: object) -> None:
        assert isinstance(begun, tuple)
        stream, event = begun  # the current stream may be the next chunk's, in backward
        self._gpu.spans.end(self._row(stream), name, event, stream)

    def _row(self, stream: Any) -> str:
        """Return the trace's row of a stream."""
        side_streams = self.sides.streams
        if stream in side_streams:
            return f"compute {side_streams.index(stream) + 1}"
        return "compute"


class GpuSideStreams(SideStreams):
    """The side streams of a GPU ([Note: side streams])."""

    def __init__(self, compute: GpuCompute) -> None:
        super().__init__()
        self._compute = compute
        self._main: Any = None  # the stream that forked last
        self._backward_ends: deque[Fence] = deque()  # of the newest layers

    @property
    def all_streams(self) -> tuple[Any, ...]:
        """The stream that forked last, and the side streams; none before the first fork."""
        return () if self._main is None else (self._main, *self.streams)

    def open(self, count: int) -> None:
        num_streams = count if count > 1 else 0
        self.streams = [self._compute.new_stream() for _ in range(num_streams)]
        self._main = None

    @contextmanager
    def forked(self) -> Iterator[Any]:
        main = self._compute.stream()
        if self.streams:
            self._main = main
        for stream in self.streams:
            stream.wait_stream(main)  # fork: a side stream waits for the main stream
        try:
            yield main
        finally:
            for stream in self.streams:
                # join: the main stream waits for a side stream
                main.wait_stream(stream)

    @contextmanager
    def beside(self, number: int, name: str) -> Iterator[None]:
        if not self.streams:
            yield
            return
        stream = self.streams[number % len(self.streams)]
        with self._compute.on(stream):
            begun = self._compute.begin_span()
            yield
            self._compute.end_span(name, begun)

    def follow(self, main: Any) -> None:
        if self.streams:
            # the main stream waits for the chunk's
            main.wait_stream(self._compute.stream())

    def on_main(self) -> AbstractContextManager[None]:
        return nullcontext() if self._main is None else self._compute.on(self._main)

    @contextmanager
    def joined(self) -> Iterator[None]:
        if self._main is None:
            yield
            return
        with self._compute.on(self._main):
            for stream in self.streams:
                # the main stream waits for a side stream
                self._main.wait_stream(stream)
            yield
            self._backward_ends.append(self._compute.record("joined"))
        if len(self._backward_ends) > _LAYERS_AHEAD:
            # The host waits for the device to end an earlier layer's backward.
            self._backward_ends.popleft().wait()


class CudaDevice(Device):
    """One GPU.

    Arguments:
        index: the GPU's number in this process.
        budget_bytes: the most bytes of slots; None: no limit. Activations do not count.
        trace: gets the spans of lanes; None records none.

    Raises ConfigError if there is no such GPU.
    """

    pinning: GpuPinning

    def __init__(
        self, index: int = 0, *, budget_bytes: int | None = None, trace: Trace | None = None
    ) -> None:
        device = device_of(index)
        super().__init__(str(device), GpuMemory(self, device, budget_bytes), trace)
        self._device = device
        torch.accelerator.set_device_index(index)
        self.spans = GpuSpans(device, self.trace)
        self._streams: dict[int, Any] = {}  # streams that were current, by address
        self._kernels: TritonKernels | None = None
        self._copy_stream: Any = torch.cuda.Stream(device)  # for `copy_now`
        self._copy_lock = threading.Lock()  # held by the thread that uses this stream
        compute = GpuCompute(self)
        self.compute = compute
        self.side_streams = compute.sides
        self._open_lanes()
        self.pinning = GpuPinning(device)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def _make_lane(self, name: LaneName) -> Lane:
        return StreamLane(name, self) if name in STREAM_LANES else HostLane(name, self)

    def current_stream(self) -> Any:
        """Return the calling thread's stream."""
        # Torch makes a new object at each call, and each gradient takes several calls.
        address = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self._device)
        return stream

    @property
    def only_enqueues(self) -> bool:
        """True if a copy on a stream never blocks its caller."""
        return self.is_single_process and not self.pinning.has_refused_slabs

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.pinning.copy(target, source)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # No race with the lanes' streams: the caller has waited for their operations. Threads take
        # turns with this stream.
        self.enter_operation()
        with self._copy_lock, torch.cuda.stream(self._copy_stream):
            self.copy(target, source)
            self._copy_stream.synchronize()

    @property
    def kernels(self) -> TritonKernels:
        if self._kernels is None:
            self._kernels = TritonKernels(self)
        return self._kernels

    def drop_tables(self) -> None:
        """Drop the tables that kernels keep on the device after earlier launches."""
        if self._kernels is not None:
            self._kernels.drop_tables()

    def check(self) -> None:
        super().check()
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a CUDA graph is being captured: its replay would call no hook, so that no layer "
                "would be fetched, drained or updated; call the model outside of torch.cuda.graph, "
                'and compile without mode="reduce-overhead" or "max-autotune"'
            )

    def settle(self) -> None:
        self.spans.settle()

    def enter_operation(self) -> None:
        # A new thread's current device is 0. To wait for an event with it would make a context on
        # a GPU of another rank.
        torch.accelerator.set_device_index(self._device.index)

    def close(self) -> None:
        super().close()
        torch.accelerator.synchronize(self._device)
        self.settle()
        if self.spans.num_open:
            raise StateError(f"{self.spans.num_open} spans of {self.name} never ended")
