"""A device of clocks: the same lanes and fences, no threads and no bytes.

Owns virtual time. Buffers are on torch's meta device, operations take the seconds that their bytes
need at the given rates, and nothing is computed: the real executor, window, drains and updater run
on it unchanged. The calling thread alone enters.

[Note: one pass is enough] An operation may only wait for fences that exist when it is submitted
([Note: no deadlock] of `base`), and every lane is first in, first out. So the time at which an
operation ends is known when it is submitted, and no queue of events is needed.

[Note: shared resources] Both directions of the link share what duplex allows, the CPU's Adam shares
host memory with both, loads and stages share the disk with each other and with spills. Who was
submitted first keeps its rate; who overlaps it later gets what is left for as long as they overlap,
so that no byte is moved twice.

[Note: two clocks] On a GPU the calling thread runs ahead of compute: it stands still only until a
transfer is issued, or for a fence that it waits for itself. `asynchronous=False` is the emulated
device, whose compute is the calling thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stronghold import native
from stronghold.device.base import Device, Fence, Lane, Work
from stronghold.telemetry.trace import NullTrace, Trace

SHARING_MEMORY = 16  # operations of another lane that may still overlap a new one
WIRE_LANES = ("gather", "reduce")
LEAST_SHARE = 0.05  # of its own rate that a lane keeps beside others, whatever is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the lanes reach, in 1e9 bytes/s, and the seconds that a hand-over costs.

    `duplex_gbps` is the sum of both directions of the link when both are busy; `update_gbps` the
    CPU Adam's, `memory_gbps` the host memory's as a whole; `io_gbps` the sum of loads and spills
    when both are busy; `device_gbps` the device memory's; `wire_gbps` what comes from other ranks
    of the node, `reduce_gbps` the gradients from all ranks, `exchange_gbps` the weights from other
    nodes. `handover_s` passes between a submission and its lane's start, `launch_s` is the calling
    thread's share of a piece of compute.
    """

    fetch_gbps: float
    drain_gbps: float
    duplex_gbps: float
    update_gbps: float
    memory_gbps: float
    device_gbps: float
    load_gbps: float = 1.0
    spill_gbps: float = 1.0
    io_gbps: float = 2.0
    wire_gbps: float = 25.0
    reduce_gbps: float = 25.0
    exchange_gbps: float = 25.0
    handover_s: float = 3e-5
    launch_s: float = 0.0


class Operation(NamedTuple):
    """What a lane did. `cause`: the operation whose end let this one start; -1: the calling
    thread's own pace.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    cause: int


class SimulatedFence(Fence):
    """Done at a known time."""

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
        # Not the base class's: an event and its lock would be most of a simulation's time.
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


class SimulatedLane(Lane):
    """A clock. `streams`: its thread only enqueues copies, as on a GPU's stream."""

    def __init__(self, name: str, device: SimulatedDevice, *, streams: bool) -> None:
        super().__init__(name)
        self._device = device
        self._streams = streams
        self._issued_s = 0.0
        self.free_s = 0.0
        self._last = -1
        self.recent: deque[tuple[float, float]] = deque(maxlen=SHARING_MEMORY)

    def submit(
        self, operation: str, work: Work, after: Sequence[Fence] = (), *, nbytes: int = 0
    ) -> Fence:
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
            start_s, cause = issued_s, (cause if start_s == issued_s else device.caller_cause)
        end_s = device.end_of(self.name, start_s, nbytes)
        self._issued_s = issued_s if self._streams else end_s
        self.free_s = end_s
        if end_s > start_s:
            self.recent.append((start_s, end_s))
        self._last = device.note(self.name, operation, start_s, end_s, cause)
        work()
        return SimulatedFence(
            device, self.name, operation, issued_s=self._issued_s, done_s=end_s, index=self._last
        )

    def close(self) -> None:
        """Nothing runs."""


