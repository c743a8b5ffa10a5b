"""The files of `stronghold.train`: right bytes on any number of disks, errors that say where, and
nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.errors import BudgetError, ConfigError
from stronghold.train.files import Files
from stronghold.train.slabs import map_slab
from tests.conftest import lane_threads
from tests.support.pages import PAGE, mounted


def memory(count: int, seed: int | None = None) -> torch.Tensor:
    """Page-aligned bytes: random ones, or all 0xA5."""
    made = map_slab(count * PAGE, torch.uint8)
    if seed is None:
        return made.fill_(0xA5)
    return made.random_(0, 256, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.train.files.BLOCK_BYTES", 2 * PAGE)
    monkeypatch.setattr("stronghold.train.files.UNIT_BYTES", 3 * PAGE)


def descriptors(files: Files) -> list[int]:
    return files._descriptors


def count() -> tuple[int, int]:
    """Open files, and threads of the package."""
    return len(os.listdir("/proc/self/fd")), len(lane_threads())


@pytest.mark.parametrize("num_folders", [1, 2, 3])
def test_bytes_come_back_as_they_were_written(num_folders: int, folders: list[Path]) -> None:
    """By transfers and by mappings, in any order."""
    chance, num_pages = random.Random(num_folders), 97
    source, target = memory(num_pages, seed=1), memory(num_pages)
    expected = torch.zeros(num_pages * PAGE, dtype=torch.uint8)
    files = Files(folders[:num_folders], num_pages * PAGE)
    mapped = files.map(0, num_pages * PAGE)
    for _ in range(300):
        parts = []
        for low in (0, num_pages // 2):  # two parts of one transfer, apart
            first = low + chance.randrange(num_pages // 2)
            size = chance.randrange(low + num_pages // 2 - first) + 1
            parts.append((first * PAGE, slice(low * PAGE, (low + size) * PAGE)))
        way = chance.choice(["write", "read", "write mapped", "read mapped"])
        for begin, place in parts:
            size = place.stop - place.start
            if way == "write mapped":
                mapped[begin : begin + size] = source[place]
            if way == "read mapped":
                assert torch.equal(mapped[begin : begin + size], expected[begin : begin + size])
        if way == "write":
            files.write([(begin, source[place]) for begin, place in parts])
        if way == "read":
            files.read([(begin, target[place]) for begin, place in parts])
        for begin, place in parts:
            size = place.stop - place.start
            if way.startswith("write"):
                expected[begin : begin + size] = source[place]
            if way == "read":
                assert torch.equal(target[place], expected[begin : begin + size])
    files.close()
    assert torch.equal(mapped, expected)


def test_all_disks_have_a_part_of_a_long_transfer(folders: list[Path]) -> None:
    files = Files(folders[:3], 90 * PAGE)
    files.write([(0, memory(90, seed=1))])
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors(files)]
    assert sizes == [30 * PAGE] * 3
    for descriptor in descriptors(files):
        read = memory(30)
        assert os.preadv(descriptor, [memoryview(read.numpy())], 0) == 30 * PAGE
        assert all(page.any() for page in read.split(PAGE))
    files.close()


def test_several_threads_transfer_at_once(folders: list[Path]) -> None:
    files, size = Files(folders[:2], 64 * PAGE), 16 * PAGE

    def turns(number: int) -> None:
        begin = number * size
        for seed in range(30):
            written, read = memory(16, seed=100 * number + seed), memory(16)
            files.write([(begin, written)])
            files.read([(begin, read)])
            assert torch.equal(read, written)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(turns, range(4)))
    files.close()


def test_what_was_never_written_is_zero(folders: list[Path]) -> None:
    """Also where an earlier run's bytes lay."""
    for seed in range(2):
        files, target = Files(folders[:1], 300 * PAGE), memory(300)
        files.write([(100 * PAGE, memory(3, seed=seed))])
        files.read([(0, target)])
        assert not target[: 100 * PAGE].any()
        assert not target[103 * PAGE :].any()
        files.write([(0, memory(300, seed=9))])
        files.close()


def test_a_transfer_goes_past_the_page_cache(folders: list[Path]) -> None:
    files = Files(folders[:2], 8 * PAGE)
    for descriptor in descriptors(files):
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    files.close()


