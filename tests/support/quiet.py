"""Laws of time on machines that others use too: tried again, and judged only where time is kept."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import pytest
import torch

ATTEMPTS = 3
# a small tensor's mean right after a sleep, on a machine whose caches are ours
COLD_S = 2e-4
NAP_S, LATE = 0.01, 1.08  # a quiet machine ends a sleep of 10 ms within 0.4 ms
SLOW = 1.5
OTHERS = 0.1  # of a core
COUNTED_IN_S = 0.05  # the system counts in ticks, on each core
# what a core of today's servers takes to count, at most
COUNT, COUNTED_S = 2_000_000, 0.1

Law = TypeVar("Law", bound=Callable[..., None])


def nap_s() -> float:
    """What a sleep of `NAP_S` takes here and now."""

    def nap() -> float:
        begun = time.perf_counter()
        time.sleep(NAP_S)
        return time.perf_counter() - begun

    return statistics.median(nap() for _ in range(25))


def slowness() -> float:
    """How many times longer than `COUNTED_S` this core counts now; at least 1."""
    begun = time.perf_counter()
    total = 0
    for number in range(COUNT):
        total += number
    return max(1.0, (time.perf_counter() - begun) / COUNTED_S)


def cold_s() -> float:
    """What a small tensor's mean takes right after a sleep."""
    x = torch.ones(1 << 13)

    def mean() -> float:
        time.sleep(NAP_S)
        begun = time.perf_counter()
        x.mean()
        return time.perf_counter() - begun

    return statistics.median(mean() for _ in range(15))


class Late(AssertionError):
    """A law of time does not hold, in this attempt."""


def on_time(holds: bool, message: object) -> None:
    """Part of a law of time that may fail because others use the machine. What does not depend on
    time (bits, bytes) is asserted as everywhere, and fails at once.
    """
    if not holds:
        raise Late(message)


def busy() -> str | None:
    """Why times cannot be judged here and now; None where they can."""
    took_s, slow, cold = nap_s(), slowness(), cold_s()
    if took_s <= LATE * NAP_S and slow <= SLOW and cold <= COLD_S:
        return None
    return (
        f"this machine is too busy to judge times: a sleep of {NAP_S * 1e3:.0f} ms takes "
        f"{took_s * 1e3:.1f}, a small mean after it {cold * 1e3:.2f} ms, and it counts {slow:.1f} "
        "times slower than most"
    )


class OtherProcesses:
    """What others take of this machine's cores from here on, other guests of its host included."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._begun = time.perf_counter(), self._seconds()

    def _seconds(self) -> float:
        """Seconds of all cores that neither this process and its children used, nor were idle."""
        machine, own = psutil.cpu_times(), self._own.cpu_times()
        fields = ("user", "nice", "system", "irq", "softirq", "steal")
        used = sum(float(getattr(machine, field, 0.0)) for field in fields)
        return used - own.user - own.system - own.children_user - own.children_system

    def busy(self) -> str | None:
        """Why times since then cannot be judged; None where they can."""
        begun, others_s = self._begun
        others_s = self._seconds() - others_s - COUNTED_IN_S
        share = others_s / (time.perf_counter() - begun)
        if share <= OTHERS:
            return None
        return f"others used {share:.0%} of a core meanwhile"


def law_of_time(law: Law) -> Law:
    """Try a law again when it was `Late`, since other processes only ever slow it down. Late each
    time, it has failed if the machine was quiet each time. If it was not, the law is skipped, with
    the reason. No other test runs beside it.
    """

    @functools.wraps(law)
    def judged(*args: object, **kwargs: object) -> None:
        reasons = []
        for attempt in range(1, ATTEMPTS + 1):
            others = OtherProcesses()
            try:
                law(*args, **kwargs)
            except Late:
                reasons += filter(None, [others.busy(), busy()])
                if attempt < ATTEMPTS:
                    continue
                if reasons:
                    pytest.skip("; ".join(reasons))
                raise
            else:
                return

    return pytest.mark.alone(judged)  # type: ignore[return-value]
