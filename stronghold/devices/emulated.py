"""A device made of CPU memory: more hostile than a GPU, so that races show without one.

Owns CPU tensors that stand for GPU memory, and one thread per lane, so that overlap and races are
real. Seeded jitter delays each operation, NaN fills freed buffers, the budget holds, and the link
can be paced. Without jitter and NaN the submitting thread performs small operations, as on a GPU.
Compute is the calling thread: its work is done when it returns.

[Note: pace] A paced resource has a clock. One operation of its lane takes these steps:
1. By the clock it begins when the fences before it, and the lane's previous operation, have ended.
2. By the clock it takes the seconds of its bytes.
3. The lane's thread does not sleep: it goes on with the next operation, as a GPU's stream does.
4. The thread that waits for the fence sleeps until the end by the clock. So a sleep that is too
   long does not delay later operations.
With one process, and without jitter and NaN, the lane does the work itself ahead of the clock.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from stronghold import native
from stronghold.devices.device import (
    ComputeLane,
    Device,
    Lane,
    ThreadLane,
    Work,
    bytes_moved,
    timed,
)
from stronghold.devices.fences import Fence, LaneName, completed
from stronghold.devices.memory import DeviceMemory
from stronghold.errors import StateError
from stronghold.telemetry.trace import Trace

# A copy must not keep a core from the training thread for long, and its calls must not count. With
# 256 MB pieces half of a copy hides behind compute, with 1 MB pieces nine tenths.
COPY_PIECE_BYTES = 1 << 20
# A copy of at most this size keeps the interpreter's lock. It takes less time than to give the lock
# to another thread and to get it back: tens of microseconds.
SMALL_COPY_BYTES = 256 << 10
DISK_LANES = {LaneName.LOAD: "read", LaneName.STAGE: "read", LaneName.SPILL: "write"}
LATE_S = 1e-4  # a sleep may be longer than asked by this time
LINK_LANES = (LaneName.FETCH, LaneName.OFFLOAD)
HOST_LANES = (LaneName.GRADIENTS, LaneName.UPDATE)
WIRE_LANES = (LaneName.REDUCE, LaneName.EXCHANGE)
NAN_BYTE = 0xFF  # 0xFFFF and 0xFFFFFFFF are NaN in bfloat16, float16 and float32

_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class _Arrival:
    """An event that passes at `end_s`, by `time.perf_counter()`. Its operation begins at `begin_s`.

    Both times are those of the lane's clock ([Note: pace]).
    """

    __slots__ = ("begin_s", "end_s")

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = end_s

    def query(self) -> bool:
        return time.perf_counter() >= self.end_s

    def synchronize(self) -> None:
        """Let the calling thread sleep until the lane's operation has ended by its clock."""
        while (left_s := self.end_s - time.perf_counter()) > 0.0:
            time.sleep(max(0.0, left_s - LATE_S))


