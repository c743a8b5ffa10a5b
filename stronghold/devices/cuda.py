"""A GPU: its streams, events and memory, by `torch.accelerator` and torch's module of its kind.

Owns the transfer streams. `kinds` has what differs between kinds of GPUs. Compute is the stream
that is current in the calling thread: the user's. What overlaps what:
  fetch stream  weights host -> device, beside compute
  drain stream  gradients device -> host, beside compute and, the link being full duplex, fetches
  gather and reduce streams, of several ranks: collectives, beside all of these
  update lane   host threads only; it waits for the drain stream's events

Each transfer lane has a host thread, because a GPU cannot wait for a host event: the thread waits
for the host-side fences, enqueues the copy and records the event (see [Note: issued and done] in
`base`). What waits for no host event is enqueued by the thread that submits it.

[Note: side streams] Chunks of a layer take turns on side streams, so that kernels of several run at
once. In forward a layer's call forks and joins. In backward autograd runs a chunk's nodes on its
stream again; the first of them waits for the main stream, by autograd's own events, and the main
stream follows each chunk's last one. What could go wrong between the two, and why it does not:
  memory   torch's allocator gives what is freed to the stream that took it, at once. Between fork
           and join the main stream takes nothing, but for sums of autograd's, which wait for the
           chunk at hand and come after the chunks before; and side streams only run between them.
           So what a side stream reads of the main one's is overwritten after the join, and what
           the main one reads of theirs after the next fork: no tensor needs `record_stream`
  waits    before memory is dropped that a lane still reads, and before a slot is read that a lane
           has written, all streams wait (`ComputeLane.wait_everywhere`)
  sums     gradients are added to a slot on the chunk's stream, after all that the others have
           added (`streaming.gradients`): in the chunks' order. What comes after the last of them,
           rounding, drains, updates on the device, is done on the main stream, after all chunks
Autograd records gradients that change streams on both, so that they are free again when the host
has seen their events: it is kept from running more than two layers ahead of the device in backward.
cuBLAS has its own workspace on each stream, which torch gives it: the same kernels, the same bits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from stronghold.devices.base import (
    ComputeLane,
    Device,
    DeviceEvent,
    Fence,
    HostLane,
    Lane,
    Seconds,
    ThreadLane,
    Work,
    moved,
)
from stronghold.devices.forks import forked_from
from stronghold.devices.kinds import DeviceKind, kind_here
from stronghold.devices.lane_name import STREAM_LANES, LaneName
from stronghold.devices.memory import DeviceMemory
from stronghold.devices.pinned import GpuPinning
from stronghold.devices.side_streams import SideStreams
from stronghold.devices.triton_kernels import TritonKernels
from stronghold.errors import ConfigError, StateError
from stronghold.telemetry.trace import Trace

TRIAL_BYTES = 64 << 20
_QUERY_EVERY_S = 1e-3
_LAYERS_AHEAD = 2  # [Note: side streams]


def available() -> bool:
    """Whether this process can use a GPU."""
    return kind_here() is not None


def device_of(local_rank: int) -> torch.device:
    """The GPU of a rank. ConfigError where there is none."""
    kind = kind_here()
    if kind is None:
        raise ConfigError(
            'stronghold.device: got "cuda", but torch finds no CUDA device; install a CUDA '
            'build of torch and a driver, or set "device": "emulated" to run on CPU memory'
        )
    if local_rank >= num_devices():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: torch finds {num_devices()}; lower --num_gpus"
        )
    return torch.device(kind.torch_name, local_rank)


def _kind() -> DeviceKind:
    kind = kind_here()
    if kind is None:
        raise StateError("a GPU was asked for, and torch finds none")
    return kind


def wait_for_queued(index: int, look: Callable[[], None]) -> None:
    """Wait until the GPU has done what this thread's stream was given. `look` is called meanwhile,
    and may raise."""
    done = _kind().module.current_stream(index).record_event()
    while not done.query():
        look()
        time.sleep(_QUERY_EVERY_S)


def free_bytes(index: int) -> int:
    """Bytes that this process can take now: what the device has free, and what torch's allocator
    keeps of tensors that are gone."""
    return reachable_bytes(index) - torch.accelerator.memory_allocated(index)


def reachable_bytes(index: int) -> int:
    """Bytes that this process's tensors can have in all: those that they have, and the free; no
    more than `set_per_process_memory_fraction` leaves it."""
    _, total = torch.accelerator.get_memory_info(index)
    limit = int(_kind().module.get_per_process_memory_fraction(index) * total)
    return min(physical_bytes(index), limit)


def physical_bytes(index: int) -> int:
    """Bytes that the device has free, and those that torch's allocator has: what is missing of the
    whole belongs to libraries and to other processes."""
    free, _ = torch.accelerator.get_memory_info(index)
    return int(free) + torch.accelerator.memory_reserved(index)


def identity(index: int) -> tuple[str, int, str]:
    """The device's name, its bytes of memory, and its address on the PCI bus as sysfs names it."""
    found: Any = _kind().module.get_device_properties(index)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return str(found.name), int(found.total_memory), address