def test_nothing_is_left_after_close(folders: list[Path]) -> None:
    Files(folders[:2], 8 * PAGE).close()
    before = count()
    for _ in range(3):
        files = Files(folders[:2], 8 * PAGE)
        files.write([(0, memory(8))])
        assert [list(folder.iterdir()) for folder in folders] == [[], [], []]
        files.close()
        files.close()
        del files
        gc.collect()
        assert count() == before


def test_a_killed_process_leaves_no_byte(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from stronghold.train.files import Files
        files = Files([sys.argv[1]], 64 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=100m", "tmpfs"):
        made = subprocess.run([sys.executable, "-c", textwrap.dedent(code), tmp_path], check=False)
        assert made.returncode == -9
        assert list(tmp_path.iterdir()) == []
        status = os.statvfs(tmp_path)
        assert status.f_bfree == status.f_blocks


# -- errors ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("verb", "device", "number"),
    [("write", "/dev/full", errno.ENOSPC), ("read", "/proc/self/mem", errno.EIO)],
)
def test_a_failed_transfer_says_what_and_where(
    verb: str, device: str, number: int, folders: list[Path]
) -> None:
    """All blocks have ended then."""
    files = Files(folders[:2], 12 * PAGE)
    broken = os.open(device, os.O_RDWR if verb == "read" else os.O_WRONLY)
    os.dup2(broken, descriptors(files)[1], inheritable=False)
    os.close(broken)
    transfer = files.read if verb == "read" else files.write
    with pytest.raises(OSError, match=f"{verb} of {2 * PAGE} bytes at offset 0") as caught:
        transfer([(0, memory(12))])
    assert caught.value.errno == number
    assert caught.value.filename == str(folders[1])
    transfer([(0, memory(3))])  # the other disk
    files.close()


def test_an_error_comes_after_all_blocks_have_ended(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may still write the memory, which another piece takes."""
    files, read = Files(folders[:2], 24 * PAGE), os.preadv
    num_ended = 0

    def slow(descriptor: int, *of: Any) -> int:
        nonlocal num_ended
        if descriptor == descriptors(files)[0]:
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.05)
        moved = read(descriptor, *of)
        num_ended += 1
        return moved

    monkeypatch.setattr(os, "preadv", slow)
    with pytest.raises(OSError, match="Input/output error"):
        files.read([(0, memory(24))])
    assert num_ended == 4 * 2  # units of the other disk, of two blocks each
    files.close()


def test_a_file_that_ends_early_is_an_error(folders: list[Path]) -> None:
    files = Files(folders[:1], 12 * PAGE)
    os.truncate(descriptors(files)[0], 5 * PAGE)
    with pytest.raises(OSError, match=f"read of {2 * PAGE} bytes at offset {4 * PAGE}: .*ends"):
        files.read([(0, memory(12))])
    files.close()


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    before = count()
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        with pytest.raises(BudgetError) as caught:
            Files([tmp_path], 2 << 20)
        assert re.search(
            r"needs 2\.00 MiB in .* and the disk has 1\.00 MiB free", str(caught.value)
        )
        assert list(tmp_path.iterdir()) == []
    assert count() == before


@pytest.mark.parametrize("number", [1, 5])
def test_threads_that_the_system_refuses_are_named(
    number: int, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it did not refuse end."""
    start, before, num_started = threading.Thread.start, count(), 0

    def refused(thread: threading.Thread) -> None:
        nonlocal num_started
        num_started += 1
        if num_started == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(OSError, match="the files threads: the system refused to start a thread"):
        Files(folders[:1], PAGE)
    assert count() == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, "-t", "tmpfs", "-o", "ro", "tmpfs"),
        pytest.raises(ConfigError, match=r"stronghold.nvme.path: no file .* Read-only file system"),
    ):
        Files([tmp_path], PAGE)
    with pytest.raises(ConfigError, match="No such file or directory"):
        Files([tmp_path / "missing"], PAGE)


def test_a_file_system_without_direct_transfers_is_named(
    folders: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    files, read = Files(folders[:1], 8 * PAGE), memory(8)
    assert f"no O_DIRECT in {folders[0]}" in caplog.text
    monkeypatch.undo()
    assert not files.is_direct
    files.write([(0, memory(8, seed=1))])
    files.read([(0, read)])
    assert torch.equal(read, memory(8, seed=1))
    files.close()
