"""Laws of the NVMe store: right bytes from any number of disks, the ring that the plan names, and
wrong calls."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.pinned import HostPinning
from stronghold.errors import StateError
from stronghold.memory import nvme
from stronghold.memory.staging import open_ring
from tests.support.pages import ENGINES, PAGE
from tests.support.stores import descriptors, memory, pages, store_of

MIB = 1 << 20


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- Bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [[1.0], [1.0, 1.0], [5.0, 2.0, 1.0]])
def test_ranges_come_back_as_they_were_written(
    rates: list[float], engine: str, folders: list[Path]
) -> None:
    chance = random.Random(len(rates))
    sizes = {"exp_avg": 97, "low": 1, "weights": 15, "exp_avg_sq": 0, "gradients": 41}
    requests = [pages(count, array, layer) for layer in range(3) for array, count in sizes.items()]
    source, target = memory(97, seed=1), memory(97)
    with store_of(folders[: len(rates)], *requests, rates=rates, engine=engine) as store:
        extents = [store.extent(request.layer, request.array) for request in requests]
        oracles = {extent: bytearray(extent.nbytes) for extent in extents}
        for _ in range(400):
            extent = chance.choice(extents)
            first = chance.randrange(extent.nbytes // PAGE + 1)
            count = chance.randint(0, extent.nbytes // PAGE - first)
            begin, nbytes, at = (
                first * PAGE,
                count * PAGE,
                chance.randrange(97 - count + 1) * PAGE,
            )
            if chance.random() < 0.5:
                written = source[at : at + nbytes]
                oracles[extent][begin : begin + nbytes] = written.numpy().tobytes()
                store.submit("write", extent, begin, written).wait()
            else:
                store.submit("read", extent, begin, target[at : at + nbytes]).wait()
                read = target[at : at + nbytes].numpy().tobytes()
                assert read == oracles[extent][begin : begin + nbytes]


@pytest.mark.parametrize("num_paths", [1, 3])
def test_what_was_never_written_is_zero(num_paths: int, engine: str, folders: list[Path]) -> None:
    """Also where an earlier run's bytes lay."""
    for turn in range(2):
        with store_of(folders[:num_paths], pages(300), engine=engine) as store:
            extent, target = store.extent(0, "exp_avg"), memory(300)
            store.submit("write", extent, 100 * PAGE, memory(3, seed=turn)).wait()
            store.submit("read", extent, 0, target).wait()
            assert not target[: 100 * PAGE].any()
            assert not target[103 * PAGE :].any()
            store.submit("write", extent, 0, memory(300, seed=9)).wait()


def test_transfers_in_flight_keep_their_memory(engine: str, folders: list[Path]) -> None:
    with store_of(folders[:1], pages(64), engine=engine) as store:
        extent, target = store.extent(0, "exp_avg"), memory(64)
        alive = weakref.ref(target)
        pending = store.submit("read", extent, 0, target)
        del target
        gc.collect()
        assert alive() is pending.memory
        del pending  # never waited for: close does
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


def test_reads_and_writes_run_beside_each_other(engine: str, folders: list[Path]) -> None:
    failures: list[BaseException] = []
    with store_of(folders[:2], pages(64), pages(64, "low"), engine=engine) as store:
        one, other = store.extent(0, "exp_avg"), store.extent(0, "low")
        original = memory(64, seed=3)
        store.submit("write", one, 0, original).wait()

        def read() -> None:
            try:
                for _ in range(50):
                    target = memory(64)
                    store.submit("read", one, 0, target).wait()
                    assert torch.equal(target, original)
            except BaseException as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for seed in range(50):
            store.submit("write", other, 0, memory(64, seed=seed)).wait()
        reader.join()
        last = memory(64)
        store.submit("read", other, 0, last).wait()
        assert torch.equal(last, memory(64, seed=49))
        assert (store.bytes_read, store.bytes_written) == (51 * 64 * PAGE, 51 * 64 * PAGE)
    assert failures == []


def test_files_are_as_large_as_their_rates(folders: list[Path]) -> None:
    with store_of(folders[:2], pages(400), rates=[3.0, 1.0]) as store:
        sizes = [
            {os.stat(descriptor).st_size for descriptor in descriptors(folder)}
            for folder in folders[:2]
        ]
        assert store.file_bytes == 400 * PAGE
    assert sizes == [{300 * PAGE}, {100 * PAGE}]


