"""A device made of CPU memory: more hostile than a GPU, so that races show without one.

Owns CPU tensors that stand for GPU memory, and one thread per lane, so that overlap and races are
real. Seeded jitter comes before each operation, freed buffers are filled with NaN, the budget is
enforced, the link can be paced. Without jitter and NaN small operations are their submitter's, as
on a GPU. Compute is the calling thread: its work is done when it returns.

[Note: pace] What is paced has a clock: an operation begins when what it waits for, and the one
before it, have ended, and takes the seconds of its bytes. As on a GPU's stream the lane goes on
meanwhile, and whoever waits for the fence sleeps until then, so that no sleep that is too long
delays what follows. Alone, and with nobody hostile, the work itself is done ahead of the clock.
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
from stronghold.devices.base import (
    ComputeLane,
    Device,
    Fence,
    Lane,
    ThreadLane,
    Work,
    completed,
    moved,
    timed,
)
from stronghold.devices.lane_name import LaneName
from stronghold.devices.memory import DeviceMemory
from stronghold.errors import StateError
from stronghold.telemetry.trace import Trace

# Small enough that a copy never keeps a core from the training thread for long, large enough that
# the call does not count: with 256 MB pieces half of a copy hides behind compute, with 1 MB pieces
# nine tenths.
COPY_PIECE_BYTES = 1 << 20
# Copied in less time than it takes to give the interpreter's lock to another thread and to get it
# back, tens of microseconds: under the lock.
SMALL_COPY_BYTES = 256 << 10
DISK_LANES = {LaneName.LOAD: "read", LaneName.STAGE: "read", LaneName.SPILL: "write"}
LATE_S = 1e-4  # by which a sleep may be too long
LINK_LANES = (LaneName.FETCH, LaneName.DRAIN)
HOST_LANES = (LaneName.GRADIENTS, LaneName.UPDATE)
WIRE_LANES = (LaneName.GATHER, LaneName.REDUCE, LaneName.EXCHANGE)
NAN_BYTE = 0xFF  # 0xFFFF and 0xFFFFFFFF are NaN in bfloat16, float16 and float32

_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class _Arrival:
    """Fires at a time of `time.perf_counter()`; its operation begins at `begin_s`."""

    __slots__ = ("at_s", "begin_s")

    def __init__(self, begin_s: float, at_s: float) -> None:
        self.begin_s = begin_s
        self.at_s = at_s

    def query(self) -> bool:
        return time.perf_counter() >= self.at_s

    def synchronize(self) -> None:
        while (left_s := self.at_s - time.perf_counter()) > 0.0:
            time.sleep(max(0.0, left_s - LATE_S))


class _EmulatedLane(ThreadLane):
    """A thread and a clock ([Note: pace]). Small operations are their submitter's, where they are
    done ahead of it."""

    _device: EmulatedDevice

    def _is_short(self, after: tuple[Fence, ...], nbytes: int) -> bool:
        small = 0 < nbytes <= SMALL_COPY_BYTES and self._device.is_ahead(self.name)
        return small and all(fence.issued and not fence.failed for fence in after)

    def _run(
        self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int
    ) -> _Arrival | None:
        device, ahead, ready_s = self._device, self._device.is_ahead(self.name), 0.0
        for fence in after:
            event = fence.wait_issued()
            if ahead and isinstance(event, _Arrival):
                ready_s = max(ready_s, event.at_s)
            elif event is not None:
                event.synchronize()
        device.delay()
        begun_s = time.perf_counter()
        work()
        ended_s = time.perf_counter()
        begin_s, end_s = device.pace(self.name, nbytes, max(begun_s, ready_s), ended_s - begun_s)
        device.trace.record(self.name, operation, begin_s, end_s, **moved(nbytes))
        return _Arrival(begin_s, end_s) if end_s > ended_s else None

    def withdraw(self, fences: Sequence[Fence]) -> int:
        """Take back operations (`Lane.withdraw`), also those that were performed ahead of the clock
        and have not begun by it. The caller uses nothing that they wrote."""
        count = super().withdraw(fences)
        ahead = []
        for fence in fences[count:]:
            event = fence.wait_issued() if fence.issued and not fence.failed else None
            if not isinstance(event, _Arrival) or not self._device.take_back(self.name, event):
                break
            ahead.append(fence)
        if ahead:
            free_s = self._device.free_s(self.name)
            for fence in ahead:
                fence.issue(_Arrival(free_s, free_s))
        return count + len(ahead)


class EmulatedMemory(DeviceMemory):
    """CPU memory. `poison` fills new and freed buffers with NaN."""

    def __init__(self, budget_bytes: int | None, *, poison: bool) -> None:
        super().__init__("emulated", budget_bytes)
        self._poison = poison

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(numel, dtype=dtype)
        self.poison(buffer)
        return buffer

    def poison(self, buffer: torch.Tensor) -> None:
        if self._poison:
            ctypes.memset(buffer.data_ptr(), NAN_BYTE, buffer.numel() * buffer.element_size())


class EmulatedCompute(ComputeLane):
    """The calling thread: its work is done when it returns."""

    def record(self, operation: str, stream: object = None) -> Fence:
        return completed(LaneName.COMPUTE, operation)

    def wait(self, fence: Fence) -> float:
        return timed(fence.wait)

    def begin_span(self) -> float:
        return time.perf_counter()

    def end_span(self, name: str, begun: object) -> None:
        assert isinstance(begun, float)
        self._device.trace.record(LaneName.COMPUTE, name, begun, time.perf_counter())


class EmulatedDevice(Device):
    """CPU tensors, a thread per lane.

    `jitter_s` is the longest random delay before an operation; `link_gbps` paces each direction of
    the link, `update_gbps` the lanes of gradients and of updates, `nvme_gbps` what lanes read from
    files, all together, and what they write, `wire_gbps` what other ranks send to each of the lanes
    that meet them (1e9 bytes/s; None: as fast as they are); `poison` fills freed buffers with NaN.
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
        paces = {**dict.fromkeys(HOST_LANES, update_gbps), **dict.fromkeys(LINK_LANES, link_gbps)}
        paces |= dict.fromkeys(WIRE_LANES, wire_gbps) | dict.fromkeys(DISK_LANES, nvme_gbps)
        self._paces = {lane: gbps * 1e9 for lane, gbps in paces.items() if gbps is not None}
        self._clocks = threading.Lock()
        self._free_s: dict[str, float] = defaultdict(float)  # when what it was given has ended
        self._pool: native.Pool | None = None
        gentle = not poison and jitter_s == 0.0
        self._ahead = (*LINK_LANES, *HOST_LANES) if gentle else ()
        self._open_lanes()

    def _make_lane(self, name: LaneName) -> Lane:
        return _EmulatedLane(name, self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # memmove, not Tensor.copy_: it releases the GIL and never starts torch's intra-op threads.
        total = source.numel() * source.element_size()
        room = target.numel() * target.element_size()
        if room != total or not (target.is_contiguous() and source.is_contiguous()):
            raise StateError(f"a copy of {total} bytes into {room}: expected as many, contiguous")
        start, rate = time.perf_counter(), self._paces.get(LaneName.FETCH)
        move = _move_small if total <= SMALL_COPY_BYTES else ctypes.memmove
        for begin in range(0, total, COPY_PIECE_BYTES):
            if begin and rate is not None:  # not all at once, though the lane's clock tells when
                time.sleep(max(0.0, start + begin / rate - time.perf_counter()))
            size = min(COPY_PIECE_BYTES, total - begin)
            move(target.data_ptr() + begin, source.data_ptr() + begin, size)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy(target, source)

    @property
    def kernels(self) -> native.Pool:
        # A pool of its own: work on the compute lane must not wait for the update lane's.
        if self._pool is None:
            self._pool = native.Pool(torch.get_num_threads())
        return self._pool

    def delay(self) -> None:
        """Called by a lane between an operation's fences and its work."""
        if self._jitter_s > 0.0:
            # One generator per lane: a lane's delays are the same whatever the others do.
            lane = threading.current_thread().name
            if lane not in self._random:
                self._random[lane] = random.Random(f"{self._seed} {lane}")
            time.sleep(self._random[lane].uniform(0.0, self._jitter_s))

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.close()

    def is_ahead(self, lane: LaneName) -> bool:
        """Whether the lane's operations are performed ahead of its clock."""
        return self.alone and lane in self._ahead

    def pace(
        self, lane: LaneName, nbytes: int, ready_s: float, took_s: float
    ) -> tuple[float, float]:
        """When an operation of a lane that may begin at `ready_s`, and takes `took_s` at least,
        begins and ends ([Note: pace]): `time.perf_counter()` seconds."""
        rate = self._paces.get(lane)
        resource = lane if rate is None else DISK_LANES.get(lane, lane)
        with self._clocks:
            begin_s = max(ready_s, self._free_s[resource])
            takes_s = took_s if rate is None else max(took_s, nbytes / rate)
            end_s = self._free_s[resource] = begin_s + takes_s
        return begin_s, end_s

    def take_back(self, lane: LaneName, arrival: _Arrival) -> bool:
        """The newest operation of a lane is withdrawn, unless it has begun by the clock."""
        with self._clocks:
            is_newest = self._free_s[lane] == arrival.at_s
            if not is_newest or arrival.begin_s <= time.perf_counter():
                return False
            self._free_s[lane] = arrival.begin_s
        return True

    def free_s(self, lane: LaneName) -> float:
        """When all that the lane was given has ended, by its clock."""
        return self._free_s[lane]
