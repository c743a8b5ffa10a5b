"""Laws of the NVMe store: right bytes from any number of disks, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from stronghold.memory import nvme
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


def test_several_paths_are_measured(folders: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stronghold"):
        store = store_of(folders[:2], pages(4), rates=None)
    with store:
        assert len(store.rates) == 2
        assert all(rate > 0 for rate in store.rates)
    assert len([r for r in caplog.records if "GB/s" in r.message]) == 2
    assert nvme.measure_rate(folders[0], depth=4, block_bytes=MIB) > 0
    assert list(folders[0].iterdir()) == []


# ---- What is left -----------------------------------------------------------------------------


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


def test_files_have_no_names(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(8)):
        assert list(folders[0].iterdir()) == []
        assert len(descriptors(folders[0])) == 3
