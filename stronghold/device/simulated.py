"""A device of clocks: the same lanes and fences, no threads and no bytes.

Owns virtual time. Buffers are on torch's meta device, operations take the seconds that their bytes
need at the given rates, and nothing is computed: the real executor, window, drains and updater run
on it unchanged. The calling thread alone enters.

[Note: one pass is enough] An operation may only wait for fences that exist when it is submitted
([Note: no deadlock] of `base`), and every lane is first in, first out. So the time at which an
operation ends is known when it is submitted, and no queue of events is needed.

[Note: two clocks] On a GPU the calling thread runs ahead of compute: it stands still only until a
transfer is issued, or for a fence that it waits for itself. `asynchronous=False` is the emulated
device, whose compute is the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

from stronghold.device.base import STREAM_LANES, Device, Fence, Lane, Work
from stronghold.device.contention import LINK_LANES, Contention, Moving, Rates
from stronghold.device.kernels import Kernels
from stronghold.telemetry.trace import NullTrace, Trace


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

    @property
    def failed(self) -> bool:
        return False


class SimulatedLane(Lane):
    """A clock. `streams`: its thread only enqueues copies, as on a GPU's stream."""

    def __init__(self, name: str, device: SimulatedDevice, *, streams: bool) -> None:
        super().__init__(name)
        self._device = device
        self._streams = streams
        self._issued_s = 0.0
        self.free_s = 0.0
        self._last = -1

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
            start_s, cause = issued_s, (cause if start_s == issued_s else device.caller_cause)
        end_s = device.contention.end_of(self.name, start_s, nbytes)
        self._issued_s = issued_s if self._streams else end_s
        self.free_s = end_s
        self._last = device.note(self.name, operation, start_s, end_s, cause)
        work()
        found = SimulatedFence(
            device, self.name, operation, issued_s=self._issued_s, done_s=end_s, index=self._last
        )
        if end_s > start_s:
            moving = Moving(
                lane=self.name,
                begin_s=start_s,
                end_s=end_s,
                nbytes=nbytes,
                fence=found,
                index=self._last,
            )
            device.contention.add(moving)
            if self.name in LINK_LANES:
                device.delay_updates(moving)
        return found

    def not_before(self, free_s: float) -> None:
        """Its operations have become longer."""
        self.free_s = max(self.free_s, free_s)
        self._issued_s = max(self._issued_s, free_s)

    def finish(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


class NullKernels(Kernels):
    """Kernels that compute nothing: sums are zero."""

    def prepare_adam(self, *_: object, lean: bool = False) -> Callable[[float | None], None]:
        return lambda scale: None

    def accumulate(
        self, grad_dtype: torch.dtype, segments: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        """Nothing."""

    def sum_squares(self, dtype: torch.dtype, segments: Sequence[tuple[int, int]]) -> list[float]:
        return [0.0] * len(segments)


class SimulatedDevice(Device):
    """Virtual lanes at `rates`. `asynchronous`: compute runs behind the calling thread, as on a
    GPU.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        asynchronous: bool,
        budget_bytes: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__("simulated", budget_bytes, trace or NullTrace())
        self.rates = rates
        self.contention = Contention(rates)
        self.asynchronous = asynchronous
        self.caller_s = 0.0  # the calling thread's clock
        self.caller_cause = -1
        self.compute_s = 0.0
        self._compute_cause = -1
        self._operations: list[Operation] = []
        self._open_lanes()
        self._kernels = NullKernels()

    @property
    def kernels(self) -> NullKernels:
        """Nothing is computed."""
        return self._kernels

    def _make_lane(self, name: str) -> Lane:
        return SimulatedLane(name, self, streams=self.asynchronous and name in STREAM_LANES)

    # -- time -------------------------------------------------------------------------------------
    def is_stream(self, lane: str) -> bool:
        """Whether a stream can wait for this lane's fences by itself."""
        return self.asynchronous and lane in ("compute", *STREAM_LANES)

    def hold_caller(self, until_s: float, cause: int) -> None:
        """The calling thread stands still; so does compute where it is the same thread."""
        if until_s > self.caller_s:
            self.caller_s, self.caller_cause = until_s, cause
            if not self.asynchronous:
                self.compute_s, self._compute_cause = until_s, cause

    def run_compute(self, name: str, seconds: float) -> None:
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
        self.run_compute("device memory", nbytes / (self.rates.device_gbps * 1e9))

    def note(self, lane: str, name: str, start_s: float, end_s: float, cause: int) -> int:
        """Remember an operation; returns its index."""
        self._operations.append(Operation(lane, name, start_s, end_s, cause))
        self.trace.record(lane, name, start_s, end_s)
        return len(self._operations) - 1

    def delay_updates(self, transfer: Moving) -> None:
        """A transfer was submitted that takes memory from updates before it."""
        update = cast(SimulatedLane, self.update)
        update.not_before(self.contention.delay_updates(transfer, self.caller_s))

    @property
    def operations(self) -> list[Operation]:
        """Everything that happened, in order of submission."""
        for update in self.contention.delayed():
            known = self._operations[update.index]
            self._operations[update.index] = known._replace(
                start_s=update.begin_s, end_s=update.end_s
            )
        return self._operations

    # -- buffers ----------------------------------------------------------------------------------
    @property
    def torch_device(self) -> torch.device:
        return torch.device("meta")

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """There are no bytes: the lane's clock moved."""

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between steps, which are not simulated."""

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Who reads stands still until compute has come so far."""
        computed = self.record_compute("read")

        def read() -> list[float]:
            computed.wait()
            return super(SimulatedDevice, self).read_later(tensor)()

        return read

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

    def begin_compute_span(self) -> object:
        return None

    def end_compute_span(self, name: str, begun: object) -> None:
        """`run_compute` recorded it."""

    def close(self) -> None:
        """Nothing runs."""


def meta_slab(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory of a simulated machine: sizes without bytes."""
    return torch.empty(numel, dtype=dtype, device="meta")
