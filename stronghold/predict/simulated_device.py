"""A device of clocks: the lanes and fences of a real one, without threads and bytes.

Owns virtual time, and the rates of lanes alone and beside each other. Buffers are on torch's meta
device. Operations take the seconds that their bytes need at the given rates, and compute nothing.
The real executor, window, offloads and updates run on it unchanged. The calling thread alone
enters.

[Note: one pass is enough]
    1. An operation may only wait for fences that exist when it is submitted ([Note: no deadlock]
       of `base`).
    2. Every lane is first in, first out.
    3. So the end of an operation is known when it is submitted. No queue of events is needed.

[Note: two clocks] On a GPU the calling thread runs ahead of compute. It waits until a transfer is
issued, or for a fence, and for nothing else. `asynchronous=False` is the emulated device, whose
compute is the calling thread.

[Note: shared resources] (contention)
    1. Both directions of the link share its duplex rate. Loads and stages share the disk with each
       other and with spills.
    2. The operation that was submitted first keeps its rate. A later one gets the remaining rate
       while the two overlap. So no byte is moved twice.
    3. Updates on the CPU get the bandwidth of host memory that transfers leave.
    4. A transfer beside updates that were submitted before it delays these, as long as no operation
       has waited for their fences.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from stronghold.device.base import STREAM_LANES, Device, Fence, Lane, Work
from stronghold.native import Kernels
from stronghold.plan.machine import LEAST_SHARE, Rates

SHARING_MEMORY = 16  # operations of another lane that may still overlap a new one
BESIDE_UPDATES = ("fetch", "drain", "gradients")  # lanes that delay updates before them
MEMORY_LANES = (*BESIDE_UPDATES, "load", "stage", "spill")  # their bytes pass host memory


@dataclass(slots=True, kw_only=True)
class TimedOperation:
    """An operation that moves `nbytes` from `begin_s` to `end_s`.

    `fence`: its fence, which gets the same end. `is_delayed`: its times have changed since the last
    look.
    """

    lane: str
    begin_s: float
    end_s: float
    nbytes: int
    fence: SimulatedFence
    is_delayed: bool = False

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self.nbytes / (self.end_s - self.begin_s)


class _RateInterval(NamedTuple):
    """The rate that a lane has in an interval, in bytes/s."""

    begin_s: float
    end_s: float
    rate: float


class Contention:
    """The shares of the link, the disk and host memory ([Note: shared resources])."""

    def __init__(self, rates: Rates) -> None:
        self._update_rate = rates.update_gbps * 1e9  # bytes/s, alone
        self._memory_rate = rates.memory_gbps * 1e9
        self._alone_and_beside = _alone_and_beside(rates)
        self._recent: dict[str, deque[TimedOperation]] = defaultdict(_recent_operations)
        self._updates: deque[TimedOperation] = deque()
        self._delayed: list[TimedOperation] = []

    def end_of(self, lane: str, start_s: float, nbytes: int) -> float:
        """The end of an operation of `nbytes` that starts on the lane at `start_s`."""
        if lane == "update":
            alone = self._update_rate
            beside = self._beside_transfers(start_s)
        else:
            alone, shared = self._alone_and_beside.get(lane, (0.0, {}))
            beside = self._overlaps(shared, start_s)
        if nbytes <= 0 or alone <= 0.0:
            return start_s
        return _end_s(start_s, nbytes, alone, beside)

    def add(self, operation: TimedOperation) -> None:
        """Add a submitted operation, whose end is that of `end_of`."""
        if operation.lane == "update":
            self._updates.append(operation)
        else:
            self._recent[operation.lane].append(operation)

    def withdraw(self, fence: SimulatedFence) -> None:
        """Remove the newest update, which was taken back before it began."""
        if self._updates and self._updates[-1].fence is fence:
            self._updates.pop()

    def delay_updates(self, transfer: TimedOperation, seen_s: float) -> float:
        """Make the updates that share memory with a new transfer longer, and later ones later.

        Ends before `seen_s` stay: operations may have waited for them. Returns the end of the last
        update that changed, or 0.
        """
        updates = self._updates
        while updates and updates[0].end_s <= seen_s:
            updates.popleft()
        beside: list[_RateInterval] | None = None
        free_s = 0.0  # the end of the update before, if it has become later
        for update in updates:
            if update.end_s <= transfer.begin_s:
                continue
            is_pushed = update.begin_s < free_s
            begin_s = free_s if is_pushed else update.begin_s
            is_behind = begin_s >= transfer.end_s
            if is_behind and not is_pushed:
                break
            if is_behind:
                end_s = update.end_s + begin_s - update.begin_s
            else:
                if beside is None:
                    beside = self._beside_transfers(begin_s)
                end_s = _end_s(begin_s, update.nbytes, self._update_rate, beside)
            if end_s > update.end_s:
                self._move_update(update, begin_s, end_s)
                free_s = end_s
        return free_s

    def _move_update(self, update: TimedOperation, begin_s: float, end_s: float) -> None:
        update.begin_s = begin_s
        update.end_s = end_s
        update.fence.issued_s = end_s
        update.fence.done_s = end_s
        if not update.is_delayed:
            update.is_delayed = True
            self._delayed.append(update)

    def delayed(self) -> list[TimedOperation]:
        """The updates whose times have changed since the last call."""
        updates = self._delayed
        self._delayed = []
        for update in updates:
            update.is_delayed = False
        return updates

    def _beside_transfers(self, from_s: float) -> list[_RateInterval]:
        """Intervals after `from_s` in which transfers run, and the update's rate in each."""
        changes = []
        for name in MEMORY_LANES:
            for other in reversed(self._recent[name]):
                if other.end_s <= from_s:
                    break  # a lane's operations end in order
                rate = other.rate
                changes += [(other.begin_s, rate), (other.end_s, -rate)]
        changes.sort()
        least_rate = LEAST_SHARE * self._update_rate
        intervals = []
        used = 0.0
        for (begin_s, change), (end_s, _) in pairwise(changes):
            used += change
            if end_s > begin_s and used > 0.0:
                left = max(self._memory_rate - used, least_rate)
                intervals.append(_RateInterval(begin_s, end_s, min(self._update_rate, left)))
        return intervals

    def _overlaps(self, shared: dict[str, float], from_s: float) -> list[_RateInterval]:
        """Disjoint intervals after `from_s` in which other lanes run, and the remaining rate.

        `shared`: by lane that shares the resource, the rate that it leaves.
        """
        intervals = []
        for name, rate in shared.items():
            for other in self._recent[name]:
                if other.end_s > from_s:
                    intervals.append(_RateInterval(other.begin_s, other.end_s, rate))
        intervals.sort()
        disjoint: list[_RateInterval] = []
        for begin_s, end_s, rate in intervals:
            if disjoint and begin_s < disjoint[-1].end_s:
                begin_s = disjoint[-1].end_s  # two at once: the first one's rate stands
            if end_s > begin_s:
                disjoint.append(_RateInterval(begin_s, end_s, rate))
        return disjoint


