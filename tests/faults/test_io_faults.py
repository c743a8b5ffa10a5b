"""Laws of asynchronous file I/O when something breaks: errors that say what and where, no hang."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stronghold.errors import ConfigError
from stronghold.native import IoFile, IoQueue
from tests.support.pages import ENGINES, PAGE, Memory, in_child, mounted


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs of 1 MiB; mounting one needs root."""
    path = tmp_path_factory.mktemp("small_disk")
    with mounted(path, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        yield path


def failure(queue: IoQueue, ticket: int) -> OSError:
    with pytest.raises(OSError) as caught:
        queue.wait(ticket)
    return caught.value


@pytest.mark.parametrize("left", [0, 5 * PAGE, 5 * PAGE + 100])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_truncated_under_a_read_is_an_error(
    left: int, direct: bool, engine: str, tmp_path: Path
) -> None:
    memory, path = Memory(64), tmp_path / "file"
    with IoQueue(2, 4 * PAGE, engine) as queue:
        file = queue.open(path, memory.nbytes, direct=direct)
        os.truncate(path, left)
        error = failure(queue, queue.read(file, 0, memory.address, memory.nbytes))
        assert error.errno == errno.ENODATA
        assert str(path) in str(error)
        found = re.search(r"read of (\d+) bytes at offset (\d+) \(in a read of 262144", str(error))
        assert found is not None, str(error)
        offset = int(found[2])
        expected = left // PAGE * PAGE if file.direct else left
        assert offset == expected
        assert offset + int(found[1]) == (offset // (4 * PAGE) + 1) * 4 * PAGE
        # The queue lives on.
        queue.wait(queue.write(file, 0, memory.address, memory.nbytes))
        queue.wait(queue.read(file, 0, memory.address, memory.nbytes))


def test_a_full_disk_is_an_error_with_file_and_offset(engine: str, small_disk: Path) -> None:
    memory, path = Memory(512, seed=10), small_disk / "file"
    with IoQueue(4, 16 * PAGE, engine) as queue:
        with pytest.raises(OSError, match="fallocate of 2097152 bytes") as refused:
            queue.open(path, memory.nbytes)
        assert refused.value.errno == errno.ENOSPC
        file = queue.open(path, memory.nbytes, preallocate=False)
        error = failure(queue, queue.write(file, 0, memory.address, memory.nbytes))
        assert error.errno == errno.ENOSPC
        assert re.search(r"write of \d+ bytes at offset \d+ \(in a write of 2097152", str(error))
        assert str(path) in str(error)
        assert os.strerror(errno.ENOSPC) in str(error)
    path.unlink()


def device(queue: IoQueue, path: str) -> IoFile:
    if not os.path.exists(path):
        pytest.skip(f"no {path}")
    return queue.open(path, 1 << 62, create=False, preallocate=False)


def test_an_input_output_error_is_reported_where_it_happened(engine: str, tmp_path: Path) -> None:
    """/proc/self/mem gives EIO for pages that cannot be had, after a short read of those before:
    here those of a mapping whose file was truncated."""
    path, memory = tmp_path / "file", Memory(8)
    path.write_bytes(b"\7" * 8 * PAGE)
    with open(path, "r+b") as handle:
        mapped = np.frombuffer(mmap.mmap(handle.fileno(), 8 * PAGE), dtype=np.uint8)
    os.truncate(path, 5 * PAGE)
    address = mapped.ctypes.data
    with IoQueue(2, 8 * PAGE, engine) as queue:
        file = device(queue, "/proc/self/mem")
        error = failure(queue, queue.read(file, address, memory.address, 8 * PAGE))
        assert error.errno == errno.EIO
        place = f"read of {3 * PAGE} bytes at offset {address + 5 * PAGE}"
        whole = f"(in a read of {8 * PAGE} bytes at offset {address})"
        assert str(error).endswith(f"{place} {whole}: {os.strerror(errno.EIO)}: /proc/self/mem")
        assert (memory.bytes[: 5 * PAGE] == 7).all()
        assert not memory.bytes[5 * PAGE :].any()


def test_a_read_only_path_is_an_error(engine: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    memory = Memory(1)
    with IoQueue(1, PAGE, engine) as queue:
        file = queue.open(tmp_path / "file", PAGE, writable=False)
        queue.wait(queue.read(file, 0, memory.address, PAGE))
        with pytest.raises(ConfigError, match="opened for reading alone"):
            queue.write(file, 0, memory.address, PAGE)
        # sysfs cannot make files, also for root.
        with pytest.raises(OSError, match="/sys/stronghold-test") as caught:
            queue.open("/sys/stronghold-test", PAGE)
        assert caught.value.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            queue.open(tmp_path / "nowhere" / "file", PAGE)
        with pytest.raises(ConfigError, match="NUL"):
            queue.open("a\0b", PAGE)


def test_a_file_too_large_is_an_error_and_no_signal(engine: str, tmp_path: Path) -> None:
    memory = Memory(16)

    def write() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, 4 * PAGE))
        with IoQueue(2, PAGE, engine) as queue:
            file = queue.open(tmp_path / "file", memory.nbytes, preallocate=False)
            error = failure(queue, queue.write(file, 0, memory.address, memory.nbytes))
        return error.errno, str(error)

    answer = in_child(write)
    assert answer.startswith(f"({errno.EFBIG}, "), answer
    assert "write of 4096 bytes at offset 16384 (in a write of 65536" in answer


def test_a_forked_child_is_told_and_ends(engine: str, tmp_path: Path) -> None:
    with IoQueue(2, PAGE, engine) as queue:
        queue.open(tmp_path / "file", PAGE)
        assert "forked" in in_child(queue.commit)
        assert in_child(queue.close) == "None"
        queue.commit()


def test_queues_leave_no_descriptor_and_no_thread(engine: str, tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    if not os.path.exists("/proc/self/task"):
        pytest.skip("no /proc")
    memory = Memory(1)
    before = count()
    for index in range(10):
        with IoQueue(4, PAGE, engine) as queue:
            file = queue.open(tmp_path / f"file{index}", PAGE)
            queue.write(file, 0, memory.address, PAGE)
    assert count() == before