class _EmulatedLane(ThreadLane):
    """A lane with a thread and a clock ([Note: pace]).

    The submitting thread performs a small operation if the lane works ahead of its clock.
    """

    _device: EmulatedDevice

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        is_small = 0 < nbytes <= SMALL_COPY_BYTES
        if not is_small or not self._device.works_ahead(self.name):
            return False
        return all(fence.issued and not fence.failed for fence in after)

    def _run(
        self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int
    ) -> _Arrival | None:
        device = self._device
        works_ahead = device.works_ahead(self.name)
        ready_s = 0.0  # when the operation may begin by the clock
        for fence in after:
            # the thread that runs it waits for the other lane's issue
            event = fence.wait_issued()
            if works_ahead and isinstance(event, _Arrival):
                ready_s = max(ready_s, event.end_s)
            elif event is not None:
                # and sleeps until the other lane's operation has ended
                event.synchronize()
        device.delay()
        begun_s = time.perf_counter()
        work()
        ended_s = time.perf_counter()
        begin_s, end_s = device.pace(self.name, nbytes, max(begun_s, ready_s), ended_s - begun_s)
        device.trace.record(self.name, operation, begin_s, end_s, **bytes_moved(nbytes))
        return _Arrival(begin_s, end_s) if end_s > ended_s else None

    def withdraw(self, fences: Sequence[Fence]) -> int:
        """Take back operations (`Lane.withdraw`).

        These may be operations whose work was done ahead of the clock, and which have not begun by
        the clock. The caller uses none of their results.
        """
        num_queued = super().withdraw(fences)
        done_ahead: list[Fence] = []
        for fence in fences[num_queued:]:
            if not self._take_back(fence):
                break
            done_ahead.append(fence)
        if done_ahead:
            free_s = self._device.free_s(self.name)
            for fence in done_ahead:
                fence.issue(_Arrival(free_s, free_s))
        return num_queued + len(done_ahead)

    def _take_back(self, fence: Fence) -> bool:
        """Free the clock of an operation that was done ahead of it. False if that is too late."""
        if not fence.issued or fence.failed:
            return False
        arrival = fence.wait_issued()
        return isinstance(arrival, _Arrival) and self._device.take_back(self.name, arrival)


class EmulatedMemory(DeviceMemory):
    """CPU memory that stands for a device's.

    With `poison`, NaN fills new and freed buffers, so that a read in a race yields NaN.
    """

    def __init__(self, budget_bytes: int | None, *, poison: bool) -> None:
        super().__init__("emulated", budget_bytes)
        self._poison = poison

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(numel, dtype=dtype)
        self.poison(buffer)
        return buffer

    def poison(self, buffer: torch.Tensor) -> None:
        if self._poison:
            nbytes = buffer.numel() * buffer.element_size()
            ctypes.memset(buffer.data_ptr(), NAN_BYTE, nbytes)


class EmulatedCompute(ComputeLane):
    """The compute lane: the calling thread, whose work is done when it returns."""

    def record(self, operation: str, stream: object = None) -> Fence:
        return completed(LaneName.COMPUTE, operation)

    def wait(self, fence: Fence) -> float:
        return timed(fence.wait)  # the calling thread waits for the lane of `fence`

    def begin_span(self) -> float:
        return time.perf_counter()

    def end_span(self, name: str, begun: object) -> None:
        assert isinstance(begun, float)
        ended_s = time.perf_counter()
        self._device.trace.record(LaneName.COMPUTE, name, begun, ended_s)


