"""Laws of the NVMe store: right bytes from any number of disks, the ring that the plan names, and
errors that say what, where and what to do."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stronghold.device.emulated import EmulatedDevice
from stronghold.errors import BudgetError, ConfigError, StateError
from stronghold.memory import disks
from stronghold.memory.extents import Extent, ExtentRequest
from stronghold.memory.neighbours import Neighbours
from stronghold.memory.nvme import NvmeStore
from stronghold.memory.slab import map_slab
from tests.pages import ENGINES, PAGE, in_child, mounted, refuse_io_uring

MIB = 1 << 20


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("a", "b", "c")]
    for folder in made:
        folder.mkdir()
    return made


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    with mounted(tmp_path_factory.mktemp("small"), "-t", "tmpfs", "-o", "size=1m", "none") as path:
        yield path


def pages(count: int, array: str = "exp_avg", layer: int = 0) -> ExtentRequest:
    return ExtentRequest(layer=layer, array=array, nbytes=count * PAGE)


def store_of(paths: list[Path], *extents: ExtentRequest, **options: object) -> NvmeStore:
    arguments: dict[str, object] = {
        "ring_entries": 2,
        "piece_bytes": 16 * PAGE,
        "rates": [1.0] * len(paths),
        "block_bytes": 4 * PAGE,
        "depth": 4,
        **options,
    }
    return NvmeStore(paths, extents=extents, **arguments)  # type: ignore[arg-type]


def memory(count: int, seed: int | None = None) -> torch.Tensor:
    """Page-aligned bytes: random ones, or all 0xA5."""
    made = map_slab(count * PAGE, torch.uint8)
    if seed is None:
        return made.fill_(0xA5)
    generator = torch.Generator().manual_seed(seed)
    return made.random_(0, 256, generator=generator)


def descriptors(folder: Path) -> list[str]:
    """This process's open files under `folder`, as paths of /proc."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(f"{folder}/") and "spill" in os.readlink(link):
                found.append(str(link))
        except OSError:
            continue
    return found


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
            begin, nbytes, at = first * PAGE, count * PAGE, chance.randrange(97 - count + 1) * PAGE
            if chance.random() < 0.5:
                written = source[at : at + nbytes]
                oracles[extent][begin : begin + nbytes] = written.numpy().tobytes()
                store.write_from(extent, begin, written)
            else:
                store.read_into(extent, begin, target[at : at + nbytes])
                read = target[at : at + nbytes].numpy().tobytes()
                assert read == oracles[extent][begin : begin + nbytes]


@pytest.mark.parametrize("num_paths", [1, 3])
def test_what_was_never_written_is_zero(num_paths: int, engine: str, folders: list[Path]) -> None:
    """Also where an earlier run's bytes lay."""
    for turn in range(2):
        with store_of(folders[:num_paths], pages(300), engine=engine) as store:
            extent, target = store.extent(0, "exp_avg"), memory(300)
            store.write_from(extent, 100 * PAGE, memory(3, seed=turn))
            store.read_into(extent, 0, target)
            assert not target[: 100 * PAGE].any()
            assert not target[103 * PAGE :].any()
            store.write_from(extent, 0, memory(300, seed=9))


def test_transfers_in_flight_keep_their_memory(engine: str, folders: list[Path]) -> None:
    with store_of(folders[:1], pages(64), engine=engine) as store:
        extent, target = store.extent(0, "exp_avg"), memory(64)
        alive = weakref.ref(target)
        pending = store.submit_read(extent, 0, target)
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
        store.write_from(one, 0, original)

        def read() -> None:
            try:
                for _ in range(50):
                    target = memory(64)
                    store.read_into(one, 0, target)
                    assert torch.equal(target, original)
            except BaseException as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for seed in range(50):
            store.write_from(other, 0, memory(64, seed=seed))
        reader.join()
        last = memory(64)
        store.read_into(other, 0, last)
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
    rate = disks.measure_rate(folders[0], depth=4, block_bytes=MIB)
    assert rate.both_gbps < min(rate.read_gbps, rate.write_gbps)
    assert list(folders[0].iterdir()) == []


# ---- The ring ---------------------------------------------------------------------------------


