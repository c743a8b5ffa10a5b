"""Host memory of offloaded activations: bounded by what was taken at once, whatever the sizes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.pinned import HostPinning
from stronghold.errors import BudgetError
from stronghold.memory.slab import GROWTH, PAGE_BYTES, PIECE_BYTES, PinnedPool
from stronghold.plan.cost import LayerWork
from stronghold.plan.plan import make_plan
from tests.support.saved import saved_bytes
from tests.support.training import config, initialized

ROOM = 64 << 20


def bound(most_bytes: int) -> int:
    """What the pool may pin when `most_bytes` were taken at once."""
    return most_bytes + most_bytes // GROWTH + PAGE_BYTES


def test_a_hundred_lengths_leave_the_pool_within_its_bound(device: EmulatedDevice) -> None:
    pool, most = PinnedPool(device, ROOM), 0
    lengths = [17 + 31 * k for k in range(100)]
    random.Random(0).shuffle(lengths)
    for length in lengths:
        sizes = [length * factor for factor in (1, 64, 3, 257)] * 8
        taken = [pool.take(size) for size in sizes]
        addresses = sorted((piece.data_ptr(), piece.nbytes) for piece in taken)
        for (begin, nbytes), (after, _) in pairwise(addresses):
            assert begin + nbytes <= after, "two pieces overlap"
        most = max(most, sum(-(-size // PIECE_BYTES) * PIECE_BYTES for size in sizes))
        for piece in reversed(taken):
            pool.give(piece)
    assert most <= pool.num_bytes <= bound(most)
    pool.close()


def test_what_comes_back_in_any_order_is_taken_again(device: EmulatedDevice) -> None:
    pool, order = PinnedPool(device, ROOM), random.Random(1)
    pieces = [pool.take(4097) for _ in range(50)]
    pinned = pool.num_bytes
    for _ in range(20):
        order.shuffle(pieces)
        for piece in pieces[:25]:
            pool.give(piece)
        pieces[:25] = [pool.take(4097) for _ in range(25)]
    assert pool.num_bytes == pinned
    pool.close()


def test_more_than_the_room_is_refused(device: EmulatedDevice) -> None:
    pool = PinnedPool(device, 3 * PAGE_BYTES)
    kept = pool.take(2 * PAGE_BYTES)
    with pytest.raises(BudgetError, match=r"need 16384 bytes .* 12288 bytes .*host_memory"):
        pool.take(2 * PAGE_BYTES)
    pool.give(kept)
    pool.take(3 * PAGE_BYTES)
    pool.close()


class Counting(HostPinning):
    """Notes the bytes of every registration."""

    def __init__(self) -> None:
        self.registered: list[int] = []

    def pin(self, tensor: torch.Tensor) -> None:
        self.registered.append(tensor.nbytes)
        super().pin(tensor)


def test_what_is_expected_is_pinned_in_one_call() -> None:
    device = EmulatedDevice()
    device.pinning = counting = Counting()
    pool = PinnedPool(device, ROOM, expected_bytes=40 * PAGE_BYTES - 1)
    pieces = [pool.take(PAGE_BYTES) for _ in range(40)]
    assert counting.registered == [40 * PAGE_BYTES]
    pieces.append(pool.take(1))  # more than was expected
    assert counting.registered == [40 * PAGE_BYTES, 5 * PAGE_BYTES]
    pool.close()
    device.close()


@pytest.mark.parametrize("expected", [2 * ROOM, PAGE_BYTES])
def test_what_is_expected_bounds_nothing(device: EmulatedDevice, expected: int) -> None:
    """Neither the room, nor a first piece that is larger."""
    pool = PinnedPool(device, ROOM, expected_bytes=expected)
    assert pool.take(2 * PAGE_BYTES).numel() == 2 * PAGE_BYTES
    assert pool.num_bytes == (ROOM if expected > ROOM else 2 * PAGE_BYTES)
    pool.close()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def engine_of(**section: Any) -> Any:
    torch.manual_seed(0)
    model = Stacked()
    return initialized(model, config(section={"window": 1, "activations": "offload", **section}))


def test_a_hundred_lengths_of_batches_pin_what_the_longest_needs() -> None:
    longest, engine = 512 + 99 * 7, engine_of()
    try:
        for k in [*range(100)]:
            engine.backward(engine(torch.randn(512 + 7 * k, 32)))
            engine.step()
        pinned = engine.memory_report().host_activations
    finally:
        engine.destroy()
    alone = engine_of()
    try:
        alone.backward(alone(torch.randn(longest, 32)))
        alone.step()
        assert pinned <= 1.25 * alone.memory_report().host_activations
    finally:
        alone.destroy()


def test_a_plan_that_knows_what_is_offloaded_pins_it_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the first steps have shown: a refined plan has it."""
    x = torch.randn(512, 32)
    load = LayerWork(
        forward_s=1.0, backward_s=2.0, saved_bytes=saved_bytes(Block(), x), boundary_bytes=x.nbytes
    )
    engine = engine_of(resident_layers=0)
    now, pinned = engine.inspect(), list[int]()
    pin = now.device.pinning.pin

    def noting(slab: torch.Tensor) -> None:
        pinned.append(slab.nbytes)
        pin(slab)

    monkeypatch.setattr(now.device.pinning, "pin", noting)
    try:
        num_calls = []
        for _ in range(2):
            pinned.clear()
            loss = engine(x)
            num_calls.append(len(pinned))
            engine.backward(loss)
            engine.step()
            if len(num_calls) == 1:
                known = replace(now.demand, work=(load,) * len(now.layout.layers))
                assert engine.replan(make_plan(now.layout, known))
        assert num_calls[0] > 1 == num_calls[1]
        assert engine.plan.offloaded_bytes == engine.memory_report().host_activations > 0
    finally:
        engine.destroy()


def test_offloaded_activations_are_part_of_host_memory() -> None:
    engine = engine_of()
    planned = engine.memory_report().host_planned
    engine.destroy()
    engine = engine_of(host_memory=planned + (64 << 10))
    try:
        with pytest.raises(BudgetError, match=r"offloaded activations need .*host_memory"):
            engine(torch.randn(4096, 32))
    finally:
        engine.destroy()
