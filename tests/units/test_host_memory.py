"""Host memory: pages are touched ahead of use, and slabs are registered with a GPU's driver."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.host_memory import FirstTouch, touch_now
from stronghold.errors import BudgetError
from stronghold.native import touch
from stronghold.train.slabs import GROWTH, PAGE_BYTES, PIECE_BYTES, PinnedPool, map_slab
from tests.support.training import config, initialized

NBYTES = (40 << 20) + 12345  # some pieces, and a last page of which a part is used


def has_its_pages(slab: torch.Tensor) -> bool:
    pages = (ctypes.c_ubyte * -(-slab.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    assert mincore(ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(slab.nbytes), pages) == 0
    return all(page & 1 for page in pages)


def test_a_touched_slab_has_its_pages() -> None:
    first_touch = FirstTouch()
    now, soon = (map_slab(NBYTES, torch.uint8) for _ in range(2))
    assert not has_its_pages(now)
    touch_now(now)
    assert has_its_pages(now)
    first_touch.add(soon)
    deadline_s = time.perf_counter() + 60
    while not has_its_pages(soon) and time.perf_counter() < deadline_s:
        time.sleep(0.01)
    first_touch.close()
    assert has_its_pages(soon)
    assert first_touch.nbytes == NBYTES
    assert first_touch.seconds > 0.0
    assert not now.any()
    assert not soon.any()


def test_a_touch_loses_no_write_of_another_thread() -> None:
    """A page's first byte is what a touch reads and writes."""
    slab = map_slab(64 * 4096, torch.uint8)
    numbers = slab.view(torch.int64)[:: 4096 // 8]
    done = threading.Event()

    def touch_on() -> None:
        while not done.is_set():
            touch(slab)

    other = threading.Thread(target=touch_on)
    other.start()
    for _ in range(20_000):
        numbers += 1
    done.set()
    other.join()
    assert (numbers == 20_000).all()
    assert slab.view(torch.int64).sum() == 64 * 20_000


def test_a_closed_one_leaves_no_thread_and_a_refused_thread_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_touch = FirstTouch()
    first_touch.add(map_slab(NBYTES, torch.uint8))
    first_touch.close()
    first_touch.close()
    assert not [each for each in threading.enumerate() if each.name == "stronghold:touch"]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first_touch.add(map_slab(NBYTES, torch.uint8))
    assert first_touch.nbytes == NBYTES  # of the first slab alone
    touch_now(map_slab(NBYTES, torch.uint8))


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