def shares_memory(index: int) -> bool:
    """Whether the device's memory is the host's, as of a Jetson or a GB10."""
    found: Any = _kind().module.get_device_properties(index)
    return bool(found.is_integrated)


def num_devices() -> int:
    """The GPUs that this process sees."""
    return torch.accelerator.device_count()


def _seconds_between(begun: Any, end: Any) -> float:
    """Seconds between two timed events, of which the second has been recorded."""
    end.synchronize()
    return float(begun.elapsed_time(end)) * 1e-3


class EventClock:
    """The host's time of events.

    Event times are relative, in milliseconds as fp32: some microseconds in a minute, a hundred in a
    thousand seconds. So the event that they count from is replaced now and then by a later one,
    whose time is known by then; spans that began before it count from the one before.
    """

    KEEP_S = 30.0

    def __init__(self, event: Any, at_s: float) -> None:
        self._earlier = self._origin = (event, at_s)

    def at(self, event: Any) -> float:
        """`time.perf_counter()` when the event, which has passed, did; events come in order, but
        for those of the last seconds."""
        origin, at_s = self._earlier
        seconds = at_s + _seconds_between(origin, event)
        if seconds >= self._origin[1]:
            origin, at_s = self._origin
            seconds = at_s + _seconds_between(origin, event)
        if seconds > self._origin[1] + self.KEEP_S:
            self._earlier, self._origin = self._origin, (event, seconds)
        return seconds


class StreamLane(ThreadLane):
    """A lane whose work enqueues copies on a stream of its own: at once, and by whoever submits it,
    where nothing is waited for on the host."""

    def __init__(self, name: LaneName, device: CudaDevice) -> None:
        self._gpu = device
        self.stream: Any = device.kind.module.Stream(device.torch_device)
        super().__init__(name, device)

    def finish(self) -> None:
        super().finish()  # all is enqueued
        if not forked_from(self._process):
            self.stream.synchronize()

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        copies = nbytes > 0 and self._gpu.only_enqueues
        return copies and all(fence.issued and not fence.failed for fence in after)

    def _run(
        self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int
    ) -> DeviceEvent:
        gpu = self._gpu
        for fence in after:
            event = fence.wait_issued()
            if event is not None:
                self.stream.wait_event(event)
        with gpu.kind.module.stream(self.stream):
            begun = gpu.spans.mark(self.stream)
            work()
            gpu.spans.end(self.name, operation, begun, self.stream, nbytes)
            event_of_work: DeviceEvent = gpu.kind.recorded(self.stream)
        return event_of_work


class GpuMemory(DeviceMemory):
    """The GPU's memory. `budget_bytes` limits slots alone; activations come from torch's allocator,
    whose counts these are."""

    def __init__(self, owner: CudaDevice, device: torch.device, budget_bytes: int | None) -> None:
        super().__init__(str(device), budget_bytes)
        self._owner, self._device = owner, device
        self._earlier_peak = 0  # of tensors, before torch's count of it was restarted

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Allocated once and never freed before close, so that it need not be recorded on the
        # streams of the lanes. But the allocator may hand out memory that was freed while kernels
        # of the caller's stream still use it; the fetch stream must not write before they end.
        buffer = torch.empty(numel, dtype=dtype, device=self._device)
        self._owner.current_stream().synchronize()
        return buffer

    def keep_for_lane(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._owner.current_stream())

    def reachable_bytes(self) -> int:
        return reachable_bytes(self._device.index)

    def has_room(self, nbytes: int, beside_bytes: int) -> bool:
        if not super().has_room(nbytes, beside_bytes):
            return False
        parts: list[torch.Tensor] = []
        try:  # in parts, for the plan's buffers need not be neighbours either
            for begin in range(0, nbytes + beside_bytes, TRIAL_BYTES):
                size = min(TRIAL_BYTES, nbytes + beside_bytes - begin)
                parts.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        except torch.OutOfMemoryError:
            return False
        finally:
            # Else larger buffers, of either plan, find these parts in their way in mid-step.
            parts.clear()
            self.trim()
        return True

    def trim(self) -> None:
        self._owner.drop_tables()
        torch.accelerator.empty_cache()

    def restart_activation_peak(self) -> None:
        self._earlier_peak = self.process_peak_bytes()
        self.trim()  # what the allocator keeps of before is no fragment of the steps to come
        torch.accelerator.reset_peak_memory_stats(self._device)

    def activation_peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device)) - self.allocated_bytes

    def fragment_bytes(self) -> int:
        used = int(torch.accelerator.max_memory_allocated(self._device))
        return max(0, int(torch.accelerator.max_memory_reserved(self._device)) - used)

    def process_peak_bytes(self) -> int:
        return max(self._earlier_peak, int(torch.accelerator.max_memory_allocated(self._device)))

    def num_failures(self) -> int:
        return int(torch.accelerator.memory_stats(self._device).get("num_ooms", 0))


