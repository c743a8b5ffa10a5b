"""A device of clocks: the same lanes and fences, no threads and no bytes.

Owns virtual time and the rates of the lanes, alone and shared. Buffers are on torch's meta device.
An operation takes the seconds that its bytes need at the given rates. Nothing is computed. The real
executor, window, drains and updater run on this device unchanged. Only the calling thread enters.

[Note: one pass is enough] An operation waits only for fences that exist when it is submitted
([Note: no deadlock] of `base`). Every lane is first in, first out. So the end of an operation is
known when it is submitted. The simulation needs no queue of events.

[Note: two clocks] On a GPU the calling thread runs ahead of compute. It waits until a transfer is
issued, and for fences that it asks for itself. `asynchronous=False` is the emulated device: its
compute runs on the calling thread.

[Note: shared resources] The two directions of the link share the rate of duplex transfers. Loads,
stages and spills share the disk. The operation that was submitted first keeps its rate. A later one
gets the rest while both overlap. So no byte is moved twice. Updates on the CPU get the memory
bandwidth that transfers leave. A transfer also delays updates that were submitted before it, until
an operation has waited for their fences.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from stronghold.devices.base import ComputeLane, Device, Fence, Lane, Work
from stronghold.devices.lane_name import STREAM_LANES, LaneName
from stronghold.devices.memory import DeviceMemory
from stronghold.native import Kernels, PackedWeight
from stronghold.plan.machine import LEAST_SHARE, Rates

SHARING_MEMORY = 16  # operations of another lane that may still overlap a new one
# Lanes that delay updates before them.
BESIDE_UPDATES = (LaneName.FETCH, LaneName.OFFLOAD, LaneName.GRADIENTS)
# Lanes whose bytes pass host memory.
MEMORY_LANES = (*BESIDE_UPDATES, LaneName.LOAD, LaneName.STAGE, LaneName.SPILL)


@dataclass(slots=True, kw_only=True)
class TimedOperation:
    """An operation that moves `nbytes` between two times. `fence` has its end."""

    lane: LaneName
    begin_s: float
    end_s: float
    nbytes: int
    fence: SimulatedFence
    delayed: bool = False

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self.nbytes / (self.end_s - self.begin_s)


class _RateInterval(NamedTuple):
    """Rate that other operations leave in an interval, bytes/s."""

    begin_s: float
    end_s: float
    rate: float


class Contention:
    """Shares the link, the disk and the host's memory among operations ([Note: shared
    resources])."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._alone_and_beside = _alone_and_beside(rates)
        self._recent: dict[LaneName, deque[TimedOperation]] = defaultdict(
            lambda: deque(maxlen=SHARING_MEMORY)
        )
        self._updates: deque[TimedOperation] = deque()
        self._delayed: list[TimedOperation] = []

    def end_of(self, lane: LaneName, start_s: float, nbytes: int) -> float:
        """Return the end of an operation of `nbytes` that starts on the lane at `start_s`."""
        if lane == LaneName.UPDATE:
            full_rate, beside = (self._rates.update_gbps * 1e9, self._beside_transfers(start_s))
        else:
            full_rate, shared = self._alone_and_beside.get(lane, (0.0, {}))
            beside = self._overlaps(shared, start_s)
        if nbytes <= 0 or full_rate <= 0.0:
            return start_s
        return _end_s(start_s, nbytes, full_rate, beside)

    def add(self, operation: TimedOperation) -> None:
        """Add a submitted operation. Its end is the result of `end_of`."""
        if operation.lane == LaneName.UPDATE:
            self._updates.append(operation)
        else:
            self._recent[operation.lane].append(operation)

    def withdraw(self, fence: SimulatedFence) -> None:
        """Remove the newest update, which was withdrawn before it began."""
        if self._updates and self._updates[-1].fence is fence:
            self._updates.pop()

    def delay_updates(self, transfer: TimedOperation, seen_s: float) -> float:
        """Lengthen the updates that share memory with a new transfer, and delay those behind them.

        Ends before `seen_s` stay: a caller may have waited for them. Returns the end of the last
        update that changed, or 0.
        """
        updates = self._updates
        while updates and updates[0].end_s <= seen_s:
            updates.popleft()
        full_rate = self._rates.update_gbps * 1e9
        beside: list[_RateInterval] | None = None
        free_s = 0.0  # the end of the one before, where it has become later
        for update in updates:
            if update.end_s <= transfer.begin_s:
                continue
            begin_s = update.begin_s
            if begin_s >= free_s:
                if begin_s >= transfer.end_s:
                    break
            else:
                begin_s = free_s
            if begin_s >= transfer.end_s:
                end_s = update.end_s + begin_s - update.begin_s
            else:
                if beside is None:
                    beside = self._beside_transfers(begin_s)
                end_s = _end_s(begin_s, update.nbytes, full_rate, beside)
            if end_s > update.end_s:
                update.begin_s, update.end_s, free_s = begin_s, end_s, end_s
                update.fence.issued_s = update.fence.done_s = end_s
                if not update.delayed:
                    update.delayed = True
                    self._delayed.append(update)
        return free_s

    def delayed(self) -> list[TimedOperation]:
        """Return the updates whose times have changed since the last call."""
        changed, self._delayed = self._delayed, []
        for update in changed:
            update.delayed = False
        return changed

    def _beside_transfers(self, from_s: float) -> list[_RateInterval]:
        """Return the intervals after `from_s` in which transfers run, with the update's rate."""
        full_rate, memory = self._rates.update_gbps * 1e9, self._rates.memory_gbps * 1e9
        changes = []
        for name in MEMORY_LANES:
            for other in reversed(self._recent[name]):
                if other.end_s <= from_s:
                    break  # a lane's operations end in order
                rate = other.rate
                changes += [(other.begin_s, rate), (other.end_s, -rate)]
        changes.sort()
        intervals, used = [], 0.0
        for (begin_s, change), (end_s, _) in pairwise(changes):
            used += change
            if end_s > begin_s and used > 0.0:
                rate_left = min(full_rate, max(memory - used, LEAST_SHARE * full_rate))
                intervals.append(_RateInterval(begin_s, end_s, rate_left))
        return intervals

    def _overlaps(self, shared: dict[LaneName, float], from_s: float) -> list[_RateInterval]:
        """Return disjoint intervals after `from_s` in which others run, with the rate left."""
        busy = sorted(
            (other.begin_s, other.end_s, rate)
            for name, rate in shared.items()
            for other in self._recent[name]
            if other.end_s > from_s
        )
        disjoint: list[_RateInterval] = []
        for begin_s, end_s, rate in busy:
            if disjoint and begin_s < disjoint[-1].end_s:
                begin_s = disjoint[-1].end_s  # two at once: the first one's rate stands
            if end_s > begin_s:
                disjoint.append(_RateInterval(begin_s, end_s, rate))
        return disjoint


