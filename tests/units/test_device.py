"""Lanes, fences and buffers: what every device promises, CUDA where there is one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from stronghold.devices.cuda import CudaDevice, EventClock
from stronghold.devices.device import Device, Lane
from stronghold.devices.emulated import COPY_PIECE_BYTES, EmulatedDevice
from stronghold.devices.fences import Fence
from stronghold.devices.host_memory import cuts
from stronghold.devices.threads import THREAD_PREFIX
from stronghold.errors import BudgetError, ConfigError, LaneError, StateError
from stronghold.telemetry.metrics import read_number
from stronghold.telemetry.trace import Trace
from stronghold.train.slabs import map_slab

WEIRD = (1, 2, 15, 17, 4097)
SEAM = COPY_PIECE_BYTES + 1
PATIENCE_S = 20.0  # a wait that must end; only a failing test ever takes so long


def make_emulated(**options: object) -> Device:
    return EmulatedDevice(**options)  # type: ignore[arg-type]


def make_cuda(**options: object) -> Device:
    return CudaDevice(**options)  # type: ignore[arg-type]


MAKERS = [
    pytest.param(make_emulated, id="emulated"),
    pytest.param(make_cuda, id="cuda", marks=[pytest.mark.gpu, pytest.mark.alone]),
]


@pytest.fixture(params=MAKERS)
def make_device(request: pytest.FixtureRequest) -> Iterator[Callable[..., Device]]:
    devices: list[Device] = []

    def make(**options: object) -> Device:
        devices.append(request.param(**options))
        return devices[-1]

    yield make
    for device in devices:
        device.close()


@pytest.fixture
def device(make_device: Callable[..., Device]) -> Device:
    return make_device()


def lanes(device: Device) -> list[str]:
    """The lane threads that are alive: `thread - before` is what a device left."""
    names = {THREAD_PREFIX + lane.name for lane in (device.fetch, device.offload, device.update)}
    return [thread.name for thread in threading.enumerate() if thread.name in names]


def raise_(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


# -- order -------------------------------------------------------------------------------------
def test_operations_of_a_lane_run_in_the_order_of_submission(device: Device) -> None:
    seen: list[int] = []
    for lane in (device.fetch, device.offload, device.update):
        seen.clear()
        fences = [lane.submit(f"count {k}", lambda k=k: seen.append(k)) for k in range(50)]
        fences[-1].wait()
        assert seen == list(range(50))
        assert all(fence.done for fence in fences)


def test_an_operation_waits_for_its_fences(device: Device) -> None:
    gate, seen = threading.Event(), list[str]()

    def slow() -> None:
        gate.wait(PATIENCE_S)
        seen.append("offload")

    first = device.offload.submit("slow", slow)
    second = device.update.submit("after", lambda: seen.append("update"), (first,))
    third = device.fetch.submit("after both", lambda: seen.append("fetch"), (first, second))
    # A lane that did not wait would have run by now; one that waits cannot.
    time.sleep(0.05)
    assert seen == []
    assert not any(fence.done for fence in (first, second, third))
    gate.set()
    third.wait()
    assert seen == ["offload", "update", "fetch"]


def test_lanes_work_at_the_same_time(device: Device) -> None:
    """Each lane's work ends only when the others' has begun: one after the other would hang."""
    barrier = threading.Barrier(3, timeout=PATIENCE_S)
    for lane in (device.fetch, device.offload, device.update):
        fence = lane.submit("meet", lambda: [None, barrier.wait()][0])
    fence.wait()
    device.check()


def test_compute_waits_for_a_fence_and_says_how_long(make_device: Callable[..., Device]) -> None:
    # a stream's waits are known when they are traced
    device = make_device(trace=Trace())

    def waited(fence: Fence) -> float:
        return read_number(device.compute.wait(fence)) or 0.0

    # a stream goes on once the operation is issued
    if device.torch_device.type == "cpu":
        assert waited(device.fetch.submit("slow", lambda: time.sleep(0.05))) > 0.02
    fence = device.fetch.submit("quick", lambda: None)
    fence.wait()
    assert waited(fence) < 0.02
    recorded = device.compute.record("all so far")
    assert (recorded.lane, recorded.operation) == ("compute", "all so far")
    recorded.wait()
    assert recorded.done


# -- bytes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [*WEIRD, SEAM])
def test_bytes_go_to_the_device_and_back_unchanged(
    device: Device, numel: int, dtype: torch.dtype
) -> None:
    """Random bytes, NaN patterns among them: compared as bytes, with a guard element behind."""
    source, back = map_slab(numel, dtype), map_slab(numel + 1, dtype)
    for slab in (source, back):
        device.pinning.pin(slab)
    generator = torch.Generator().manual_seed(numel)
    size = numel * dtype.itemsize
    source.view(torch.uint8).copy_(
        torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    )
    buffer = device.memory.allocate(numel, dtype, "test")
    there = device.fetch.submit("there", lambda: device.copy(buffer, source))
    device.offload.submit("back", lambda: device.copy(back[:numel], buffer), (there,)).wait()
    assert torch.equal(back[:numel].view(torch.uint8), source.view(torch.uint8))
    assert not back[numel:].view(torch.uint8).any()
    for slab in (source, back):
        device.pinning.unpin(slab)


def test_a_drain_behind_compute_reads_the_result(device: Device) -> None:
    """A long matrix product, then its offload: the bytes are the product, not what was there."""
    size = 512
    weights = torch.full((size, size), 1.0 / size, device=device.torch_device)
    values = device.memory.allocate(size * size, torch.float32, "result").view(size, size)
    result = map_slab(size * size, torch.float32)
    device.pinning.pin(result)
    values.zero_()
    product = torch.ones(size, size, device=device.torch_device)
    for _ in range(20):
        product = product @ weights
    values.copy_(product + 1.0)
    produced = device.compute.record("product")
    drained = device.offload.submit(
        "offload", lambda: device.copy(result, values.view(-1)), (produced,)
    )
    drained.wait()
    # Powers of two: every sum is exact.
    assert torch.equal(result, torch.full((size * size,), 2.0))
    device.pinning.unpin(result)


def test_a_fetch_behind_compute_leaves_what_compute_reads(device: Device) -> None:
    """The slot's race: compute still reads it when the next fetch is submitted."""
    numel = 1 << 18
    ones, twos = map_slab(numel, torch.float32), map_slab(numel, torch.float32)
    ones.fill_(1.0)
    twos.fill_(2.0)
    for slab in (ones, twos):
        device.pinning.pin(slab)
    slot = device.memory.allocate(numel, torch.float32, "slot")
    device.compute.wait(device.fetch.submit("fetch 1", lambda: device.copy(slot, ones)))
    total = torch.zeros(numel, device=device.torch_device)
    for _ in range(50):
        total = total + slot
    used = device.compute.record("release 1")
    device.compute.wait(device.fetch.submit("fetch 2", lambda: device.copy(slot, twos), (used,)))
    total = total + slot
    assert torch.equal(total.cpu(), torch.full((numel,), 52.0))
    for slab in (ones, twos):
        device.pinning.unpin(slab)


