"""Laws of time on machines that others use too: tried again, and judged only where time is kept."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

ATTEMPTS = 3
COLD_S = 2e-4  # a small tensor's mean right after a sleep, on a machine whose caches are ours
NAP_S, LATE = 0.01, 1.08  # a quiet machine ends a sleep of 10 ms within 0.4 ms
SLOW = 1.5
COUNT, COUNTED_S = 2_000_000, 0.1  # what a core of today's servers takes to count, at most

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


def law_of_time(law: Law) -> Law:
    """Try a law again when it was `Late`, since other processes only ever slow it down. Late each
    time, it has failed where the machine is quiet, and is skipped, with the reason, where it is
    not. No other test runs beside it.
    """

    @functools.wraps(law)
    def judged(*args: object, **kwargs: object) -> None:
        for attempt in range(ATTEMPTS):
            try:
                law(*args, **kwargs)
            except Late:
                if attempt + 1 < ATTEMPTS:
                    continue
                if (reason := busy()) is not None:
                    pytest.skip(reason)
                raise
            else:
                return

    return pytest.mark.alone(judged)  # type: ignore[return-value]