def _alone_and_beside(rates: Rates) -> dict[LaneName, tuple[float, dict[LaneName, float]]]:
    """Bytes/s of each lane alone, and beside each lane that shares its resource."""
    beside_loads, beside_spills = (
        rates.io_gbps - rates.load_gbps,
        rates.io_gbps - rates.spill_gbps,
    )
    lanes: dict[LaneName, tuple[float, dict[LaneName, float]]] = {
        LaneName.FETCH: (
            rates.fetch_gbps,
            {LaneName.OFFLOAD: rates.duplex_gbps - rates.offload_gbps},
        ),
        LaneName.OFFLOAD: (
            rates.offload_gbps,
            {LaneName.FETCH: rates.duplex_gbps - rates.fetch_gbps},
        ),
        LaneName.GATHER: (rates.wire_gbps, {}),
        LaneName.REDUCE: (rates.reduce_gbps, {}),
        LaneName.GRADIENTS: (rates.update_gbps, {}),
        LaneName.EXCHANGE: (rates.exchange_gbps, {LaneName.REDUCE: rates.exchange_gbps / 2}),
        LaneName.SPILL: (
            rates.spill_gbps,
            {LaneName.LOAD: beside_loads, LaneName.STAGE: beside_loads},
        ),
        LaneName.LOAD: (rates.load_gbps, {LaneName.SPILL: beside_spills, LaneName.STAGE: 0.0}),
        LaneName.STAGE: (rates.load_gbps, {LaneName.SPILL: beside_spills, LaneName.LOAD: 0.0}),
    }
    rates_of_lanes: dict[LaneName, tuple[float, dict[LaneName, float]]] = {}
    for lane, (full_gbps, shared) in lanes.items():
        beside: dict[LaneName, float] = {}
        for name, gbps_left in shared.items():
            beside[name] = min(full_gbps, max(gbps_left, LEAST_SHARE * full_gbps)) * 1e9
        rates_of_lanes[lane] = (full_gbps * 1e9, beside)
    return rates_of_lanes


