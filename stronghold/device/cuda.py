"""A CUDA device: streams, events, pinned slabs. The only file that names `torch.cuda`.

Owns the transfer streams and the registration of host slabs. Compute is the stream that is current
in the calling thread: the user's. What overlaps what:
  fetch stream  weights host -> device, beside compute
  drain stream  gradients device -> host, beside compute and, the link being full duplex, fetches
  gather and reduce streams, of several ranks: collectives, beside all of these
  update lane   host threads only; it waits for the drain stream's events

Each transfer lane has a host thread, because CUDA cannot wait for a host event: the thread waits
for the host-side fences, enqueues the copy and records the event (see [Note: issued and done] in
`base`). What waits for no host event is enqueued by the thread that submits it.

[Note: registered] `copy_(non_blocking=True)` is cudaMemcpyAsync, whether torch made the host memory
or we registered it; from memory that is not registered the driver copies through its own, and holds
the caller up. One copy may not span registered and other memory (CUDA_ERROR_INVALID_VALUE), which
several ranks' weights do, of which each registers its own part: such a copy is made in pieces.

[Note: refused] Some systems register little memory or none: WSL2, containers, `ulimit -l`. What
they refuse is copied by the lane's thread, through a small registered ring per stream. The thread
touches the slab itself, and is done with it when the operation is issued: a later one, which waits
for the issue at least, meets no copy of it that is still under way.

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
           has written, all streams wait (`compute_wait_everywhere`)
  sums     gradients are added to a slot on the chunk's stream, after all that the others have
           added (`runtime.gradients`): in the chunks' order. What comes after the last of them,
           rounding, drains, updates on the device, is done on the main stream, after all chunks
Autograd records gradients that change streams on both, so that they are free again when the host
has seen their events: it is kept from running more than two layers ahead of the device in backward.
cuBLAS has its own workspace on each stream, which torch gives it: the same kernels, the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from stronghold.device.base import (
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
from stronghold.device.lane_name import STREAM_LANES, LaneName
from stronghold.device.memory import DeviceMemory
from stronghold.errors import ConfigError, StateError
from stronghold.native import available_cores
from stronghold.optim.triton_kernels import TritonKernels
from stronghold.process import forked_from
from stronghold.telemetry.trace import Trace

logger = logging.getLogger("stronghold")

_HOST_REGISTER_PORTABLE = 1
_ALREADY_REGISTERED = 712  # a mistake of ours: no limit of the system's
_RING_BYTES = 8 << 20  # of one of a ring's two entries, at most
_LEAST_RING_BYTES = 64 << 10
TRIAL_BYTES = 64 << 20
_POPULATE_WRITE = 23  # madvise's, since Linux 5.14
_QUERY_EVERY_S = 1e-3
_TOUCH_BYTES = 32 << 20  # that one thread commits at a time
_LAYERS_AHEAD = 2  # [Note: side streams]
_MAX_TOUCHING = 8  # threads: clearing pages is bound by memory


def available() -> bool:
    """Whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def device_of(local_rank: int) -> torch.device:
    """The GPU of a rank. ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            'stronghold.device: got "cuda", but torch finds no CUDA device; install a CUDA '
            'build of torch and a driver, or set "device": "emulated" to run on CPU memory'
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: torch finds {torch.cuda.device_count()}; "
            "lower --num_gpus"
        )
    return torch.device("cuda", local_rank)


def wait_for_queued(index: int, look: Callable[[], None]) -> None:
    """Wait until the GPU has done what this thread's stream was given. `look` is called meanwhile,
    and may raise."""
    done = torch.cuda.current_stream(index).record_event()
    while not done.query():
        look()
        time.sleep(_QUERY_EVERY_S)


def free_bytes(index: int) -> int:
    """Bytes that this process can take now: what the device has free, and what torch's allocator
    keeps of tensors that are gone."""
    return reachable_bytes(index) - torch.cuda.memory_allocated(index)


def reachable_bytes(index: int) -> int:
    """Bytes that this process's tensors can have in all: those that they have, and the free; no
    more than `torch.cuda.set_per_process_memory_fraction` leaves it."""
    total = torch.cuda.mem_get_info(index)[1]
    limit = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return min(physical_bytes(index), limit)


def physical_bytes(index: int) -> int:
    """Bytes that the device has free, and those that torch's allocator has: what is missing of the
    whole belongs to libraries and to other processes."""
    free, _ = torch.cuda.mem_get_info(index)
    return int(free) + torch.cuda.memory_reserved(index)


def identity(index: int) -> tuple[str, int, str]:
    """The device's name, its bytes of memory, and its address on the PCI bus as sysfs names it."""
    found: Any = torch.cuda.get_device_properties(index)  # torch's stubs leave the address out
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return str(found.name), int(found.total_memory), address