def _recent_operations() -> deque[TimedOperation]:
    return deque(maxlen=SHARING_MEMORY)


def _alone_and_beside(rates: Rates) -> dict[str, tuple[float, dict[str, float]]]:
    """By lane: its bytes/s alone, and beside each lane that shares its resource."""
    beside_loads = rates.io_gbps - rates.load_gbps
    beside_spills = rates.io_gbps - rates.spill_gbps
    gbps: dict[str, tuple[float, dict[str, float]]] = {
        "fetch": (rates.fetch_gbps, {"drain": rates.duplex_gbps - rates.drain_gbps}),
        "drain": (rates.drain_gbps, {"fetch": rates.duplex_gbps - rates.fetch_gbps}),
        "gather": (rates.wire_gbps, {}),
        "reduce": (rates.reduce_gbps, {}),
        "gradients": (rates.update_gbps, {}),
        "exchange": (rates.exchange_gbps, {"reduce": rates.exchange_gbps / 2}),
        "spill": (rates.spill_gbps, {"load": beside_loads, "stage": beside_loads}),
        "load": (rates.load_gbps, {"spill": beside_spills, "stage": 0.0}),
        "stage": (rates.load_gbps, {"spill": beside_spills, "load": 0.0}),
    }
    result = {}
    for lane, (alone, shared) in gbps.items():
        beside = {}
        for other, left in shared.items():
            beside[other] = min(alone, max(left, LEAST_SHARE * alone)) * 1e9
        result[lane] = (alone * 1e9, beside)
    return result


def _end_s(
    start_s: float,
    nbytes: float,
    alone: float,
    beside: Sequence[_RateInterval],
) -> float:
    """The end of a move of `nbytes`: at the rate `alone`, and at those of `beside` inside of them.

    Rates are in bytes/s. The intervals are disjoint and in order.
    """
    left = nbytes
    now_s = start_s
    for begin_s, end_s, rate in beside:
        if end_s <= now_s:
            continue
        alone_s = max(0.0, begin_s - now_s)
        if left <= alone_s * alone:
            return now_s + left / alone
        left -= alone_s * alone
        now_s = max(now_s, begin_s)
        if left <= (end_s - now_s) * rate:
            return now_s + left / rate
        left -= (end_s - now_s) * rate
        now_s = end_s
    return now_s + left / alone