class GpuSpans:
    """Timed events around work on streams, and the spans that they become."""

    def __init__(self, kind: DeviceKind, device: torch.device, trace: Trace) -> None:
        self._kind, self._device, self._trace = kind, device, trace
        # A deque: lanes append while the training thread takes from the other end.
        self._open: deque[tuple[str, str, Any, Any, int]] = deque()
        self._clock = self._make_clock() if trace.recording else None

    @property
    def num_open(self) -> int:
        """Spans whose events were not read yet."""
        return len(self._open)

    def record(self, recording: bool) -> None:
        """Switch the trace on or off."""
        if recording and self._clock is None:
            self._clock = self._make_clock()
        self._trace.recording = recording

    def mark(self, stream: Any) -> Any:
        """A timed event on `stream`, or None when nothing is traced."""
        if not self._trace.recording:
            return None
        event = self._kind.timed_event()
        event.record(stream)
        return event

    def end(self, lane: str, name: str, begun: Any, stream: Any, nbytes: int = 0) -> Any:
        """Close the span that `begun` opened, and return its last event; the times are read in
        `settle`. None when nothing is traced."""
        end = self.mark(stream)
        if begun is None or end is None:
            return None
        self._open.append((lane, name, begun, end, nbytes))
        return end

    def settle(self) -> None:
        """Read the spans whose events have passed."""
        if self._clock is None:
            return
        for _ in range(len(self._open)):
            lane, name, begun, end, nbytes = self._open.popleft()
            if not end.query():
                self._open.append((lane, name, begun, end, nbytes))
                continue
            start_s = self._clock.at(begun)
            end_s = start_s + _seconds_between(begun, end)
            self._trace.record(lane, name, start_s, end_s, **moved(nbytes))

    def _make_clock(self) -> EventClock:
        """From an event before every span, and the host's time of it."""
        event = self._kind.timed_event()
        event.record(self._kind.module.current_stream(self._device))
        event.synchronize()
        return EventClock(event, time.perf_counter())


class GpuCompute(ComputeLane):
    """The stream that is current in the calling thread."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._gpu = device
        self.sides = GpuSideStreams(self)

    def stream(self) -> Any:
        return self._gpu.current_stream()

    def new_stream(self) -> Any:
        """A stream beside that of the program."""
        return self._gpu.kind.module.Stream(self._gpu.torch_device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Inside, the calling thread is on `stream`."""
        context: AbstractContextManager[None] = self._gpu.kind.module.stream(stream)
        return context

    def record(self, operation: str, stream: object = None) -> Fence:
        event = self._gpu.kind.recorded(stream or self.stream())
        fence = Fence(LaneName.COMPUTE, operation)
        fence.issue(event)
        return fence

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        # Torch's pinned allocator: some bytes, which it keeps until the copy is done.
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        copied = self.record("read")

        def read() -> list[float]:
            copied.wait()
            found: list[float] = values.tolist()
            return found

        return read

    def wait(self, fence: Fence) -> Seconds:
        # The host returns at once; how long the stream stands still its own clock tells.
        stream, spans = self.stream(), self._gpu.spans
        begun = spans.mark(stream)
        event = fence.wait_issued()
        if event is not None:
            stream.wait_event(event)
        end = spans.end("wait", fence.operation, begun, stream)
        return None if end is None else lambda: _seconds_between(begun, end)

    def wait_everywhere(self, fence: Fence) -> Seconds:
        seconds, event = self.wait(fence), fence.wait_issued()
        for stream in self.sides.all_streams if event is not None else ():
            stream.wait_event(event)
        return seconds

    def begin_span(self) -> object:
        stream = self.stream()
        return stream, self._gpu.spans.mark(stream)

    def end_span(self, name: str, begun: object) -> None:
        assert isinstance(begun, tuple)
        stream, event = begun  # in backward the next chunk's stream may be the current one
        self._gpu.spans.end(self._row(stream), name, event, stream)

    def _row(self, stream: Any) -> str:
        """Of the trace."""
        sides = self.sides.streams
        return f"compute {sides.index(stream) + 1}" if stream in sides else "compute"