def test_several_paths_are_measured(folders: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stronghold"):
        store = store_of(folders[:2], pages(4), rates=None)
    with store:
        assert len(store.rates) == 2
        assert all(rate > 0 for rate in store.rates)
    assert len([r for r in caplog.records if "GB/s" in r.message]) == 2
    assert nvme.measure_rate(folders[0], depth=4, block_bytes=MIB) > 0
    assert list(folders[0].iterdir()) == []


# ---- The ring ---------------------------------------------------------------------------------


def test_the_ring_is_what_was_asked_for(folders: list[Path]) -> None:
    with ExitStack() as undo:
        ring = open_ring(5, 3 * PAGE, undo)
        assert (ring.nbytes, len(ring.entries)) == (15 * PAGE, 5)
        for index, entry in enumerate(ring.entries):
            assert entry.data_ptr() % PAGE == 0
            assert entry.nbytes == 3 * PAGE
            entry.fill_(index)
        sums = [int(entry.sum()) for entry in ring.entries]
        assert sums == [3 * PAGE * index for index in range(5)]
        assert ring.memory.untyped_storage().nbytes() == ring.nbytes, "one slab, exact size"
        store = undo.enter_context(store_of(folders[:1], pages(64), staging=ring.memory))
        extent = store.extent(0, "exp_avg")
        store.submit("write", extent, 3 * PAGE, ring.entries[4]).wait()
        store.submit("read", extent, 3 * PAGE, ring.entries[0].view(torch.float32)).wait()
        assert bool((ring.entries[0] == 4).all())


def test_the_kernel_knows_the_ring(folders: list[Path], engine: str) -> None:
    staging = memory(32)
    with store_of(folders[:2], pages(64), engine=engine, staging=staging) as store:
        assert store.registered == (engine == "io_uring")


def test_a_device_pins_the_ring_until_it_is_closed() -> None:
    class Pinning(HostPinning):
        def __init__(self) -> None:
            self.pinned: dict[int, int] = {}

        def pin(self, tensor: torch.Tensor) -> None:
            self.pinned[tensor.data_ptr()] = tensor.nbytes

        def unpin(self, tensor: torch.Tensor) -> None:
            del self.pinned[tensor.data_ptr()]

    device = EmulatedDevice()
    device.pinning = pinning = Pinning()
    with ExitStack() as undo:
        ring = open_ring(2, PAGE, undo, device=device)
        assert pinning.pinned == {ring.memory.data_ptr(): 2 * PAGE}
    assert pinning.pinned == {}
    device.close()


@pytest.mark.parametrize("ring", [(-1, PAGE), (2, 0), (2, PAGE + 512)])
def test_a_ring_that_cannot_be_is_refused(ring: tuple[int, int]) -> None:
    with ExitStack() as undo, pytest.raises(StateError, match="ring"):
        open_ring(*ring, undo)


# ---- Wrong calls ------------------------------------------------------------------------------


def test_ranges_are_whole_pages_inside_their_extent(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(8), pages(8, "low")) as store:
        extent, eight = store.extent(0, "exp_avg"), memory(9)
        wrong = [
            (0, eight),  # longer than the extent
            (PAGE, eight[: 8 * PAGE]),
            (-PAGE, eight[:PAGE]),
            (512, eight[:PAGE]),
            (0, eight[:512]),
            (0, eight[512 : 512 + PAGE]),
            (0, eight[: 2 * PAGE : 2]),
        ]
        for begin, target in wrong:
            for verb in ("read", "write"):
                with pytest.raises(StateError, match="exp_avg of layer 0"):
                    store.submit(verb, extent, begin, target)
        assert (store.bytes_read, store.bytes_written) == (0, 0)


def test_what_has_no_extent_is_not_found(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(8)) as store:
        assert store.extent(0, "exp_avg").nbytes == 8 * PAGE
        for layer, array in ((1, "exp_avg"), (0, "low")):
            with pytest.raises(StateError, match=f"{array} of layer {layer} is not spilled"):
                store.extent(layer, array)


def test_a_closed_store_says_so(folders: list[Path]) -> None:
    store = store_of(folders[:1], pages(8))
    extent = store.extent(0, "exp_avg")
    store.close()
    store.close()
    with pytest.raises(StateError, match="closed"):
        store.submit("read", extent, 0, memory(1)).wait()


def test_nothing_is_left_after_close_or_a_dropped_store(engine: str, folders: list[Path]) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    store_of(folders[:2], pages(8), engine=engine).close()
    before = count()
    for turn in range(4):
        store = store_of(folders[:2], pages(8), engine=engine)
        store.submit("write", store.extent(0, "exp_avg"), 0, memory(8))
        if turn % 2:
            store.close()
        del store
        gc.collect()
        assert count() == before
        assert [list(folder.iterdir()) for folder in folders] == [[], [], []]


def test_a_store_may_be_smaller_than_its_paths(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Files without a byte, no extent at all, no ring."""
    for extents in ([], [pages(0)], [pages(1)]):
        with store_of(folders, *extents, staging=memory(0)) as store:
            assert store.file_bytes == sum(extent.nbytes for extent in extents)
            for request in extents:
                target = memory(request.nbytes // PAGE)
                store.submit("read", store.extent(0, "exp_avg"), 0, target).wait()
                assert not target.any()
    assert caplog.records == []


def test_files_have_no_names(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(8)):
        assert list(folders[0].iterdir()) == []
        assert len(descriptors(folders[0])) == 3