def shares_memory(index: int) -> bool:
    """Whether the device's memory is the host's, as of a Jetson or a GB10."""
    found: Any = torch.cuda.get_device_properties(index)
    return bool(found.is_integrated)


def num_devices() -> int:
    """The GPUs that this process sees."""
    return torch.cuda.device_count()


def cuts(regions: Sequence[tuple[int, int]], begin: int, end: int) -> list[int]:
    """The addresses between `begin` and `end` where one of `regions`, [begin, end) in order and
    apart, begins or ends."""
    found: list[int] = []
    first = bisect_left(regions, (begin, begin))
    for region in regions[max(0, first - 1) :]:
        if region[0] >= end:
            break
        found += [at for at in region if begin < at < end and at not in found]
    return found


def _is_inside(regions: Sequence[tuple[int, int]], address: int) -> bool:
    """Whether the address lies in one of `regions`, which are as for `cuts`."""
    at = bisect_right(regions, address, key=lambda region: region[0]) - 1
    return at >= 0 and address < regions[at][1]


def _touch(address: int, nbytes: int) -> None:
    """Commit a slab's pages by several threads: registration clears them with one. Where the kernel
    or a limit on threads does not let us, registration does it all."""
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + nbytes
    end -= end % mmap.PAGESIZE
    if end - begin <= _TOUCH_BYTES:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def commit(at: int) -> None:
        madvise(at, min(_TOUCH_BYTES, end - at), _POPULATE_WRITE)

    num_threads = min(available_cores(), _MAX_TOUCHING)
    with contextlib.suppress(RuntimeError), ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(commit, range(begin, end, _TOUCH_BYTES)))


