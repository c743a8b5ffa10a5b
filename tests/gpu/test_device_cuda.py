"""Laws of the CUDA device that the emulated one cannot show.

What both devices share is in `tests/units/test_device.py`, which runs its bodies on CUDA too.
Overlap is shown by order, not by a stopwatch: a kernel that sleeps on the device holds compute back
while a transfer finishes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from stronghold.devices.cuda import CudaDevice
from stronghold.errors import ConfigError, StateError
from stronghold.telemetry.trace import Trace
from stronghold.train.slabs import map_slab
from tests.support.sleeping import sleep_on_stream

# they watch what the device does meanwhile
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SLEEP_CYCLES = 1_000_000_000  # half a second at 2 GHz: far longer than any copy here
NUMEL = (4 << 20) + 17


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    # The first launch of a kernel loads it, and an allocation may wait for the device: before a
    # test watches who waits for whom.
    warm = torch.zeros(NUMEL, device=device.torch_device)
    assert warm.fill_(1.0).sum().item() == NUMEL
    del warm
    yield device
    device.close()


@pytest.fixture
def slab(device: CudaDevice) -> Iterator[torch.Tensor]:
    slab = map_slab(NUMEL, torch.float32)
    slab.fill_(3.0)
    device.pinning.pin(slab)
    yield slab
    device.offload.submit("last", lambda: None).wait()
    torch.cuda.synchronize()
    device.pinning.unpin(slab)


def sleep_on_device() -> None:
    """Occupy the current stream."""
    sleep_on_stream(SLEEP_CYCLES)


def taken_by_torch() -> dict[str, int]:
    """What torch's pinned allocator ever took."""
    stats = torch.cuda.host_memory_stats()
    taken = {key: value for key, value in stats.items() if key.startswith("alloc")}
    assert taken
    return taken


# -- buffers --------------------------------------------------------------------------------------
def test_no_zero_overtakes_a_copy_on_another_stream(device: CudaDevice) -> None:
    """A checkpoint that is loaded into fresh moments is not overwritten by their zeros."""
    nbytes = 1 << 28  # the GPU is busy with it for longer than the calls below take
    for _ in range(3):
        buffer = device.memory.allocate_zeros(nbytes, "moments")
        assert torch.cuda.current_stream().query()
        device.copy_now(buffer[:17], torch.ones(17, dtype=torch.uint8))
        torch.cuda.synchronize()
        assert buffer[:17].cpu().tolist() == [1] * 17
        assert not buffer[17:].any()
        device.memory.release(buffer)


# -- pinned memory --------------------------------------------------------------------------------
@pytest.mark.parametrize("numel", [1, 15, 17, 4097, NUMEL])
def test_a_registered_slab_is_pinned_until_it_is_unregistered(
    device: CudaDevice, numel: int
) -> None:
    slab = map_slab(numel, torch.bfloat16)
    assert not slab.is_pinned()
    device.pinning.pin(slab)
    assert slab.is_pinned()
    assert slab[numel // 2 :].is_pinned()
    device.pinning.unpin(slab)
    assert not slab.is_pinned()


def test_registering_twice_or_unregistering_nothing_is_an_error(device: CudaDevice) -> None:
    slab = map_slab(4097, torch.float32)
    with pytest.raises(StateError, match="cudaHostUnregister"):
        device.pinning.unpin(slab)
    device.pinning.pin(slab)
    with pytest.raises(StateError, match="cudaHostRegister of 16388 bytes"):
        device.pinning.pin(slab)
    device.pinning.unpin(slab)
    # The next kernel does not report these errors as its own.
    assert torch.ones(3, device=device.torch_device).sum().item() == 3.0


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 2), (1, 3), (3, 4)])
def test_a_copy_may_span_registered_and_other_memory(
    device: CudaDevice, begin: int, end: int
) -> None:
    """CUDA refuses such a copy; ours is made in pieces."""
    page = 4096
    slab = map_slab(4 * page + 8, torch.uint8)
    slab.copy_(torch.arange(slab.numel()) % 251)
    mine = slab[begin * page : end * page]
    device.pinning.pin(mine)
    buffer = device.memory.allocate(slab.numel(), torch.uint8, "slot")
    fetched = device.fetch.submit("fetch", lambda: device.copy(buffer, slab))
    fetched.wait()
    assert torch.equal(buffer.cpu(), slab)
    buffer.mul_(3)
    produced = device.compute.record("produced")
    device.offload.submit("offload", lambda: device.copy(slab, buffer), (produced,)).wait()
    assert torch.equal(buffer.cpu(), slab)
    device.pinning.unpin(mine)


