"""Compute that is sleep: a model that leaves the cores free, as a GPU does, and takes known time;
and a GPU's stream that is held up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stronghold.plan.machine import Rates


def sleep_on_stream(cycles: int) -> None:
    """Hold up the GPU's current stream for so many cycles. Torch has no public name for it."""
    torch.cuda._sleep(cycles)


class _Sleep(torch.autograd.Function):
    """Passes `x` on; takes `forward_s` in forward and `backward_s` in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingLayer(nn.Module):
    """`numel` parameters; autograd saves the input of each call (and one number)."""

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self._seconds = (forward_s, backward_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Autograd saves the product's operands after the sleep, so that a recomputation, which ends
        # with what is needed, sleeps too.
        x = _Sleep.apply(x, *self._seconds)
        return x * (1.0 + 1e-3 * self.weight[: x.shape[-1]].mean())


class SleepingModel(nn.Module):
    """Layers of (numel, forward_s, backward_s), one after the other; the output is a loss."""

    def __init__(self, layers: Sequence[tuple[int, float, float]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer(*layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of a step, of the longest lane's work in it, and of all lanes' one after another."""

    step_s: float
    bound_s: float
    alone_s: float
    num_early: int


def rates(link_gbps: float, disk_gbps: float = 1.0, **others: float) -> Rates:
    """A machine's whose link, and disk, are as fast either way; what is not said, is fast."""
    fast = {"update_gbps": link_gbps, "memory_gbps": 1e3, "device_gbps": 1e3}
    return Rates(
        fetch_gbps=link_gbps,
        offload_gbps=link_gbps,
        duplex_gbps=2 * link_gbps,
        load_gbps=disk_gbps,
        spill_gbps=disk_gbps,
        io_gbps=2 * disk_gbps,
        **(fast | others),
    )


def timed_steps(engine: Any, x: torch.Tensor, number: int, accumulation: int = 1) -> list[float]:
    """Seconds from the beginning of each step to the beginning of the next, where there is one."""
    stamps = []
    for _ in range(number):
        stamps.append(time.perf_counter())
        for _ in range(accumulation):
            engine.backward(engine(x))
            engine.step()
    stamps.append(time.perf_counter())
    return [end - begun for begun, end in itertools.pairwise(stamps)]