def _end_s(
    start_s: float, nbytes: float, full_rate: float, beside: Sequence[_RateInterval]
) -> float:
    """Return the time at which `nbytes` are moved: at `full_rate`, in the intervals `beside` at
    their rates."""
    left, now_s = nbytes, start_s
    for begin_s, end_s, rate in beside:
        if end_s <= now_s:
            continue
        alone = max(0.0, begin_s - now_s)
        if left <= alone * full_rate:
            return now_s + left / full_rate
        left -= alone * full_rate
        now_s = max(now_s, begin_s)
        if left <= (end_s - now_s) * rate:
            return now_s + left / rate
        left -= (end_s - now_s) * rate
        now_s = end_s
    return now_s + left / full_rate


class Operation(NamedTuple):
    """One operation of a lane. `cause`: the operation whose end let this one start; -1: the
    calling thread."""

    lane: LaneName
    name: str
    start_s: float
    end_s: float
    cause: int


class SimulatedFence(Fence):
    """Fence of an operation whose end is known."""

    __slots__ = ("device", "done_s", "index", "issued_s")

    def __init__(
        self,
        device: SimulatedDevice,
        lane: LaneName,
        operation: str,
        *,
        issued_s: float,
        done_s: float,
        index: int,
    ) -> None:
        # The base class makes an event and a lock: most of a simulation's time.
        self.lane = lane
        self.operation = operation
        self.device = device
        self.issued_s = issued_s
        self.done_s = done_s
        self.index = index

    def wait_issued(self) -> None:
        self.device.hold_caller(self.issued_s, self.index)

    def wait(self) -> None:
        self.device.hold_caller(self.done_s, self.index)

    @property
    def done(self) -> bool:
        return self.done_s <= self.device.caller_s

    @property
    def failed(self) -> bool:
        return False


class SimulatedLane(Lane):
    """A lane with a clock. `streams`: its thread only enqueues copies, as for a GPU's stream."""

    def __init__(self, name: LaneName, device: SimulatedDevice, *, streams: bool) -> None:
        super().__init__(name)
        self._device = device
        self._streams = streams
        self._issued_s = 0.0
        self.free_s = 0.0
        self._last = -1
        self._before: dict[int, int] = {}  # each operation's predecessor on the lane

    def _enqueue(self, operation: str, work: Work, after: tuple[Fence, ...], nbytes: int) -> Fence:
        device = self._device
        issued_s = max(self._issued_s, device.caller_s + device.rates.handover_s)
        start_s, cause = self.free_s, self._last
        for fence in after:
            if not isinstance(fence, SimulatedFence):
                continue  # done before time began
            on_stream = self._streams and device.is_stream(fence.lane)
            issued_s = max(issued_s, fence.issued_s if on_stream else fence.done_s)
            if fence.done_s > start_s:
                start_s, cause = fence.done_s, fence.index
        if issued_s > start_s:
            start_s, cause = (issued_s, (cause if start_s == issued_s else device.caller_cause))
        end_s = device.contention.end_of(self.name, start_s, nbytes)
        self._issued_s = issued_s if self._streams else end_s
        self.free_s = end_s
        before = self._last
        self._last = device.note(self.name, operation, start_s, end_s, cause)
        self._before[self._last] = before
        work()
        fence = SimulatedFence(
            device, self.name, operation, issued_s=self._issued_s, done_s=end_s, index=self._last
        )
        if end_s > start_s:
            moving = TimedOperation(
                lane=self.name, begin_s=start_s, end_s=end_s, nbytes=nbytes, fence=fence
            )
            device.contention.add(moving)
            if self.name in BESIDE_UPDATES:  # it takes memory from updates before it
                free_s = device.contention.delay_updates(moving, device.caller_s)
                update = cast(SimulatedLane, device.update)
                update.free_s = max(update.free_s, free_s)
                update._issued_s = max(update._issued_s, free_s)
        return fence

    def withdraw(self, fences: Sequence[Fence]) -> int:
        device, operations = self._device, self._device.operations
        withdrawn: list[SimulatedFence] = []
        for fence in fences:
            assert isinstance(fence, SimulatedFence)
            if fence.index != self._last or operations[fence.index].start_s <= device.caller_s:
                break
            operation = operations[fence.index]
            device.cancel(fence)
            self.free_s, self._last = (operation.start_s, self._before.pop(fence.index, -1))
            withdrawn.append(fence)
        for fence in withdrawn:
            fence.issued_s = fence.done_s = self.free_s
        if withdrawn:
            self._issued_s = self.free_s
        return len(withdrawn)


