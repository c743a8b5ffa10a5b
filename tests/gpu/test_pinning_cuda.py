"""Laws of a host that refuses to pin: what passes through the driver's buffers has the same bits.

Only the pretended device refuses on demand: its `torch.cuda.cudart` has a `limit`.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.devices import cuda
from stronghold.devices.cuda import CudaDevice
from stronghold.errors import StateError
from stronghold.tools.doctor.examine import examine
from stronghold.tools.doctor.page import problems_of
from stronghold.train.slabs import map_slab
from tests.gpu.test_training_cuda import STEPS, plain
from tests.models.families import odd_llama as llama
from tests.support.sleeping import sleep_on_stream
from tests.support.training import assert_identical, config, train_windowed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not hasattr(torch.cuda.cudart, "limit"), reason="a real system does not refuse on demand"
    ),
]

SIZES = [1, 4097, 20 << 20]


@pytest.fixture
def refuse_beyond(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Call it with the bytes that may be registered from then on."""
    runtime: Any = torch.cuda.cudart

    def set_limit(more: int) -> None:
        monkeypatch.setattr(runtime, "limit", sum(runtime.registered.values()) + more)

    before = dict(runtime.registered)
    yield set_limit
    assert runtime.registered == before, "something is left registered"


@pytest.fixture
def device(refuse_beyond: Callable[[int], None]) -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_not_pinned_comes_and_goes(
    device: CudaDevice, refuse_beyond: Callable[[int], None], nbytes: int
) -> None:
    refuse_beyond(nbytes - 1)
    slabs = [map_slab(nbytes, torch.uint8) for _ in range(2)]
    for slab in slabs:
        device.pinning.pin(slab)
        assert not slab.is_pinned()
    here, back = (slab[:nbytes] for slab in slabs)
    here.copy_(torch.arange(nbytes) % 251)
    there = device.memory.allocate(nbytes, torch.uint8, "slot")
    fetched = device.fetch.submit("fetch", lambda: device.copy(there, here))
    device.offload.submit("offload", lambda: device.copy(back, there), (fetched,)).wait()
    assert torch.equal(back, here)
    back.zero_()
    device.copy_now(back, there)
    assert torch.equal(back, here)
    for slab in slabs:
        device.pinning.unpin(slab)
    with pytest.raises(StateError, match="never pinned"):
        device.pinning.unpin(slabs[0])


def test_a_fetch_of_refused_memory_waits_for_the_offload_that_writes_it(
    device: CudaDevice, refuse_beyond: Callable[[int], None]
) -> None:
    """An offloaded activation."""
    nbytes = 56 << 20
    refuse_beyond(nbytes - 1)
    slab = map_slab(nbytes, torch.uint8)
    device.pinning.pin(slab)
    source, target = (device.memory.allocate(nbytes, torch.uint8, "slot") for _ in range(2))
    source.fill_(7)
    target.zero_()
    sleep_on_stream(500_000_000)
    produced = device.compute.record("activation")
    stored = device.offload.submit("offload", lambda: device.copy(slab, source), (produced,))
    room = device.compute.record("room")
    device.fetch.submit("onload", lambda: device.copy(target, slab), (stored, room)).wait()
    assert target.cpu().eq(7).all()
    device.pinning.unpin(slab)


def test_one_log_line_names_the_refusal(
    device: CudaDevice, refuse_beyond: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = map_slab(1 << 20, torch.uint8)
    refuse_beyond(first.nbytes + 300_000)
    device.pinning.pin(first)
    others = [map_slab(1 << 20, torch.uint8) for _ in range(3)]
    with caplog.at_level(logging.WARNING, "stronghold"):
        for slab in others:
            device.pinning.pin(slab)
    pinned_bytes = device.pinning.pinned_bytes
    for slab in (first, *others):
        device.pinning.unpin(slab)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pin 1.00 MiB of host memory, and refuses 1.00 MiB more" in line
    assert "ulimit -l unlimited" in line
    assert pinned_bytes == first.nbytes


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_host_that_refuses_to_pin_trains_with_the_same_bits(
    refuse_beyond: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    share: float,
    policy: str,
) -> None:
    """`share` of the weights may be pinned, and that is kept."""
    seen: list[int] = []
    weights = sum(4 * p.numel() for p in llama()[0].parameters())
    limit = int(share * weights)
    refuse_beyond(limit)

    def inspect(engine: Any) -> None:
        seen.append(engine.inspect().device.pinning.pinned_bytes)
        report = engine.memory_report()
        assert report.host_peak == report.host_planned

    section = {"device": "cuda", "window": 1, "resident_layers": 0, "activations": policy}
    options = {"precision": "fp32", "clipping": 0.5, "accumulation": 1}
    settings = config(section=section, **options)
    with caplog.at_level(logging.WARNING, "stronghold"):
        run = train_windowed(llama, steps=STEPS, settings=settings, inspect=inspect)
    assert_identical(run, plain("odd llama", **options))
    told = [record for record in caplog.records if "refuses" in record.getMessage()]
    assert len(told) == 1
    assert (limit > 0) == (seen[0] > 0)
    assert seen[0] <= limit


def test_doctor_says_that_memory_cannot_be_pinned(refuse_beyond: Callable[[int], None]) -> None:
    refuse_beyond(8 << 20)
    findings = examine("cuda")
    (problem,) = [each for each in problems_of(findings) if "pin" in each.what]
    assert "cudaHostRegister of" in problem.got


MANY_THREADS_BYTES = 96 << 20  # several times what one thread commits at a time


def test_a_large_slab_is_committed_before_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads: registration would clear its pages with one."""
    slab = map_slab(MANY_THREADS_BYTES + 17, torch.uint8)
    before, seen = resident_bytes(), []
    cudart = torch.cuda.cudart()

    class Watched:
        @staticmethod
        def cudaHostRegister(*args: int) -> object:
            seen.append(resident_bytes() - before)
            return cudart.cudaHostRegister(*args)

    device = cuda.CudaDevice()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "cudart", lambda: Watched)
            device.pinning.pin(slab)
        device.pinning.unpin(slab)
    finally:
        device.close()
    assert seen[0] >= MANY_THREADS_BYTES
    assert not slab.any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
