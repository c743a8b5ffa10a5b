"""The simulated machine's memory is spent once, whoever was submitted first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stronghold.plan.machine import Rates
from stronghold.predict.simulated_device import SimulatedDevice, SimulatedFence
from tests.support.sleeping import rates as rates_of

GB = 10**9
RATES = rates_of(25.0, update_gbps=57.0, memory_gbps=60.0, device_gbps=900.0, handover_s=0.0)


def nothing() -> None:
    """Bytes are moved by the clock alone."""


def ends_of(order: str, rates: Rates = RATES) -> dict[str, float]:
    """When each lane's last operation ends; in `order`: u(pdate), f(etch), d(rain), 1 GB each."""
    device = SimulatedDevice(rates, asynchronous=True)
    lanes = {"u": device.update, "f": device.fetch, "d": device.offload}
    fences = {lane: lanes[lane].submit("move", nothing, nbytes=GB) for lane in order}
    return {
        lane: fence.done_s for lane, fence in fences.items() if isinstance(fence, SimulatedFence)
    }


@pytest.mark.parametrize("order", ["uuuuff", "ffuuuu", "ufuufu", "uuuufd", "fduuuu"])
def test_no_byte_of_host_memory_is_spent_twice(order: str) -> None:
    ends = ends_of(order)
    transferred = len(order) - order.count("u")
    assert ends["u"] >= len(order) * GB / (RATES.memory_gbps * 1e9) - 1e-9
    assert ends["f"] <= transferred * GB / (RATES.fetch_gbps * 1e9) + 1e-9


def test_updates_that_nothing_overlaps_are_as_fast_as_alone() -> None:
    device = SimulatedDevice(RATES, asynchronous=True)
    first = device.update.submit("update 0", nothing, nbytes=GB)
    later = device.fetch.submit("fetch 0", nothing, (first,), nbytes=GB)
    assert isinstance(first, SimulatedFence)
    assert isinstance(later, SimulatedFence)
    assert first.done_s == pytest.approx(1 / 57)
    assert later.done_s == pytest.approx(1 / 57 + 1 / 25)


def test_an_end_that_was_waited_for_does_not_move() -> None:
    device = SimulatedDevice(RATES, asynchronous=True)
    first, second = (device.update.submit(f"update {i}", nothing, nbytes=GB) for i in range(2))
    first.wait()
    seen_s = first.done_s
    before_s = second.done_s
    device.fetch.submit("fetch 0", nothing, nbytes=GB)
    assert first.done_s == seen_s
    assert second.done_s > before_s
    assert device.operations[-2].end_s == second.done_s


def test_memory_that_has_room_for_all_delays_nobody() -> None:
    ends = ends_of("uuffdd", replace(RATES, memory_gbps=120.0))
    assert ends == pytest.approx({"u": 2 / 57, "f": 2 / 25, "d": 2 / 25})