class GpuSideStreams(SideStreams):
    """The side streams of a GPU ([Note: side streams])."""

    def __init__(self, compute: GpuCompute) -> None:
        super().__init__()
        self._compute = compute
        self._main: Any = None  # the stream that forked last
        self._behind: deque[Fence] = deque()  # the ends of the newest layers' backwards

    @property
    def all_streams(self) -> tuple[Any, ...]:
        """The stream that forked last, and the side streams; none before the first fork."""
        return () if self._main is None else (self._main, *self.streams)

    def open(self, count: int) -> None:
        self.streams = [self._compute.new_stream() for _ in range(count if count > 1 else 0)]
        self._main = None

    @contextmanager
    def forked(self) -> Iterator[Any]:
        main = self._compute.stream()
        if self.streams:
            self._main = main
        for stream in self.streams:
            stream.wait_stream(main)
        try:
            yield main
        finally:
            for stream in self.streams:
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
            main.wait_stream(self._compute.stream())

    @contextmanager
    def joined(self) -> Iterator[None]:
        if self._main is None:
            yield
            return
        with self._compute.on(self._main):
            for stream in self.streams:
                self._main.wait_stream(stream)
            yield
            self._behind.append(self._compute.record("joined"))
        if len(self._behind) > _LAYERS_AHEAD:
            self._behind.popleft().wait()


class CudaDevice(Device):
    """One GPU. `budget_bytes` limits slots alone; activations come from torch's allocator."""

    pinning: GpuPinning

    def __init__(
        self,
        index: int = 0,
        *,
        budget_bytes: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        device = device_of(index)
        self.kind = _kind()
        super().__init__(str(device), GpuMemory(self, device, budget_bytes), trace)
        self._device = device
        torch.accelerator.set_device_index(index)
        self.spans = GpuSpans(self.kind, device, self.trace)
        self._streams: dict[int, Any] = {}  # that were current, by address
        self._kernels: TritonKernels | None = None
        self._beside: Any = self.kind.module.Stream(device)  # of `copy_now`
        self._copying_beside = threading.Lock()
        self.compute = compute = GpuCompute(self)
        self.side_streams = compute.sides
        self._open_lanes()
        lanes = (lane.stream for lane in (self.fetch, self.drain) if isinstance(lane, StreamLane))
        self.pinning = GpuPinning(self.kind, device, [*lanes, self._beside])

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def _make_lane(self, name: LaneName) -> Lane:
        return StreamLane(name, self) if name in STREAM_LANES else HostLane(name, self)

    def current_stream(self) -> Any:
        """The stream that the calling thread is on."""
        # Asked several times for each gradient: torch makes a new object each time.
        address = self.kind.raw_stream(self._device.index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = self.kind.module.current_stream(self._device)
        return stream

    @property
    def only_enqueues(self) -> bool:
        """Whether copies on streams never hold their caller up."""
        return self.alone and not self.pinning.refuses

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.pinning.copy(target, source, self.current_stream())

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # A stream beside the lanes': any thread may call, and the caller has waited for the others.
        self.enter_operation()
        with self._copying_beside, self.kind.module.stream(self._beside):
            self.copy(target, source)
            self._beside.synchronize()

    @property
    def kernels(self) -> TritonKernels:
        if self._kernels is None:
            self._kernels = TritonKernels(self)
        return self._kernels

    def drop_tables(self) -> None:
        """Drop what kernels keep on the device of earlier launches."""
        if self._kernels is not None:
            self._kernels.drop_tables()

    def check(self) -> None:
        super().check()
        if self.kind.module.is_current_stream_capturing():
            raise ConfigError(
                "a CUDA graph is being captured: its replay would call no hook, so that no layer "
                "would be fetched, drained or updated; call the model outside of torch.cuda.graph, "
                'and compile without mode="reduce-overhead" or "max-autotune"'
            )

    def record_spans(self, recording: bool) -> None:
        self.spans.record(recording)

    def settle(self) -> None:
        self.spans.settle()

    def enter_operation(self) -> None:
        # A new thread's current device is 0: waiting for an event there would make a context on a
        # GPU that belongs to another rank.
        torch.accelerator.set_device_index(self._device.index)

    def close(self) -> None:
        super().close()
        torch.accelerator.synchronize(self._device)
        self.settle()
        self.pinning.close()
        if self.spans.num_open:
            raise StateError(f"{self.spans.num_open} spans of {self.name} never ended")