class Operation(NamedTuple):
    """One operation of a lane.

    `cause`: index of the operation whose end let this one start. -1: the calling thread's pace.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    cause: int


class SimulatedFence(Fence):
    """A fence whose times are known: `issued_s` and `done_s`. `index`: its operation's."""

    __slots__ = ("device", "done_s", "index", "issued_s")

    def __init__(
        self,
        device: SimulatedDevice,
        lane: str,
        operation: str,
        *,
        issued_s: float,
        done_s: float,
        index: int,
    ) -> None:
        # Without the base class's __init__: its event and lock would take most of the time.
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
    """A clock.

    `is_stream`: the lane's thread only enqueues copies on a GPU's stream, without a wait for them.
    """

    def __init__(self, name: str, device: SimulatedDevice, *, is_stream: bool) -> None:
        super().__init__(name)
        self._device = device
        self._is_stream = is_stream
        self._issued_s = 0.0
        self.free_s = 0.0
        self._last = -1
        self._before: dict[int, int] = {}  # by operation: the one before it on the lane

    def _enqueue(
        self,
        operation: str,
        work: Work,
        after: tuple[Fence, ...],
        nbytes: int,
    ) -> Fence:
        device = self._device
        issued_s, start_s, cause = self._start(after)
        end_s = device.contention.end_of(self.name, start_s, nbytes)
        self._issued_s = issued_s if self._is_stream else end_s
        self.free_s = end_s
        before = self._last
        self._last = device.add_operation(self.name, operation, start_s, end_s, cause)
        self._before[self._last] = before
        work()
        fence = SimulatedFence(
            device, self.name, operation, issued_s=self._issued_s, done_s=end_s, index=self._last
        )
        if end_s > start_s:
            self._contend(start_s, end_s, nbytes, fence)
        return fence

    def _start(self, after: tuple[Fence, ...]) -> tuple[float, float, int]:
        """The seconds at which a new operation is issued, its start, and its cause."""
        device = self._device
        issued_s = max(self._issued_s, device.caller_s + device.rates.handover_s)
        start_s, cause = self.free_s, self._last
        for fence in after:
            if not isinstance(fence, SimulatedFence):
                continue  # done before time began
            on_stream = self._is_stream and device.is_stream(fence.lane)
            issued_s = max(issued_s, fence.issued_s if on_stream else fence.done_s)
            if fence.done_s > start_s:
                start_s, cause = fence.done_s, fence.index
        if issued_s > start_s:
            start_s, cause = issued_s, device.caller_cause
        return issued_s, start_s, cause

    def _contend(
        self,
        start_s: float,
        end_s: float,
        nbytes: int,
        fence: SimulatedFence,
    ) -> None:
        """Take the operation's share of the resources, and delay updates that lose by it."""
        device = self._device
        transfer = TimedOperation(
            lane=self.name,
            begin_s=start_s,
            end_s=end_s,
            nbytes=nbytes,
            fence=fence,
        )
        device.contention.add(transfer)
        if self.name in BESIDE_UPDATES:
            free_s = device.contention.delay_updates(transfer, device.caller_s)
            update_lane = cast(SimulatedLane, device.update)
            update_lane.free_s = max(update_lane.free_s, free_s)
            update_lane._issued_s = max(update_lane._issued_s, free_s)

    def withdraw(self, fences: Sequence[Fence]) -> int:
        device, operations = self._device, self._device.operations
        withdrawn: list[SimulatedFence] = []
        for fence in fences:
            assert isinstance(fence, SimulatedFence)
            if fence.index != self._last or operations[fence.index].start_s <= device.caller_s:
                break
            operation = operations[fence.index]
            device.cancel_operation(fence)
            self.free_s, self._last = operation.start_s, self._before.pop(fence.index, -1)
            withdrawn.append(fence)
        for fence in withdrawn:
            fence.issued_s = fence.done_s = self.free_s
        if withdrawn:
            self._issued_s = self.free_s
        return len(withdrawn)


def _no_update(scale: float | None) -> None:
    """An update that computes nothing."""


class NullKernels(Kernels):
    """Kernels that compute nothing: sums are zero."""

    def prepare_update(
        self, *_: object, lean: bool = False, targets: object = None
    ) -> Callable[[float | None], None]:
        return _no_update

    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        """Do nothing."""

    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        return [0.0] * len(segments)


