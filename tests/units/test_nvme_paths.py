"""Laws of the NVMe store's disks: paths, space and faults, and errors that say what, where and what
to do."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from stronghold.distributed.process_groups import NodeRanks, SilentGroup
from stronghold.errors import BudgetError, ConfigError, format_size
from stronghold.memory import nvme
from stronghold.memory.nvme import NvmeStore, SpillFile
from stronghold.memory.stores import Extent
from tests.support.pages import ENGINES, PAGE, in_child, mounted, refuse_io_uring
from tests.support.stores import descriptors, memory, pages, redirect, store_of


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    with mounted(tmp_path_factory.mktemp("small"), "-t", "tmpfs", "-o", "size=1m", "none") as path:
        yield path


# ---- Paths and space --------------------------------------------------------------------------


def refused(paths: list[Path], *extents: Extent, **options: object) -> ConfigError:
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


def test_a_disk_too_small_is_refused_with_the_figures(
    small_disk: Path, folders: list[Path]
) -> None:
    free = nvme.free_bytes(small_disk)
    error = refused([folders[0], small_disk], pages(1024), rates=[1.0, 1.0])
    assert isinstance(error, BudgetError)
    for part in (
        str(small_disk),
        format_size(512 * PAGE),
        format_size(free),
        "stronghold.host_memory",
    ):
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
    assert f'"{both[0]}", "{both[1]}" needs {format_size(300 * PAGE, round_up=True)}' in str(error)


def test_a_disk_that_fills_while_the_store_opens_is_a_budget_error(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may take the room between the check and the reservation."""
    monkeypatch.setattr(nvme, "check_space", lambda _: None)
    error = refused([small_disk], pages(1024))
    assert isinstance(error, BudgetError)
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC
    assert [path for path in small_disk.iterdir() if path.name.startswith("stronghold")] == []


def test_the_room_is_for_all_processes_of_the_node(small_disk: Path) -> None:
    both = NodeRanks(SilentGroup(2), [0, 1])  # what one says, the other says
    half = nvme.free_bytes(small_disk) // PAGE // 2
    error = refused([small_disk], pages(half + 1), neighbours=both)
    assert isinstance(error, BudgetError)
    assert error.need_bytes == (half + 1) * 2 * PAGE
    with store_of([small_disk], pages(half), neighbours=both) as store:
        assert store.file_bytes == half * PAGE


def test_a_file_system_without_direct_transfers_works_with_a_warning(
    small_disk: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stronghold"):
        store = store_of([small_disk], pages(20), engine=engine)
    (record,) = caplog.records
    assert "no O_DIRECT" in record.message
    assert str(small_disk) in record.message
    with store:
        extent, written, read = (store.extent(0, "exp_avg"), memory(20, seed=1), memory(20))
        store.submit("write", extent, 0, written).wait()
        store.submit("read", extent, 0, read).wait()
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
            store.submit("write", store.extent(0, "exp_avg"), 0, memory(1)).wait()
        with closing(SpillFile(folders[0], PAGE, depth=1, block_bytes=PAGE, engine=None)) as file:
            return f"{caught.value} | {file.engine}"

    answer = in_child(stores)
    assert answer.startswith('stronghold.nvme.engine: got "io_uring", which the kernel refuses')
    assert answer.endswith("| threads (io_uring_setup: Operation not permitted)")
    assert list(folders[0].iterdir()) == []


# ---- Faults during the run --------------------------------------------------------------------


def failure(store: NvmeStore, verb: str, extent: Extent, count: int) -> OSError:
    """The error of a transfer of the first `count` pages; the store lives on."""
    target = memory(count)
    alive = weakref.ref(target)
    with pytest.raises(OSError) as caught:
        store.submit(verb, extent, 0, target).wait()
    error = caught.value.with_traceback(None)
    del target, caught
    gc.collect()
    assert alive() is None, "the store keeps the memory of a transfer that has ended"
    return error


@pytest.mark.sampled(3)
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("left", [0, 5 * PAGE + 100, 199 * PAGE])
def test_a_truncated_file_is_an_error_at_the_next_transfer(
    verb: str, left: int, folders: list[Path], engine: str
) -> None:
    """Also at a write: one that lengthens the file again would turn what was lost into zeros."""
    with store_of(folders[:2], pages(400), engine=engine) as store:
        extent = store.extent(0, "exp_avg")
        store.submit("write", extent, 0, memory(400, seed=1)).wait()
        os.truncate(descriptors(folders[1])[0], left)
        for _ in range(2):
            error = failure(store, verb, extent, 400)
            assert error.errno == errno.ENODATA
            assert str(folders[1]) in str(error)
            assert f"to {left} of {200 * PAGE} bytes" in str(error)
            assert re.search(rf"{verb} of \d+ bytes at offset \d+", str(error))
        read = memory(1)
        store.submit("read", extent, 0, read).wait()  # of the other disk
        assert torch.equal(read, memory(400, seed=1)[:PAGE])


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_input_output_error_names_file_offset_and_length(
    verb: str, engine: str, folders: list[Path]
) -> None:
    """/proc/self/mem gives EIO for pages that are not mapped, as those at address 0."""
    with store_of(folders[:1], pages(8), engine=engine) as store:
        extent = store.extent(0, "exp_avg")
        files = descriptors(folders[0])
        redirect(files, "/proc/self/mem", "read", "write")
        error = failure(store, verb, extent, 8)
        assert error.errno == errno.EIO
        assert re.search(
            rf"{verb} of {4 * PAGE} bytes at offset 0 \(in a {verb} of {8 * PAGE} ", str(error)
        )
        assert f"{folders[0]}/stronghold-spill-" in str(error)
        assert (store.bytes_read, store.bytes_written) == (0, 0)
        redirect(files, files[0], "read", "write")
        store.submit("read", extent, 0, memory(8)).wait()


def test_a_disk_that_cannot_reserve_fills_with_an_error(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """ext2 has no fallocate: files are sparse, others may take the room, and zeros are zeros."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.touch()
    os.truncate(image, 4 << 20)
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
            store.submit("read", extent, 0, target).wait()
            assert not target.any()
            (path / "other").write_bytes(bytes(nvme.free_bytes(path) - 100 * PAGE))
            error = failure(store, "write", extent, 256)
            assert error.errno == errno.ENOSPC
            assert re.search(r"write of \d+ bytes at offset \d+", str(error))
            assert str(path) in str(error)
        gc.collect()
