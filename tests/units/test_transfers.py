"""A transfer waits for what it must, also while another one of its lane runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from stronghold.devices.base import Record
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.lane_name import LaneName
from stronghold.errors import LaneError
from stronghold.memory.tiers import Transfers


class Disk:
    """Notes in what order transfers begin and end; `going` lets all of them end."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.going = threading.Event()

    def begin(self, name: str) -> Callable[[], None]:
        def wait() -> None:
            assert self.going.wait(10)
            self.seen.append(f"end {name}")

        self.seen.append(f"begin {name}")
        return wait


@pytest.mark.parametrize("failing", [False, True])
def test_no_transfer_begins_before_or_behind_what_it_may_not(
    device: EmulatedDevice, failing: bool
) -> None:
    """What it waits for runs still, or has failed: it begins in its turn, or never."""
    disk, transfers, hold, work = (Disk(), Transfers(), threading.Event(), threading.Event())
    record = Record()

    def update() -> None:
        if failing:
            raise ValueError("no")
        work.wait(10)

    device.lane(LaneName.LOAD).submit("hold", lambda: hold.wait(10) and None)
    updated = device.update.submit("update 3", update, writes=(record,))
    if failing:
        with pytest.raises(LaneError, match="update 3"):
            updated.wait()
    first = transfers.submit(device.lane(LaneName.LOAD), "a", lambda: disk.begin("a"), nbytes=1)
    second = transfers.submit(
        device.lane(LaneName.LOAD), "b", lambda: disk.begin("b"), reads=(record,), nbytes=1
    )
    hold.set()
    disk.going.set()
    first.wait()
    assert disk.seen == ["begin a", "end a"]
    work.set()
    if failing:
        with pytest.raises(LaneError, match="update 3"):
            second.wait()
        assert disk.seen == ["begin a", "end a"]
    else:
        second.wait()
        assert disk.seen == ["begin a", "end a", "begin b", "end b"]