# -- budget ------------------------------------------------------------------------------------
def test_the_budget_is_kept_to_the_byte(make_device: Callable[..., Device]) -> None:
    device = make_device(budget_bytes=100)
    first = device.memory.allocate(50, torch.uint8, "first")
    second = device.memory.allocate(25, torch.bfloat16, "second")
    assert device.memory.allocated_bytes == device.memory.peak_bytes == 100
    with pytest.raises(BudgetError, match=r"third: 1 bytes .* 100 bytes .*stronghold\.gpu_memory"):
        device.memory.allocate(1, torch.uint8, "third")
    device.memory.allocate(0, torch.float32, "nothing")
    assert device.memory.allocated_bytes == 100
    device.memory.release(second)
    assert (device.memory.allocated_bytes, device.memory.peak_bytes) == (50, 100)
    device.memory.release(first)
    assert (device.memory.allocated_bytes, device.memory.peak_bytes) == (0, 100)


# -- failure -----------------------------------------------------------------------------------
def test_an_exception_reaches_every_waiter_under_its_first_name(device: Device) -> None:
    cause = ValueError("the disk is gone")
    failed = device.fetch.submit("fetch 7", raise_(cause))
    waiting = device.update.submit("update 7", lambda: None, (failed,))
    last = device.offload.submit("offload 7", lambda: None, (waiting,))
    for fence in (last, waiting, failed):
        with pytest.raises(LaneError, match="fetch 7 failed on the fetch lane: ValueError") as info:
            fence.wait()
        assert (info.value.lane, info.value.operation) == ("fetch", "fetch 7")
        assert info.value.__cause__ is cause
        with pytest.raises(LaneError):
            fence.wait_issued()
    for wait in (device.check, lambda: device.compute.wait(last)):
        with pytest.raises(LaneError, match="fetch 7"):
            wait()