def test_transfers_use_no_pinned_memory_of_torchs(device: CudaDevice, slab: torch.Tensor) -> None:
    """Torch's allocator rounds up to powers of two: a staging buffer there would be our failure."""
    before = taken_by_torch()
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    for _ in range(3):
        there = device.fetch.submit("fetch", lambda: device.copy(buffer, slab))
        device.offload.submit("offload", lambda: device.copy(slab, buffer), (there,)).wait()
    assert taken_by_torch() == before


def test_transfers_allocate_nothing_on_the_device(device: CudaDevice, slab: torch.Tensor) -> None:
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    device.fetch.submit("first", lambda: device.copy(buffer, slab)).wait()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        device.fetch.submit("fetch", lambda: device.copy(buffer, slab)).wait()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# -- overlap --------------------------------------------------------------------------------------
def test_fetches_and_drains_finish_while_compute_is_busy(
    device: CudaDevice, slab: torch.Tensor
) -> None:
    back = map_slab(NUMEL, torch.float32)
    device.pinning.pin(back)
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    sleep_on_device()
    busy = device.compute.record("busy")
    fetched = device.fetch.submit("fetch", lambda: device.copy(buffer, slab))
    drained = device.offload.submit("offload", lambda: device.copy(back, buffer), (fetched,))
    drained.wait()
    assert not busy.done, "the copies waited for compute"
    assert torch.equal(back, slab)
    busy.wait()
    device.pinning.unpin(back)


def test_a_drain_does_not_wait_for_a_fetch(device: CudaDevice, slab: torch.Tensor) -> None:
    """Each lane has a stream: a fetch held back by compute holds no offload back."""
    back = map_slab(NUMEL, torch.float32)
    device.pinning.pin(back)
    slot = device.memory.allocate(NUMEL, torch.float32, "slot")
    gradients = device.memory.allocate(NUMEL, torch.float32, "gradients")
    gradients.fill_(5.0)
    produced = device.compute.record("gradients")
    sleep_on_device()
    used = device.compute.record("release")
    fetched = device.fetch.submit("fetch", lambda: device.copy(slot, slab), (used,))
    device.offload.submit("offload", lambda: device.copy(back, gradients), (produced,)).wait()
    assert not fetched.done
    assert torch.equal(back, torch.full((NUMEL,), 5.0))
    fetched.wait()
    assert used.done, "the fetch overtook the compute that it waits for"
    device.pinning.unpin(back)


def test_a_fence_is_issued_before_it_is_done(device: CudaDevice, slab: torch.Tensor) -> None:
    """Nothing on the host waits for the device: submission, issue and compute's wait all return."""
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    sleep_on_device()
    busy = device.compute.record("busy")
    fence = device.fetch.submit("fetch", lambda: device.copy(buffer, slab), (busy,))
    assert fence.wait_issued() is not None
    device.compute.wait(fence)
    total = buffer.sum()
    assert not busy.done
    assert not fence.done
    fence.wait()
    assert fence.done
    assert busy.done
    assert total.item() == 3.0 * NUMEL


def test_what_a_lane_has_finished_is_there(device: CudaDevice, slab: torch.Tensor) -> None:
    """Its buffers may be dropped, or taken by others, then."""
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    sleep_on_device()
    busy = device.compute.record("busy")
    fetched = device.fetch.submit("fetch", lambda: device.copy(buffer, slab), (busy,))
    device.finish()
    assert fetched.done


