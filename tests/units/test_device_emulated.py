"""Laws of the emulated device: it is more hostile than CUDA, and keeps its pace."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from stronghold import native
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.threads import THREAD_PREFIX
from stronghold.errors import StateError
from tests.support.pages import in_child
from tests.support.quiet import law_of_time, on_time

WEIRD = (1, 2, 15, 17, 4097)


@pytest.fixture
def emulated() -> Iterator[Callable[..., EmulatedDevice]]:
    devices: list[EmulatedDevice] = []

    def make(**options: object) -> EmulatedDevice:
        devices.append(EmulatedDevice(**options))  # type: ignore[arg-type]
        return devices[-1]

    yield make
    for device in devices:
        device.close()


# -- turns of the interpreter ------------------------------------------------------------------
def test_lanes_take_turns_soon_and_the_programs_interval_comes_back() -> None:
    before = sys.getswitchinterval()
    one, other = EmulatedDevice(), EmulatedDevice()
    assert sys.getswitchinterval() <= 5e-4
    one.close()
    assert sys.getswitchinterval() <= 5e-4
    other.close()
    other.close()
    assert sys.getswitchinterval() == before
    changed = EmulatedDevice()
    sys.setswitchinterval(2 * before)
    changed.close()
    assert sys.getswitchinterval() == 2 * before
    sys.setswitchinterval(before)


@pytest.mark.alone
@law_of_time
def test_a_lane_wakes_within_a_millisecond_beside_pure_python(
    emulated: Callable[..., EmulatedDevice],
) -> None:
    """Tokenising, or collating, in another thread."""
    device, stop, late_s = emulated(), threading.Event(), []

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(100):
            time.sleep(0.002)  # the lane's thread sleeps too
            begun = time.perf_counter()
            device.fetch.submit("wake", lambda b=begun: late_s.append(time.perf_counter() - b))
            device.fetch.finish()
    finally:
        stop.set()
        thread.join()
    on_time(statistics.median(late_s) <= 1e-3, f"median {statistics.median(late_s) * 1e3:.2f} ms")


# -- the emulated device's hostility -----------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", WEIRD)
def test_poison_is_nan_in_every_element(
    emulated: Callable[..., EmulatedDevice], numel: int, dtype: torch.dtype
) -> None:
    device = emulated()
    fresh = device.memory.allocate(numel, dtype, "slot")
    assert fresh.isnan().all()
    whole = torch.zeros(numel + 2, dtype=dtype)
    device.memory.poison(whole[1:-1])
    assert whole[1:-1].isnan().all()
    assert whole[0] == whole[-1] == 0.0
    kept = torch.zeros(numel, dtype=dtype)
    emulated(poison=False).memory.poison(kept)
    assert not kept.isnan().any()


def test_a_copy_into_less_room_is_refused(emulated: Callable[..., EmulatedDevice]) -> None:
    """It would write past the end of somebody else's memory."""
    device = emulated()
    for target, source in (
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(4), torch.zeros(3)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)),
        (torch.zeros(4, 4)[:, 0], torch.zeros(4)),
    ):
        with pytest.raises(StateError, match="a copy of"):
            device.copy(target, source)


@law_of_time
def test_the_link_keeps_its_pace(emulated: Callable[..., EmulatedDevice]) -> None:
    """40 MB at 0.4 GB/s take 0.1 s, never less; a busy machine may take longer, so the best of
    three is bounded from above."""
    device = emulated(link_gbps=0.4)
    source, target = torch.zeros(10_000_000), torch.zeros(10_000_000)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        copy = partial(device.copy, target, source)
        device.fetch.submit("fetch", copy, nbytes=source.nbytes).wait()
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) >= 0.1
    on_time(min(seconds) < 0.15, seconds)


def with_threads(count: int, make: Callable[[], object]) -> tuple[str, list[str]]:
    """What `make` raises where the system grants this process `count` threads more, and the lanes'
    threads that are left then. For a forked child: the user changes, since root has no limit."""
    os.setuid(23456)  # nobody else's: it has this one thread
    resource.setrlimit(resource.RLIMIT_NPROC, (1 + count, 1 + count))
    try:
        make()
    except OSError as error:
        names = [thread.name for thread in threading.enumerate()]
        return str(error), [name for name in names if name.startswith(THREAD_PREFIX)]
    return "", []


may_limit = pytest.mark.skipif(
    os.geteuid() != 0, reason="the system counts all threads of a user, and only root may change it"
)


@may_limit
@pytest.mark.parametrize(
    ("count", "whose"), [(0, "fetch"), (1, "offload"), (2, "gradients"), (3, "update")]
)
def test_a_device_whose_thread_is_refused_says_so_and_leaves_none(count: int, whose: str) -> None:
    said = in_child(lambda: with_threads(count, EmulatedDevice))
    assert f"the {whose} lane: the system refused to start a thread" in said
    assert "ulimit -u" in said
    assert said.endswith(", [])")


@may_limit
def test_a_pool_whose_thread_is_refused_says_so() -> None:
    native.library()
    said = in_child(lambda: with_threads(1, lambda: native.Pool(4)))
    assert "a pool of 4 threads: the system refused to start a thread" in said