class _Reading(NamedTuple):
    """Values of a small tensor, which are ready once `computed` is done."""

    device: SimulatedDevice
    computed: Fence
    tensor: torch.Tensor

    def read(self) -> list[float]:
        self.computed.wait()
        return Device.read_later(self.device, self.tensor)()


class SimulatedDevice(Device):
    """Virtual lanes at `rates`.

    `asynchronous`: compute runs behind the calling thread, as on a GPU ([Note: two clocks]).
    """

    torch_device = torch.device("meta")
    kernels = NullKernels()

    def __init__(self, rates: Rates, *, asynchronous: bool) -> None:
        super().__init__("simulated", None, None)
        self.rates = rates
        self.contention = Contention(rates)
        self.asynchronous = asynchronous
        self.caller_s = 0.0  # the calling thread's clock
        self.caller_cause = -1
        self.compute_s = 0.0
        self._compute_cause = -1
        self._operations: list[Operation] = []
        self._open_lanes()

    def _make_lane(self, name: str) -> Lane:
        return SimulatedLane(name, self, is_stream=self.asynchronous and name in STREAM_LANES)

    # -- time -------------------------------------------------------------------------------------
    def is_stream(self, lane: str) -> bool:
        """True if a stream can wait for the lane's fences without its thread."""
        return self.asynchronous and lane in ("compute", *STREAM_LANES)

    def hold_caller(self, until_s: float, cause: int) -> None:
        """Let the calling thread wait until `until_s`, and compute too if that is its thread."""
        if until_s > self.caller_s:
            self.caller_s, self.caller_cause = until_s, cause
            if not self.asynchronous:
                self.compute_s, self._compute_cause = until_s, cause

    def run_compute(self, name: str, seconds: float, launch_s: float = 0.0) -> None:
        """Run `seconds` of compute, which the calling thread needs `launch_s` to launch."""
        self.caller_s += launch_s
        start_s, cause = self.compute_s, self._compute_cause
        if self.caller_s > start_s:
            start_s, cause = self.caller_s, self.caller_cause
        self.compute_s = start_s + seconds
        self._compute_cause = self.add_operation("compute", name, start_s, self.compute_s, cause)
        if not self.asynchronous:
            self.caller_s, self.caller_cause = self.compute_s, self._compute_cause

    def charge_compute(self, nbytes: int) -> None:
        """Run the compute lane while it moves `nbytes` of device memory."""
        seconds = nbytes / (self.rates.device_gbps * 1e9)
        self.run_compute("device memory", seconds, self.rates.launch_s)

    def add_operation(
        self,
        lane: str,
        name: str,
        start_s: float,
        end_s: float,
        cause: int,
    ) -> int:
        """Record an operation. Returns its index."""
        self._operations.append(Operation(lane, name, start_s, end_s, cause))
        return len(self._operations) - 1

    def cancel_operation(self, fence: SimulatedFence) -> None:
        """Withdraw the newest operation of a lane: it takes no time."""
        self.contention.withdraw(fence)
        operation = self._operations[fence.index]
        self._operations[fence.index] = operation._replace(end_s=operation.start_s)

    @property
    def operations(self) -> list[Operation]:
        """All operations, in the order of submission."""
        for update in self.contention.delayed():
            index = update.fence.index
            self._operations[index] = self._operations[index]._replace(
                start_s=update.begin_s, end_s=update.end_s
            )
        return self._operations

    # -- buffers ----------------------------------------------------------------------------------
    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Do nothing: there are no bytes, and the lane's clock has moved."""

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Do nothing: time between steps is not simulated."""

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Return a function that reads the tensor, and waits until compute has come so far."""
        return _Reading(self, self.record_compute("read"), tensor).read

    # -- the compute lane -------------------------------------------------------------------------
    def record_compute(self, operation: str, stream: object = None) -> Fence:
        return SimulatedFence(
            self,
            "compute",
            operation,
            issued_s=self.caller_s,
            done_s=max(self.compute_s, self.caller_s),
            index=self._compute_cause,
        )

    def compute_wait(self, fence: Fence) -> float:
        if not isinstance(fence, SimulatedFence):
            return 0.0
        before_s = max(self.compute_s, self.caller_s)
        self.hold_caller(fence.issued_s if self.asynchronous else fence.done_s, fence.index)
        if fence.done_s > self.compute_s:
            self.compute_s, self._compute_cause = fence.done_s, fence.index
        return max(0.0, fence.done_s - before_s)
