"""Host memory of offloaded activations: bounded by what was taken at once, whatever the sizes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import BudgetError
from stronghold.train.slabs import GROWTH, PAGE_BYTES, PIECE_BYTES, PinnedPool
from tests.support.training import config, initialized

ROOM = 64 << 20


def bound(most_bytes: int) -> int:
    """What the pool may pin when `most_bytes` were taken at once."""
    return most_bytes + most_bytes // GROWTH + PAGE_BYTES


def test_a_hundred_lengths_leave_the_pool_within_its_bound(device: EmulatedDevice) -> None:
    """Pieces come back in any order."""
    pool, most, order = PinnedPool(device, ROOM), 0, random.Random(0)
    lengths = [17 + 31 * k for k in range(100)]
    order.shuffle(lengths)
    for length in lengths:
        sizes = [length * factor for factor in (1, 64, 3, 257)] * 8
        taken = [pool.take(size) for size in sizes]
        addresses = sorted((piece.data_ptr(), piece.nbytes) for piece in taken)
        for (begin, nbytes), (after, _) in pairwise(addresses):
            assert begin + nbytes <= after, "two pieces overlap"
        most = max(most, sum(-(-size // PIECE_BYTES) * PIECE_BYTES for size in sizes))
        order.shuffle(taken)
        for piece in taken:
            pool.give(piece)
    assert most <= pool.num_bytes <= bound(most)
    pool.close()


def test_more_than_the_room_is_refused(device: EmulatedDevice) -> None:
    pool = PinnedPool(device, 3 * PAGE_BYTES)
    kept = pool.take(2 * PAGE_BYTES)
    with pytest.raises(BudgetError, match=r"need 16384 bytes .* 12288 bytes .*host_memory"):
        pool.take(2 * PAGE_BYTES)
    pool.give(kept)
    pool.take(3 * PAGE_BYTES)
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
        assert 0 < pinned <= 1.25 * alone.memory_report().host_activations
    finally:
        alone.destroy()


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