def test_the_ring_is_what_was_asked_for(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(64), ring_entries=5, piece_bytes=3 * PAGE) as store:
        assert store.ring_bytes == 15 * PAGE
        entries = [store.entry(index) for index in range(5)]
        for index, entry in enumerate(entries):
            assert entry.data_ptr() % PAGE == 0
            assert entry.nbytes == 3 * PAGE
            entry.fill_(index)
        assert [int(entry.sum()) for entry in entries] == [3 * PAGE * index for index in range(5)]
        assert entries[0].untyped_storage().nbytes() == store.ring_bytes, "one slab, exact size"
        halves = store.entry(2, torch.bfloat16)
        assert (halves.numel(), halves.data_ptr()) == (3 * PAGE // 2, entries[2].data_ptr())
        for index in (-1, 5):
            with pytest.raises(StateError, match="there are 5"):
                store.entry(index)
        extent = store.extent(0, "exp_avg")
        store.write_from(extent, 3 * PAGE, store.entry(4))
        store.read_into(extent, 3 * PAGE, store.entry(0, torch.float32))
        assert bool((entries[0] == 4).all())


def test_the_kernel_knows_the_ring(folders: list[Path], engine: str) -> None:
    with store_of(folders[:2], pages(64), engine=engine) as store:
        assert store.registered == (engine == "io_uring")


def test_a_device_pins_the_ring_as_long_as_it_lives(folders: list[Path]) -> None:
    class Pinning(EmulatedDevice):
        pinned: dict[int, int]

        def pin(self, tensor: torch.Tensor) -> None:
            self.pinned[tensor.data_ptr()] = tensor.nbytes

        def unpin(self, tensor: torch.Tensor) -> None:
            del self.pinned[tensor.data_ptr()]

    device = Pinning()
    device.pinned = {}
    with store_of(folders[:1], pages(1), device=device) as store:
        assert device.pinned == {store.entry(0).data_ptr(): store.ring_bytes}

        def close_in_child() -> int:
            store.close()
            return len(device.pinned)

        assert in_child(close_in_child) == "1", "the parent's memory is not the child's to unpin"
    assert device.pinned == {}
    device.close()


@pytest.mark.parametrize("ring", [(-1, PAGE), (2, 0), (2, PAGE + 512)])
def test_a_ring_that_cannot_be_is_refused(ring: tuple[int, int], folders: list[Path]) -> None:
    with pytest.raises(StateError, match="ring"):
        store_of(folders[:1], pages(1), ring_entries=ring[0], piece_bytes=ring[1])


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
            for call in (store.submit_read, store.submit_write):
                with pytest.raises(StateError, match="exp_avg of layer 0"):
                    call(extent, begin, target)
        assert (store.bytes_read, store.bytes_written) == (0, 0)


def test_what_has_no_extent_is_not_found(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(8)) as store:
        assert store.holds(0, "exp_avg")
        for layer, array in ((1, "exp_avg"), (0, "low")):
            assert not store.holds(layer, array)
            with pytest.raises(StateError, match=f"{array} of layer {layer} is not spilled"):
                store.extent(layer, array)


def test_a_closed_store_says_so(folders: list[Path]) -> None:
    store = store_of(folders[:1], pages(8))
    extent = store.extent(0, "exp_avg")
    store.close()
    store.close()
    with pytest.raises(StateError, match="closed"):
        store.read_into(extent, 0, memory(1))


def test_nothing_is_left_after_close_or_a_dropped_store(engine: str, folders: list[Path]) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    store_of(folders[:2], pages(8), engine=engine).close()
    before = count()
    for turn in range(4):
        store = store_of(folders[:2], pages(8), engine=engine)
        store.submit_write(store.extent(0, "exp_avg"), 0, memory(8))
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
        with store_of(folders, *extents, ring_entries=0) as store:
            assert (store.ring_bytes, store.file_bytes) == (0, sum(e.nbytes for e in extents))
            for request in extents:
                target = memory(request.nbytes // PAGE)
                store.read_into(store.extent(0, "exp_avg"), 0, target)
                assert not target.any()
    assert caplog.records == []


def test_files_have_no_names(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(8)):
        assert [path.name for path in folders[0].rglob("*") if path.is_file()] == ["owner.json"]
        assert len(descriptors(folders[0])) == 3


# ---- Paths and space --------------------------------------------------------------------------


def refused(paths: list[Path], *extents: ExtentRequest, **options: object) -> ConfigError:
    """The refusal of a store, which leaves nothing behind."""
    before = descriptors(paths[0]) if paths else []
    with pytest.raises(ConfigError) as caught:
        store_of(paths, *extents, **options)
    assert (descriptors(paths[0]) if paths else []) == before
    return caught.value


def test_a_path_that_cannot_be_used_is_refused(folders: list[Path]) -> None:
    (folders[0] / "file").touch()
    error = refused([folders[0] / "nowhere"], pages(1))
    assert str(error).startswith(f'stronghold.nvme.path: "{folders[0]}/nowhere" does not exist')
    assert "is not a directory" in str(refused([folders[0] / "file"], pages(1)))
    assert "got no path" in str(refused([], pages(1)))
    assert "one directory twice" in str(refused([folders[1], folders[1] / ".." / "b"], pages(1)))
    assert "rates: got 1" in str(refused(folders, pages(1), rates=[1.0]))
    assert list(folders[1].iterdir()) == []


def test_a_read_only_path_is_refused(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        error = refused([small_disk], pages(1))
        assert str(error).startswith(f'stronghold.nvme.path: "{small_disk}" cannot be written')
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_a_disk_too_small_is_refused_with_the_figures(
    small_disk: Path, folders: list[Path]
) -> None:
    free = disks.free_bytes(small_disk)
    error = refused([folders[0], small_disk], pages(1024), rates=[1.0, 1.0])
    assert isinstance(error, BudgetError)
    for part in (str(small_disk), str(512 * PAGE), str(free), "stronghold.host_memory"):
        assert part in str(error)
    assert [list(folder.iterdir()) for folder in (folders[0], small_disk)] == [[], []]
    with store_of([small_disk], pages(64)):  # less than the free space: fits
        pass
    # Measuring needs room as well.
    assert isinstance(refused([folders[0], small_disk], pages(4), rates=None), BudgetError)


def test_paths_on_one_disk_are_added_up(small_disk: Path) -> None:
    both = [small_disk / "a", small_disk / "b"]
    for folder in both:
        folder.mkdir()
    error = refused(both, pages(300))
    assert isinstance(error, BudgetError)
    assert f'"{both[0]}", "{both[1]}" needs {300 * PAGE}' in str(error)


def test_a_disk_that_fills_while_the_store_opens_is_a_budget_error(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may take the room between the check and the reservation."""
    monkeypatch.setattr(disks, "check_space", lambda _: None)
    error = refused([small_disk], pages(1024))
    assert isinstance(error, BudgetError)
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC
    assert [path for path in small_disk.iterdir() if path.name.startswith("stronghold")] == []


class Twins:
    """Two processes of a node that do the same: what one says, the other says."""

    def of_node(self, mine: object) -> list[object]:
        return [mine, mine]

    of_all = of_node

    def barrier(self) -> None:
        """Both are here."""


def test_capacity_and_room_are_for_all_processes_of_the_node(
    small_disk: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Neighbours(index=0, count=2, rank=0, exchange=Twins())
    error = refused(folders[:1], pages(6), capacity_bytes=10 * PAGE, neighbours=both)
    assert isinstance(error, BudgetError)
    assert str(12 * PAGE) in str(error)
    half = disks.free_bytes(small_disk) // PAGE // 2
    error = refused([small_disk], pages(half + 1), neighbours=both)
    assert isinstance(error, BudgetError)
    assert str((half + 1) * 2 * PAGE) in str(error)
    with store_of([small_disk], pages(half), neighbours=both) as store:
        assert store.file_bytes == half * PAGE


def test_only_the_first_process_looks_at_the_disks(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds, the others take: rates, and what is wrong."""
    said: list[object] = []

    class Second(Twins):
        def of_node(self, mine: object) -> list[object]:
            return [said.pop(0) if said else mine, mine]

        of_all = of_node

    second = Neighbours(index=1, count=2, rank=5, exchange=Second())
    monkeypatch.setattr(disks, "measure_rate", lambda *_: pytest.fail("measured"))
    said += [None, (3.0, 1.0)]
    with store_of(folders[:2], pages(8), rates=None, neighbours=second) as store:
        assert store.rates == (3.0, 1.0)
    said.append((4, "BudgetError", "too small"))
    error = refused(folders[:1], pages(8), neighbours=second)
    assert isinstance(error, BudgetError)
    assert str(error) == "rank 4: too small"


def test_the_capacity_bounds_all_files(folders: list[Path]) -> None:
    with store_of(folders[:2], pages(10), capacity_bytes=10 * PAGE):
        pass
    error = refused(folders[:2], pages(11), capacity_bytes=10 * PAGE)
    assert isinstance(error, BudgetError)
    for part in ("stronghold.nvme.capacity", str(11 * PAGE), str(10 * PAGE)):
        assert part in str(error)


def test_a_file_system_without_direct_transfers_works_with_a_warning(
    small_disk: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stronghold"):
        store = store_of([small_disk], pages(20), engine=engine)
    (record,) = caplog.records
    assert "no O_DIRECT" in record.message
    assert str(small_disk) in record.message
    with store:
        extent, written, read = store.extent(0, "exp_avg"), memory(20, seed=1), memory(20)
        store.write_from(extent, 0, written)
        store.read_into(extent, 0, read)
        assert torch.equal(read, written)


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_an_engine_that_the_kernel_refuses_is_named(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRONGHOLD_IO_ENGINE", raising=False)

    def stores() -> object:
        refuse_io_uring(errno.EPERM)
        with pytest.raises(ConfigError) as caught:
            store_of(folders[:1], pages(1), engine="io_uring")
        with pytest.raises(ConfigError, match=r"stronghold\.nvme\.engine"):
            store_of(folders[:2], pages(1), engine="io_uring", rates=None)
        with store_of(folders[:1], pages(1)) as store:
            store.write_from(store.extent(0, "exp_avg"), 0, memory(1))
            return f"{caught.value} | {store._files[0].engine}"

    answer = in_child(stores)
    assert answer.startswith('stronghold.nvme.engine: got "io_uring", which the kernel refuses')
    assert answer.endswith("| threads (io_uring_setup: Operation not permitted)")
    assert list(folders[0].iterdir()) == []


# ---- Faults during the run --------------------------------------------------------------------


def failure(store: NvmeStore, verb: str, extent: Extent, count: int) -> OSError:
    """The error of a transfer of the first `count` pages; the store lives on."""
    call = store.submit_read if verb == "read" else store.submit_write
    with pytest.raises(OSError) as caught:
        call(extent, 0, memory(count)).wait()
    assert store._in_flight == set()
    return caught.value


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("left", [0, 5 * PAGE + 100, 199 * PAGE])
def test_a_truncated_file_is_an_error_at_the_next_transfer(
    verb: str, left: int, folders: list[Path], engine: str
) -> None:
    """Also at a write: one that lengthens the file again would turn what was lost into zeros."""
    with store_of(folders[:2], pages(400), engine=engine) as store:
        extent = store.extent(0, "exp_avg")
        store.write_from(extent, 0, memory(400, seed=1))
        os.truncate(descriptors(folders[1])[0], left)
        for _ in range(2):
            error = failure(store, verb, extent, 400)
            assert error.errno == errno.ENODATA
            assert str(folders[1]) in str(error)
            assert f"to {left} of {200 * PAGE} bytes" in str(error)
            assert re.search(rf"{verb} of \d+ bytes at offset \d+", str(error))
        read = memory(1)
        store.read_into(extent, 0, read)  # of the other disk
        assert torch.equal(read, memory(400, seed=1)[:PAGE])


def test_a_file_truncated_under_a_read_is_an_error(folders: list[Path], engine: str) -> None:
    with store_of(folders[:1], pages(400), engine=engine) as store:
        file = store._files[0]
        os.truncate(descriptors(folders[0])[0], 10 * PAGE)
        file.nbytes = 0  # as if that came after the store looked
        error = failure(store, "read", store.extent(0, "exp_avg"), 400)
        assert error.errno == errno.ENODATA
        assert str(folders[0]) in str(error)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_input_output_error_names_file_offset_and_length(
    verb: str, engine: str, folders: list[Path]
) -> None:
    """/proc/self/mem gives EIO for pages that are not mapped, as those at address 0."""
    with store_of(folders[:1], pages(8), engine=engine) as store:
        file, extent = store._files[0], store.extent(0, "exp_avg")
        whole = dict(file._sides)
        for side, (queue, _) in whole.items():
            device = queue.open("/proc/self/mem", 1 << 62, create=False, preallocate=False)
            file._sides[side] = (queue, device)
        error = failure(store, verb, extent, 8)
        assert error.errno == errno.EIO
        assert re.search(
            rf"{verb} of {4 * PAGE} bytes at offset 0 \(in a {verb} of {8 * PAGE} ", str(error)
        )
        assert "/proc/self/mem" in str(error)
        assert (store.bytes_read, store.bytes_written) == (0, 0)
        file._sides.update(whole)
        store.read_into(extent, 0, memory(8))


def test_an_error_is_raised_at_every_wait(folders: list[Path]) -> None:
    with store_of(folders[:1], pages(8)) as store:
        extent = store.extent(0, "exp_avg")
        store._files[0].nbytes = 0
        os.truncate(descriptors(folders[0])[0], 0)
        pending = store.submit_read(extent, 0, memory(8))
        for _ in range(2):
            with pytest.raises(OSError, match="read of"):
                pending.wait()
        assert store.bytes_read == 0


def test_a_disk_that_cannot_reserve_fills_with_an_error(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """ext2 has no fallocate: files are sparse, others may take the room, and zeros are zeros."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.touch()
    os.truncate(image, 4 * MIB)
    try:
        subprocess.run(["mkfs.ext2", "-q", "-F", str(image)], check=True)
    except FileNotFoundError:
        pytest.skip("no mkfs.ext2")
    with mounted(mount, "-o", "loop", str(image)) as path:
        with caplog.at_level(logging.WARNING, "stronghold"):
            store = store_of([path], pages(256), engine=engine)
        assert any("cannot reserve space" in record.message for record in caplog.records)
        with store:
            extent, target = store.extent(0, "exp_avg"), memory(256)
            store.read_into(extent, 0, target)
            assert not target.any()
            (path / "other").write_bytes(bytes(disks.free_bytes(path) - 100 * PAGE))
            error = failure(store, "write", extent, 256)
            assert error.errno == errno.ENOSPC
            assert re.search(r"write of \d+ bytes at offset \d+", str(error))
            assert str(path) in str(error)
        gc.collect()