def test_work_behind_a_failure_is_not_run_and_the_lane_goes_on(device: Device) -> None:
    ran: list[str] = []
    failed = device.fetch.submit("fetch 1", raise_(OSError("no")))
    skipped = device.fetch.submit("fetch 2", lambda: ran.append("skipped"), (failed,))
    alone = device.fetch.submit("fetch 3", lambda: ran.append("alone"))
    alone.wait()
    with pytest.raises(LaneError, match="fetch 1"):
        skipped.wait()
    assert ran == ["alone"]


def test_the_first_failure_is_the_one_that_is_reported(device: Device) -> None:
    device.check()
    for k in (1, 2):
        with pytest.raises(LaneError):
            device.offload.submit(f"offload {k}", raise_(KeyError(k))).wait()
    with pytest.raises(LaneError, match="offload 1"):
        device.check()


def test_who_was_told_of_a_later_failure_is_not_told_of_the_first_at_the_end(
    device: Device,
) -> None:
    work = raise_(OSError("no"))
    first, second = (device.offload.submit(name, work) for name in ("first", "second"))
    with pytest.raises(LaneError, match="second failed"):
        second.wait()
    device.check_unsurfaced()
    with pytest.raises(LaneError, match="first failed"):
        first.wait()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), MemoryError()])
def test_no_exception_ends_a_lane_silently(device: Device, error: BaseException) -> None:
    fence = device.update.submit("update 1", raise_(error))
    deadline = time.monotonic() + PATIENCE_S
    while not fence.done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert fence.done, "the lane's thread died"
    with pytest.raises(LaneError, match=type(error).__name__):
        fence.wait()
    device.update.submit("update 2", lambda: None).wait()


# -- life --------------------------------------------------------------------------------------
def test_close_finishes_queued_work_and_ends_every_thread(device: Device) -> None:
    seen: list[int] = []
    assert len(lanes(device)) == 3
    first = device.offload.submit("slow", lambda: time.sleep(0.02))
    for k in range(5):
        device.fetch.submit(f"fetch {k}", lambda k=k: seen.append(k), (first,))
    device.close()
    assert seen == list(range(5))
    assert lanes(device) == []
    device.close()


def test_a_closed_lane_refuses_work_instead_of_never_doing_it(device: Device) -> None:
    device.close()
    for lane in (device.fetch, device.offload, device.update):
        with pytest.raises(StateError, match=f"fetch 1 .*{lane.name} lane"):
            lane.submit("fetch 1", lambda: None)


def test_close_after_a_failure_leaves_no_thread(device: Device) -> None:
    failed = device.fetch.submit("fetch 1", raise_(ValueError()))
    device.update.submit("update 1", lambda: None, (failed,))
    device.close()
    assert lanes(device) == []
    with pytest.raises(LaneError, match="fetch 1"):
        device.check()


def test_a_lane_keeps_nothing_alive_after_an_operation(device: Device) -> None:
    """An idle lane must not hold the last closure: its tensors may be gigabytes."""

    class Buffer:
        pass

    buffer = Buffer()
    alive = weakref.ref(buffer)
    waited = device.update.submit("before", lambda: None)
    fence = device.fetch.submit("use", lambda b=buffer: None, (waited,))
    fence.wait()
    del buffer
    # The fence is set a moment before the thread lets go.
    deadline = time.monotonic() + PATIENCE_S
    while alive() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    assert alive() is None