class SimulatedCompute(ComputeLane):
    """Compute on the simulated device's clocks."""

    _device: SimulatedDevice

    def charge(self, nbytes: int) -> None:
        """This lane moves `nbytes` of device memory."""
        rates = self._device.rates
        self._device.run_compute(
            "device memory", nbytes / (rates.device_gbps * 1e9), rates.launch_s
        )

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """The thread that reads stands still until compute has come so far."""
        computed, values = self.record("read"), super().read_later(tensor)

        def read() -> list[float]:
            computed.wait()
            return values()

        return read

    def record(self, operation: str, stream: object = None) -> Fence:
        device = self._device
        return SimulatedFence(
            device,
            LaneName.COMPUTE,
            operation,
            issued_s=device.caller_s,
            done_s=max(device.compute_s, device.caller_s),
            index=device.compute_cause,
        )

    def wait(self, fence: Fence) -> float:
        if not isinstance(fence, SimulatedFence):
            return 0.0
        device = self._device
        before_s = max(device.compute_s, device.caller_s)
        device.hold_caller(fence.issued_s if device.asynchronous else fence.done_s, fence.index)
        if fence.done_s > device.compute_s:
            device.compute_s, device.compute_cause = fence.done_s, fence.index
        return max(0.0, fence.done_s - before_s)


class NullKernels(Kernels):
    """Kernels that compute nothing: sums are zero."""

    def prepare_update(
        self, *_: object, lean: bool = False, targets: object = None
    ) -> Callable[[float | None], None]:
        return lambda scale: None

    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        """Nothing."""

    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        return [0.0] * len(segments)

    def decode(self, format: str, dtype: torch.dtype, weights: Sequence[PackedWeight]) -> None:
        """Nothing."""


class SimulatedMemory(DeviceMemory):
    """Buffers without bytes."""

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")


class SimulatedDevice(Device):
    """Virtual lanes at `rates`. `asynchronous`: compute runs behind the calling thread, as on a
    GPU."""

    torch_device = torch.device("meta")
    kernels = NullKernels()

    def __init__(self, rates: Rates, *, asynchronous: bool) -> None:
        super().__init__("simulated", SimulatedMemory("simulated", None), None)
        self.compute = SimulatedCompute(self)
        self.rates = rates
        self.contention = Contention(rates)
        self.asynchronous = asynchronous
        self.caller_s = 0.0  # the calling thread's clock
        self.caller_cause = -1
        self.compute_s = 0.0
        self.compute_cause = -1
        self._operations: list[Operation] = []
        self._open_lanes()

    def _make_lane(self, name: LaneName) -> Lane:
        return SimulatedLane(name, self, streams=self.asynchronous and name in STREAM_LANES)

    # -- time -------------------------------------------------------------------------------------
    def is_stream(self, lane: LaneName) -> bool:
        """True if a stream can wait for this lane's fences by itself."""
        return self.asynchronous and lane in (LaneName.COMPUTE, *STREAM_LANES)

    def hold_caller(self, until_s: float, cause: int) -> None:
        """The calling thread stands still; so does compute where it is the same thread."""
        if until_s > self.caller_s:
            self.caller_s, self.caller_cause = until_s, cause
            if not self.asynchronous:
                self.compute_s, self.compute_cause = until_s, cause

    def run_compute(self, name: str, seconds: float, launch_s: float = 0.0) -> None:
        """The calling thread takes `launch_s` to launch `seconds` of compute."""
        self.caller_s += launch_s
        start_s, cause = self.compute_s, self.compute_cause
        if self.caller_s > start_s:
            start_s, cause = self.caller_s, self.caller_cause
        self.compute_s = start_s + seconds
        self.compute_cause = self.note(LaneName.COMPUTE, name, start_s, self.compute_s, cause)
        if not self.asynchronous:
            self.caller_s, self.caller_cause = self.compute_s, self.compute_cause

    def note(self, lane: LaneName, name: str, start_s: float, end_s: float, cause: int) -> int:
        """Remember an operation; returns its index."""
        self._operations.append(Operation(lane, name, start_s, end_s, cause))
        return len(self._operations) - 1

    def cancel(self, fence: SimulatedFence) -> None:
        """The operation, the newest of its lane, is withdrawn: it takes no time."""
        self.contention.withdraw(fence)
        operation = self._operations[fence.index]
        self._operations[fence.index] = operation._replace(end_s=operation.start_s)

    @property
    def operations(self) -> list[Operation]:
        """Everything that happened, in order of submission."""
        for update in self.contention.delayed():
            index = update.fence.index
            self._operations[index] = self._operations[index]._replace(
                start_s=update.begin_s, end_s=update.end_s
            )
        return self._operations

    # -- buffers ----------------------------------------------------------------------------------
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """There are no bytes: the lane's clock moved."""

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between steps, which are not simulated."""