class EmulatedDevice(Device):
    """A device of CPU tensors, with a thread per lane.

    Rates are in 1e9 bytes/s; None does not pace.

    Arguments:
        budget_bytes: the most bytes of buffers; None: no limit.
        trace: gets the spans of lanes; None records none.
        poison: fill new and freed buffers with NaN.
        jitter_s: the longest random delay before an operation.
        seed: of the random delays.
        link_gbps: the rate of each direction of the link.
        update_gbps: the rate of the lane of gradients, and of the lane of updates.
        nvme_gbps: the rate of all reads from files together, and of all writes.
        wire_gbps: the rate of each lane between ranks.
    """

    torch_device = torch.device("cpu")

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        trace: Trace | None = None,
        poison: bool = True,
        jitter_s: float = 0.0,
        seed: int = 0,
        link_gbps: float | None = None,
        update_gbps: float | None = None,
        nvme_gbps: float | None = None,
        wire_gbps: float | None = None,
    ) -> None:
        super().__init__("emulated", EmulatedMemory(budget_bytes, poison=poison), trace)
        self.compute = EmulatedCompute(self)
        self._jitter_s = jitter_s
        self._seed = seed
        self._random: dict[str, random.Random] = {}
        gbps_of_lanes = dict.fromkeys(HOST_LANES, update_gbps)
        gbps_of_lanes |= dict.fromkeys(LINK_LANES, link_gbps)
        gbps_of_lanes |= dict.fromkeys(WIRE_LANES, wire_gbps)
        gbps_of_lanes |= dict.fromkeys(DISK_LANES, nvme_gbps)
        self._paces = {lane: gbps * 1e9 for lane, gbps in gbps_of_lanes.items() if gbps is not None}
        self._clocks_lock = threading.Lock()
        # The time at which a resource has ended its operations, by its clock.
        self._free_s: dict[str, float] = defaultdict(float)
        self._pool: native.Pool | None = None
        is_hostile = poison or jitter_s != 0.0
        self._lanes_ahead = () if is_hostile else (*LINK_LANES, *HOST_LANES)
        self._open_lanes()

    def _make_lane(self, name: LaneName) -> Lane:
        return _EmulatedLane(name, self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # memmove, not Tensor.copy_: it releases the GIL and never starts torch's intra-op threads.
        source_bytes = source.numel() * source.element_size()
        target_bytes = target.numel() * target.element_size()
        are_contiguous = target.is_contiguous() and source.is_contiguous()
        if target_bytes != source_bytes or not are_contiguous:
            raise StateError(
                f"a copy of {source_bytes} bytes into {target_bytes}: expected as many, contiguous"
            )
        start_s = time.perf_counter()
        rate = self._paces.get(LaneName.FETCH)
        move = _move_small if source_bytes <= SMALL_COPY_BYTES else ctypes.memmove
        for begin in range(0, source_bytes, COPY_PIECE_BYTES):
            if begin and rate is not None:  # the bytes arrive one piece after the other
                time.sleep(max(0.0, start_s + begin / rate - time.perf_counter()))
            size = min(COPY_PIECE_BYTES, source_bytes - begin)
            move(target.data_ptr() + begin, source.data_ptr() + begin, size)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy(target, source)

    @property
    def kernels(self) -> native.Pool:
        # Compute has a pool apart from the update lane's: it must not wait for updates.
        if self._pool is None:
            self._pool = native.Pool(torch.get_num_threads())
        return self._pool

    def delay(self) -> None:
        """Sleep for a random time. A lane calls it after an operation's waits, before its work."""
        if self._jitter_s > 0.0:
            # One generator per lane: a lane's delays do not depend on other lanes.
            lane = threading.current_thread().name
            if lane not in self._random:
                self._random[lane] = random.Random(f"{self._seed} {lane}")
            time.sleep(self._random[lane].uniform(0.0, self._jitter_s))

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.close()

    def works_ahead(self, lane: LaneName) -> bool:
        """Return whether the lane's thread does its work ahead of the lane's clock."""
        return self.is_single_process and lane in self._lanes_ahead

    def pace(
        self, lane: LaneName, nbytes: int, ready_s: float, took_s: float
    ) -> tuple[float, float]:
        """Enter an operation in the clock of its lane's resource ([Note: pace]).

        Times are seconds of `time.perf_counter()`.

        Arguments:
            lane: the operation's lane.
            nbytes: the bytes that it moves.
            ready_s: the earliest time at which it may begin.
            took_s: the seconds of its work, and the least time that it takes.

        Returns the times at which it begins and ends.
        """
        rate = self._paces.get(lane)
        resource = lane if rate is None else DISK_LANES.get(lane, lane)
        with self._clocks_lock:
            begin_s = max(ready_s, self._free_s[resource])
            duration_s = took_s if rate is None else max(took_s, nbytes / rate)
            end_s = begin_s + duration_s
            self._free_s[resource] = end_s
        return begin_s, end_s

    def take_back(self, lane: LaneName, arrival: _Arrival) -> bool:
        """Withdraw the newest operation of a lane. Returns False if it has begun by the clock."""
        with self._clocks_lock:
            is_newest = self._free_s[lane] == arrival.end_s
            if not is_newest or arrival.begin_s <= time.perf_counter():
                return False
            self._free_s[lane] = arrival.begin_s
        return True

    def free_s(self, lane: LaneName) -> float:
        """Return the time at which the lane's operations have ended, by its clock."""
        return self._free_s[lane]