def test_a_missing_gpu_is_named_with_what_to_set_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"stronghold\.device: got \"cuda\".*\"emulated\""):
        CudaDevice()


# -- what is registered with a GPU ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (100, 200, []),  # exactly one region
        (120, 180, []),  # inside one
        (0, 100, []),  # beside them
        (200, 300, []),  # between two
        (90, 110, [100]),
        (150, 250, [200]),
        (0, 1000, [100, 200, 300, 400, 500]),
        (350, 450, [400]),  # two that touch
        (120, 350, [200, 300]),
    ],
)
def test_a_copy_is_cut_where_registered_memory_begins_or_ends(
    begin: int, end: int, expected: list[int]
) -> None:
    regions = [(100, 200), (300, 400), (400, 500)]
    assert cuts(regions, begin, end) == expected
    assert cuts([], begin, end) == []


class Event:
    """At `ms` of a device's clock; differences come as CUDA's do, in fp32."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return torch.tensor(end.ms - self.ms, dtype=torch.float32).item()


def test_times_of_events_stay_exact_after_hours() -> None:
    clock = EventClock(Event(0.0), 50.0)  # type: ignore[arg-type]
    for seconds in range(20_000):
        ms = seconds * 1e3 + 0.123
        for late in (0.0, -900.0):  # lanes' spans are not in one order
            if ms + late < 0.0:
                continue
            found = clock.at(Event(ms + late))  # type: ignore[arg-type]
            # Each of the events that it counts from adds two microseconds at most.
            assert abs(found - (50.0 + (ms + late) * 1e-3)) < 5e-6 + 2e-6 * seconds / 30


# -- short operations ---------------------------------------------------------------------------
def by_whom(lane: Lane, after: tuple[Fence, ...] = ()) -> tuple[list[str], Fence]:
    """The thread that performs a small transfer, once the fence is done."""
    seen: list[str] = []
    here = threading.current_thread().name

    def work() -> None:
        seen.append("here" if threading.current_thread().name == here else "lane")

    return seen, lane.submit("copy", work, after, nbytes=8)


@pytest.fixture
def gentle(make_device: Callable[..., Device]) -> Device:
    """On a GPU, or not hostile."""
    on_gpu = torch.cuda.is_available()
    return make_device(**({} if on_gpu else {"poison": False}))


def test_a_small_transfer_that_waits_for_nothing_is_its_submitters(gentle: Device) -> None:
    seen, fence = by_whom(gentle.fetch)
    assert seen == ["here"]
    fence.wait()
    # of several ranks any may wait for another process
    gentle.is_single_process = False
    seen, fence = by_whom(gentle.fetch)
    fence.wait()
    assert seen == ["lane"]


def test_what_waits_or_comes_after_others_is_the_lanes(gentle: Device) -> None:
    """A lane is first in, first out, whoever performs what."""
    gate = threading.Event()
    slow = gentle.update.submit("slow", lambda: [None, gate.wait(PATIENCE_S)][0])
    waiting, first = by_whom(gentle.fetch, (slow,))
    behind, second = by_whom(gentle.fetch)
    assert (waiting, behind, first.done, second.done) == ([], [], False, False)
    gate.set()
    second.wait()
    assert (waiting, behind) == (["lane"], ["lane"])


def test_a_short_operations_error_is_the_lanes_and_an_interrupt_the_callers(gentle: Device) -> None:
    fence = gentle.fetch.submit("copy 3", raise_(ValueError("broken")), nbytes=8)
    with pytest.raises(LaneError, match="copy 3 failed on the fetch lane"):
        fence.wait()
    # which is not raised where it is submitted
    seen, after = by_whom(gentle.offload, (fence,))
    with pytest.raises(LaneError, match="copy 3 failed on the fetch lane"):
        after.wait()
    assert seen == []
    with pytest.raises(KeyboardInterrupt):
        gentle.fetch.submit("copy 4", raise_(KeyboardInterrupt()), nbytes=8)
    seen, fence = by_whom(gentle.fetch)
    fence.wait()
    assert seen == ["here"]