def test_a_thread_that_waits_for_the_device_does_not_spin(device: CudaDevice) -> None:
    """Its core belongs to Adam: the wait takes half a second of time and next to none of a core."""
    sleep_on_device()
    busy = device.compute.record("busy")
    spent: list[float] = []

    def wait() -> None:
        torch.cuda.set_device(device.torch_device)
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        busy.wait()
        spent.extend((time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert spent[0] > 0.1
    assert spent[1] < 0.2 * spent[0]


# -- order ----------------------------------------------------------------------------------------
def test_a_drain_after_a_long_kernel_reads_its_result(
    device: CudaDevice, slab: torch.Tensor
) -> None:
    gradients = device.memory.allocate(NUMEL, torch.float32, "gradients")
    gradients.zero_()
    sleep_on_device()
    gradients.fill_(7.0)
    produced = device.compute.record("gradients")
    device.offload.submit("offload", lambda: device.copy(slab, gradients), (produced,)).wait()
    assert torch.equal(slab, torch.full((NUMEL,), 7.0))


def test_compute_on_the_users_own_stream_is_ordered_too(
    device: CudaDevice, slab: torch.Tensor
) -> None:
    """Compute is whatever stream is current in the calling thread."""
    gradients = device.memory.allocate(NUMEL, torch.float32, "gradients")
    with torch.cuda.stream(torch.cuda.Stream()):
        sleep_on_device()
        gradients.fill_(9.0)
        produced = device.compute.record("gradients")
        drained = device.offload.submit(
            "offload", lambda: device.copy(slab, gradients), (produced,)
        )
        device.compute.wait(drained)
        gradients.zero_()
    drained.wait()
    assert torch.equal(slab, torch.full((NUMEL,), 9.0))


def test_a_buffer_is_not_the_memory_of_kernels_that_still_run(
    device: CudaDevice, slab: torch.Tensor
) -> None:
    """Torch hands freed memory out at once, ordered on its own stream only; lanes have others."""
    torch.cuda.empty_cache()
    dying = torch.empty(NUMEL, device=device.torch_device)
    address = dying.data_ptr()
    sleep_on_device()
    dying.fill_(1.0)
    del dying
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    assert buffer.data_ptr() == address, "the allocator chose other memory: the test shows nothing"
    device.fetch.submit("fetch", lambda: device.copy(buffer, slab)).wait()
    torch.cuda.synchronize()
    assert torch.equal(buffer.cpu(), slab)


def test_lane_threads_work_on_their_device() -> None:
    index = torch.cuda.device_count() - 1
    previous = torch.cuda.current_device()
    device = CudaDevice(index)
    try:
        seen: list[int] = []
        for lane in (device.fetch, device.offload, device.update):
            lane.submit("look", lambda: seen.append(torch.cuda.current_device())).wait()
        assert seen == [index] * 3
    finally:
        device.close()
        torch.cuda.set_device(previous)


# -- trace ----------------------------------------------------------------------------------------
def test_waits_are_the_streams_and_not_the_hosts() -> None:
    device = CudaDevice(trace=Trace())
    slow = device.fetch.submit("fetch 3", sleep_on_device)
    slow.wait_issued()
    begun_s = time.perf_counter()
    waited = device.compute.wait(slow)
    assert time.perf_counter() - begun_s < 0.1, "the host waited"
    assert callable(waited)
    assert waited() > 0.1
    device.close()
    assert [span.name for span in device.trace.spans() if span.lane == "wait"] == ["fetch 3"]


def test_spans_are_device_times_on_the_hosts_clock(slab: torch.Tensor) -> None:
    trace = Trace()
    device = CudaDevice(trace=trace)
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    before = time.perf_counter()
    begun = device.compute.begin_span()
    sleep_on_device()
    device.compute.end_span("forward 0", begun)
    for k in range(30):
        device.fetch.submit(f"fetch {k}", lambda: device.copy(buffer, slab))
        device.settle()  # while the lane appends: no span may be lost
    device.close()
    after = time.perf_counter()
    spans = {span.name: (span.start_s, span.end_s) for span in trace.spans()}
    assert sorted(spans) == sorted(["forward 0", *(f"fetch {k}" for k in range(30))])
    for start, end in spans.values():
        # A millisecond for the host's view of the first event.
        assert before - 1e-3 <= start <= end <= after + 1e-3
    assert spans["forward 0"][1] - spans["forward 0"][0] > 0.1
    starts = [spans[f"fetch {k}"][0] for k in range(30)]
    assert starts == sorted(starts)


# -- copies beside the lanes ----------------------------------------------------------------------
def test_copies_outside_of_lanes_share_a_stream(
    device: CudaDevice, slab: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = device.memory.allocate(NUMEL, torch.float32, "slot")
    made: list[object] = []
    stream = torch.cuda.Stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda *place: made.append(0) or stream(*place))
    threads = [
        threading.Thread(target=device.copy_now, args=(buffer[k::4][:1000], slab[k::4][:1000]))
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == []


# -- errors ---------------------------------------------------------------------------------------
def test_a_rank_without_a_gpu_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"local rank {count} has no GPU: torch finds {count}"):
        CudaDevice(count)