class NullKernels:
    """Kernels that compute nothing: sums are zero."""

    def adam(
        self,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        segments: Sequence[native.AdamSegment] | native.AdamRows,
    ) -> None:
        """Nothing."""

    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        """Nothing."""

    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        return [0.0] * len(segments)

    def sum_squares_async(
        self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        return torch.zeros(len(segments), dtype=torch.float64)


class SimulatedDevice(Device):
    """Virtual lanes at `rates`. `asynchronous`: compute runs behind the calling thread, as on a
    GPU. `operations` are everything that happened, in order of submission.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        asynchronous: bool,
        budget_bytes: int | None = None,
        trace: Trace | NullTrace | None = None,
    ) -> None:
        super().__init__("simulated", budget_bytes, trace or NullTrace())
        self.rates = rates
        self.asynchronous = asynchronous
        self.caller_s = 0.0  # the calling thread's clock
        self.caller_cause = -1
        self.compute_s = 0.0
        self._compute_cause = -1
        self.operations: list[Operation] = []
        self.fetch = self._fetch = SimulatedLane("fetch", self, streams=asynchronous)
        self.drain = self._drain = SimulatedLane("drain", self, streams=asynchronous)
        self.update = SimulatedLane("update", self, streams=False)
        self._lanes = {"fetch": self._fetch, "drain": self._drain}  # that others share with
        self._kernels = NullKernels()

    @property
    def kernels(self) -> NullKernels:
        """Nothing is computed."""
        return self._kernels

    def _make_host_lane(self, name: str) -> Lane:
        self._lanes[name] = SimulatedLane(name, self, streams=False)
        return self._lanes[name]

    def _make_wire_lane(self, name: str) -> Lane:
        self._lanes[name] = SimulatedLane(name, self, streams=self.asynchronous)
        return self._lanes[name]

    # -- time -------------------------------------------------------------------------------------
    def is_stream(self, lane: str) -> bool:
        """Whether a stream can wait for this lane's fences by itself."""
        return self.asynchronous and lane in ("fetch", "drain", "compute", *WIRE_LANES)

    def hold_caller(self, until_s: float, cause: int) -> None:
        """The calling thread stands still; so does compute where it is the same thread."""
        if until_s > self.caller_s:
            self.caller_s, self.caller_cause = until_s, cause
            if not self.asynchronous:
                self.compute_s, self._compute_cause = until_s, cause

    def compute(self, name: str, seconds: float) -> None:
        """The calling thread launches `seconds` of compute."""
        self.caller_s += self.rates.launch_s
        start_s, cause = self.compute_s, self._compute_cause
        if self.caller_s > start_s:
            start_s, cause = self.caller_s, self.caller_cause
        self.compute_s = start_s + seconds
        self._compute_cause = self.note("compute", name, start_s, self.compute_s, cause)
        if not self.asynchronous:
            self.caller_s, self.caller_cause = self.compute_s, self._compute_cause

    def charge_compute(self, nbytes: int) -> None:
        """The compute lane moves `nbytes` of device memory."""
        self.compute("device memory", nbytes / (self.rates.device_gbps * 1e9))

    def note(self, lane: str, name: str, start_s: float, end_s: float, cause: int) -> int:
        """Remember an operation; returns its index."""
        self.operations.append(Operation(lane, name, start_s, end_s, cause))
        self.trace.record(lane, name, start_s, end_s)
        return len(self.operations) - 1

    def end_of(self, lane: str, start_s: float, nbytes: int) -> float:
        """When an operation of `nbytes` that starts on the lane now ends ([Note: shared
        resources]).
        """
        own, shared = self._rate(lane)
        if nbytes <= 0 or own <= 0.0:
            return start_s
        left, now_s = float(nbytes), start_s
        for begin_s, end_s, rate in self._overlaps(shared, now_s):
            alone = max(0.0, begin_s - now_s)
            if left <= alone * own:
                return now_s + left / own
            left -= alone * own
            now_s = max(now_s, begin_s)
            if left <= (end_s - now_s) * rate:
                return now_s + left / rate
            left -= (end_s - now_s) * rate
            now_s = end_s
        return now_s + left / own

    def _rate(self, lane: str) -> tuple[float, dict[str, float]]:
        """Bytes/s of a lane alone, and beside each lane that shares its resource."""
        rates = self.rates
        if lane in ("fetch", "drain"):
            own = rates.fetch_gbps if lane == "fetch" else rates.drain_gbps
            other = "drain" if lane == "fetch" else "fetch"
            beside = rates.duplex_gbps - (rates.drain_gbps if lane == "fetch" else rates.fetch_gbps)
            shared = {other: beside}
        elif lane == "gather":
            own, shared = rates.wire_gbps, {}
        elif lane == "reduce":
            own, shared = rates.reduce_gbps, {}
        elif lane == "exchange":
            own = rates.exchange_gbps
            shared = {"reduce": own / 2}
        elif lane == "update":
            own = rates.update_gbps
            shared = {
                "fetch": rates.memory_gbps - rates.fetch_gbps,
                "drain": rates.memory_gbps - rates.drain_gbps,
            }
        elif lane == "spill":
            own = rates.spill_gbps
            beside = rates.io_gbps - rates.load_gbps
            shared = {"load": beside, "stage": beside}
        elif lane in ("load", "stage"):
            own = rates.load_gbps
            other = "stage" if lane == "load" else "load"
            shared = {"spill": rates.io_gbps - rates.spill_gbps, other: 0.0}
        else:
            return 0.0, {}
        return own * 1e9, {
            name: min(own, max(left, LEAST_SHARE * own)) * 1e9 for name, left in shared.items()
        }

    def _overlaps(
        self, shared: dict[str, float], from_s: float
    ) -> list[tuple[float, float, float]]:
        """Disjoint intervals after `from_s` in which others run, and the rate that is left."""
        found = [
            (begin_s, end_s, rate)
            for name, rate in shared.items()
            if name in self._lanes
            for begin_s, end_s in self._lanes[name].recent
            if end_s > from_s
        ]
        found.sort()
        disjoint: list[tuple[float, float, float]] = []
        for begin_s, end_s, rate in found:
            if disjoint and begin_s < disjoint[-1][1]:
                begin_s = disjoint[-1][1]  # two at once: the first one's rate stands
            if end_s > begin_s:
                disjoint.append((begin_s, end_s, rate))
        return disjoint

    # -- buffers ----------------------------------------------------------------------------------
    @property
    def torch_device(self) -> torch.device:
        return torch.device("meta")

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    def pin(self, tensor: torch.Tensor) -> None:
        """There are no bytes."""

    def unpin(self, tensor: torch.Tensor) -> None:
        """There are no bytes."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """There are no bytes: the lane's clock moved."""

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between steps, which are not simulated."""

    def poison(self, tensor: torch.Tensor) -> None:
        """There are no bytes."""

    # -- the compute lane -------------------------------------------------------------------------
    def record_compute(self, operation: str) -> Fence:
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

    def begin_compute_span(self) -> object:
        return None

    def end_compute_span(self, name: str, begun: object) -> None:
        """`compute` recorded it."""

    def close(self) -> None:
        """Nothing runs."""


def meta_slab(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory of a simulated machine: sizes without bytes."""
    return torch.empty(numel, dtype=dtype, device="meta")