def _fence_event() -> torch.cuda.Event:
    """An event for a fence. A host lane that waits for it sleeps: its core is for updates."""
    return torch.cuda.Event(blocking=True)


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _seconds_between(begun: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(begun.elapsed_time(end)) * 1e-3


def _cudart() -> Any:
    return torch.cuda.cudart()


class EventClock:
    """The host's time of events.

    Event times are relative, in milliseconds as fp32: some microseconds in a minute, a hundred in a
    thousand seconds. So the event that they count from is replaced now and then by a later one,
    whose time is known by then; spans that began before it count from the one before.
    """

    KEEP_S = 30.0

    def __init__(self, event: torch.cuda.Event, at_s: float) -> None:
        self._earlier = self._origin = (event, at_s)

    def at(self, event: torch.cuda.Event) -> float:
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
        self._cuda = device
        self.stream = torch.cuda.Stream(device.torch_device)
        super().__init__(name, device)

    def finish(self) -> None:
        super().finish()  # all is enqueued
        if not forked_from(self._process):
            self.stream.synchronize()

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        copies = nbytes > 0 and self._cuda.only_enqueues
        return copies and all(fence.issued and not fence.failed for fence in after)

    def _run(
        self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int
    ) -> DeviceEvent:
        for fence in after:
            event = fence.wait_issued()
            if event is not None:
                assert isinstance(event, torch.cuda.Event)
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            begun = self._cuda.mark(self.stream)
            work()
            self._cuda.end_mark(self.name, operation, begun, self.stream, nbytes)
            done = _fence_event()
            done.record(self.stream)
        return done


class _Ring:
    """Two registered entries, through which one stream's copies of other memory pass in turn."""

    def __init__(self, entries: Sequence[torch.Tensor]) -> None:
        self.entries = entries
        self._free: list[torch.cuda.Event | None] = [None, None]

    def fetch(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        for entry, there, here in self._turns(target, source):
            event = self._free[entry]
            if event is not None:
                event.synchronize()
            passing = self.entries[entry][: here.numel()]
            passing.copy_(here)
            there.copy_(passing, non_blocking=True)
            self._free[entry] = copied = _fence_event()
            copied.record(stream)

    def drain(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Returns when the last byte is there."""
        arriving: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = deque()
        for entry, here, there in self._turns(target, source):
            if len(arriving) == len(self.entries):
                self._arrive(*arriving.popleft())
            passing = self.entries[entry][: here.numel()]
            passing.copy_(there, non_blocking=True)
            event = _fence_event()
            event.record(stream)
            arriving.append((event, here, passing))
        while arriving:
            self._arrive(*arriving.popleft())

    @staticmethod
    def _arrive(event: torch.cuda.Event, target: torch.Tensor, passing: torch.Tensor) -> None:
        event.synchronize()
        target.copy_(passing)

    def _turns(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        size = self.entries[0].numel()
        for turn, begin in enumerate(range(0, target.numel(), size)):
            yield turn % 2, target[begin : begin + size], source[begin : begin + size]


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
        torch.cuda.current_stream(self._device).synchronize()
        return buffer

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
        torch.cuda.empty_cache()

    def restart_activation_peak(self) -> None:
        self._earlier_peak = self.process_peak_bytes()
        self.trim()  # what the allocator keeps of before is no fragment of the steps to come
        torch.cuda.reset_peak_memory_stats(self._device)

    def activation_peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) - self.allocated_bytes

    def fragment_bytes(self) -> int:
        used = int(torch.cuda.max_memory_allocated(self._device))
        return max(0, int(torch.cuda.max_memory_reserved(self._device)) - used)

    def process_peak_bytes(self) -> int:
        return max(self._earlier_peak, int(torch.cuda.max_memory_allocated(self._device)))

    def num_failures(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0))


class CudaDevice(Device):
    """One GPU. `budget_bytes` limits slots alone; activations come from torch's allocator."""

    def __init__(
        self,
        index: int = 0,
        *,
        budget_bytes: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        device = device_of(index)
        super().__init__(f"cuda:{index}", GpuMemory(self, device, budget_bytes), trace)
        self._device = device
        torch.cuda.set_device(index)
        # A deque: lanes append while the training thread takes from the other end.
        self._spans: deque[tuple[str, str, torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._clock = self._make_clock() if self.trace.recording else None
        self._kernels: TritonKernels | None = None
        self._beside = torch.cuda.Stream(self._device)  # of `copy_now`
        self._streams: dict[int, torch.cuda.Stream] = {}  # that were current, by address
        self.side_streams: list[torch.cuda.Stream] = []
        self._main: torch.cuda.Stream | None = None  # that forked last
        self._behind: deque[Fence] = deque()  # the ends of the newest layers' backwards
        self._copying_beside = threading.Lock()
        self._registered: list[tuple[int, int]] = []  # replaced, since lanes read it meanwhile
        self._refused: dict[int, int] = {}  # address -> bytes, of slabs that are not registered
        self._rings: dict[int, _Ring] = {}  # by stream; [Note: refused]
        self._open_lanes()

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def _make_lane(self, name: LaneName) -> Lane:
        return StreamLane(name, self) if name in STREAM_LANES else HostLane(name, self)

    @property
    def only_enqueues(self) -> bool:
        """Whether copies on streams never hold their caller up."""
        return self.alone and not self._refused

    @property
    def pinned_bytes(self) -> int:
        """What is registered now, of slabs and of rings."""
        return sum(end - begin for begin, end in self._registered)

    def pin(self, tensor: torch.Tensor) -> None:
        try:
            self.register(tensor)
        except OSError as error:
            pinned = self.pinned_bytes
            first = not self._refused
            self._refused[tensor.data_ptr()] = tensor.nbytes
            if first:
                self._make_rings()
                logger.warning(
                    "the system lets this process pin %d bytes of host memory, and refuses %d more "
                    "(%s). What is not pinned passes through %d bytes that are: right, but slower. "
                    "Raise the limit: ulimit -l unlimited; in a container --ulimit memlock=-1; "
                    "under WSL2 more memory in .wslconfig",
                    pinned,
                    tensor.nbytes,
                    error,
                    self.pinned_bytes - pinned,
                )

    def register(self, tensor: torch.Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        _touch(tensor.data_ptr(), nbytes)
        status = _cudart().cudaHostRegister(tensor.data_ptr(), nbytes, _HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            self._forget_error()
            what = f"cudaHostRegister of {nbytes} bytes failed with status {int(status)}"
            if int(status) == _ALREADY_REGISTERED:
                raise StateError(f"{what}: a part of it is registered already")
            raise OSError(what)
        registered = list(self._registered)
        insort(registered, (tensor.data_ptr(), tensor.data_ptr() + nbytes))
        self._registered = registered

    def _make_rings(self) -> None:
        """What is left may be little: entries as large as the system lets them be. A stream without
        a ring leaves copies of other memory to the driver, which has its own."""
        lanes = [lane.stream for lane in (self.fetch, self.drain) if isinstance(lane, StreamLane)]
        for stream in (*lanes, self._beside):
            nbytes = _RING_BYTES
            while nbytes >= _LEAST_RING_BYTES:
                # Shared, so that a forked process does not make a write here copy its page.
                slab = torch.frombuffer(mmap.mmap(-1, 2 * nbytes), dtype=torch.uint8)
                try:
                    self.register(slab)
                except OSError:
                    nbytes //= 2
                    continue
                self._rings[stream.cuda_stream] = _Ring((slab[:nbytes], slab[nbytes:]))
                break

    def unpin(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if self._refused.pop(address, None) is not None:
            return
        status = _cudart().cudaHostUnregister(address)
        if int(status) != 0:
            self._forget_error()
            raise StateError(f"cudaHostUnregister failed with status {int(status)}: never pinned?")
        self._registered = [region for region in self._registered if region[0] != address]

    def _forget_error(self) -> None:
        """The runtime keeps a failed call's error for the next kernel launch, which would report it
        as its own: launch one."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host = source if target.is_cuda else target
        address = host.data_ptr()
        inside = cuts(self._registered, address, address + host.nbytes)
        if not inside and not self._rings:
            target.copy_(source, non_blocking=True)
            return
        there, here = (flat.view(-1).view(torch.uint8) for flat in (target, source))
        ends = [0, *(at - address for at in inside), host.nbytes]  # [Note: registered]
        for begin, end in pairwise(ends):
            self._copy_bytes(there[begin:end], here[begin:end], address + begin)

    def _copy_bytes(self, target: torch.Tensor, source: torch.Tensor, address: int) -> None:
        """Of memory that is registered from its address on, or not at all."""
        stream = self.compute_stream()
        ring = self._rings.get(stream.cuda_stream)
        if ring is None or _is_inside(self._registered, address):
            target.copy_(source, non_blocking=True)
            return
        if target.is_cuda:  # [Note: refused]
            ring.fetch(target, source, stream)
        else:
            ring.drain(target, source, stream)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # A stream beside the lanes': any thread may call, and the caller has waited for the others.
        self.enter_operation()
        with self._copying_beside, torch.cuda.stream(self._beside):
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

    def keep_for_lane(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.compute_stream())

    def compute_stream(self) -> torch.cuda.Stream:
        # Asked several times for each gradient: torch makes a new object each time.
        address = torch._C._cuda_getCurrentRawStream(self._device.index)
        found = self._streams.get(address)
        if found is None:
            found = self._streams[address] = torch.cuda.current_stream(self._device)
        return found

    def record_compute(self, operation: str, stream: object = None) -> Fence:
        event = _fence_event()
        assert stream is None or isinstance(stream, torch.cuda.Stream)
        event.record(stream or self.compute_stream())
        fence = Fence(LaneName.COMPUTE, operation)
        fence.issue(event)
        return fence

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        # Torch's pinned allocator: some bytes, which it keeps until the copy is done.
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        copied = self.record_compute("read")

        def read() -> list[float]:
            copied.wait()
            found: list[float] = values.tolist()
            return found

        return read

    def compute_wait(self, fence: Fence) -> Seconds:
        # The host returns at once; how long the stream stands still its own clock tells.
        stream = self.compute_stream()
        begun = self.mark(stream)
        event = fence.wait_issued()
        if event is not None:
            assert isinstance(event, torch.cuda.Event)
            stream.wait_event(event)
        end = self.mark(stream)
        if begun is None or end is None:
            return None
        self._spans.append(("wait", fence.operation, begun, end, 0))
        return lambda: _seconds_between(begun, end)

    def compute_wait_everywhere(self, fence: Fence) -> Seconds:
        seconds, event = self.compute_wait(fence), fence.wait_issued()
        if event is not None and self._main is not None:
            assert isinstance(event, torch.cuda.Event)
            for stream in (self._main, *self.side_streams):
                stream.wait_event(event)
        return seconds

    # -- side streams -----------------------------------------------------------------------------
    def open_streams(self, count: int) -> None:
        self.side_streams = [
            torch.cuda.Stream(self._device) for _ in range(count if count > 1 else 0)
        ]
        self._main = None

    @contextmanager
    def forked(self) -> Iterator[torch.cuda.Stream]:
        main = self.compute_stream()
        if self.side_streams:
            self._main = main
        for stream in self.side_streams:
            stream.wait_stream(main)
        try:
            yield main
        finally:
            for stream in self.side_streams:
                main.wait_stream(stream)

    @contextmanager
    def beside(self, number: int, name: str) -> Iterator[None]:
        if not self.side_streams:
            yield
            return
        stream = self.side_streams[number % len(self.side_streams)]
        with torch.cuda.stream(stream):
            begun = self.mark(stream)
            yield
            self.end_mark(self._row(stream), name, begun, stream)

    def follow(self, main: object) -> None:
        if self.side_streams:
            assert isinstance(main, torch.cuda.Stream)
            main.wait_stream(self.compute_stream())

    @contextmanager
    def joined(self) -> Iterator[None]:
        if self._main is None:
            yield
            return
        with torch.cuda.stream(self._main):
            for stream in self.side_streams:
                self._main.wait_stream(stream)
            yield
            self._behind.append(self.record_compute("joined"))
        if len(self._behind) > _LAYERS_AHEAD:
            self._behind.popleft().wait()

    def _row(self, stream: torch.cuda.Stream) -> str:
        """Of the trace."""
        sides = self.side_streams
        return f"compute {sides.index(stream) + 1}" if stream in sides else "compute"

    def check(self) -> None:
        super().check()
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a CUDA graph is being captured: its replay would call no hook, so that no layer "
                "would be fetched, drained or updated; call the model outside of torch.cuda.graph, "
                'and compile without mode="reduce-overhead" or "max-autotune"'
            )

    # -- trace ------------------------------------------------------------------------------------
    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """A timed event on `stream`, or None when nothing is traced."""
        if not self.trace.recording:
            return None
        event = _timed_event()
        event.record(stream)
        return event

    def record_spans(self, recording: bool) -> None:
        if recording and self._clock is None:
            self._clock = self._make_clock()
        super().record_spans(recording)

    def end_mark(
        self,
        lane: str,
        name: str,
        begun: torch.cuda.Event | None,
        stream: torch.cuda.Stream,
        nbytes: int = 0,
    ) -> None:
        """Close the span that `begun` opened; its times are read in `settle`."""
        end = self.mark(stream)
        if begun is not None and end is not None:
            self._spans.append((lane, name, begun, end, nbytes))

    def begin_compute_span(self) -> object:
        stream = self.compute_stream()
        return stream, self.mark(stream)

    def end_compute_span(self, name: str, begun: object) -> None:
        assert isinstance(begun, tuple)
        stream, event = begun  # in backward the next chunk's stream may be the current one
        self.end_mark(self._row(stream), name, event, stream)

    def settle(self) -> None:
        """Read the spans whose events have passed."""
        if self._clock is None:
            return
        for _ in range(len(self._spans)):
            lane, name, begun, end, nbytes = self._spans.popleft()
            if not end.query():
                self._spans.append((lane, name, begun, end, nbytes))
                continue
            start_s = self._clock.at(begun)
            end_s = start_s + _seconds_between(begun, end)
            self.trace.record(lane, name, start_s, end_s, **moved(nbytes))

    def _make_clock(self) -> EventClock:
        """From an event before every span, and the host's time of it."""
        event = _timed_event()
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()
        return EventClock(event, time.perf_counter())

    def random_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device)

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self._device)

    def enter_operation(self) -> None:
        # A new thread's current device is 0: waiting for an event there would make a context on a
        # GPU that belongs to another rank.
        torch.cuda.set_device(self._device)

    def close(self) -> None:
        super().close()
        torch.cuda.synchronize(self._device)
        self.settle()
        for ring in self._rings.values():
            self.unpin(ring.entries[0])
        self._rings.clear()
        if self._spans:
            raise StateError(f"{len(self._spans)} spans of {self.name} never ended")
