"""Laws of asynchronous file I/O: right bytes, clear refusals, on both engines."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from stronghold.errors import ConfigError
from stronghold.native import IoQueue
from tests.support.pages import ENGINES, PAGE, Memory, in_child, refuse_io_uring

SHM = Path("/dev/shm")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- Bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_pages", [1, 3, 64])
@pytest.mark.parametrize("registered", [False, True])
def test_files_hold_what_a_plain_writer_would_have_written(
    engine: str, block_pages: int, registered: bool, tmp_path: Path
) -> None:
    """Random reads and writes on three files against bytearrays, up to 24 in flight."""
    pages, chance = 97, random.Random(block_pages)
    source, target = Memory(24 * 31, seed=1), Memory(24 * 31)
    lent = [(memory.address, memory.nbytes) for memory in (source, target)] if registered else []
    with IoQueue(8, block_pages * PAGE, engine, lent) as queue:
        assert queue.engine == engine
        if not registered:
            assert not queue.registered
        files = [queue.open(tmp_path / f"file{index}", pages * PAGE) for index in range(3)]
        oracles = [bytearray(pages * PAGE) for _ in files]
        for _ in range(12):
            # Operations in flight together must not touch the same pages: a page is taken once.
            free = [set(range(pages)) for _ in files]
            flights: list[tuple[int, int, int, int, int]] = []
            for slot in range(24):
                index, first = chance.randrange(3), chance.randrange(pages)
                length = min(chance.choice([0, 1, 3, 5, 7, 15, 17, 31]), pages - first)
                wanted = set(range(first, first + length))
                if not wanted <= free[index]:
                    continue
                free[index] -= wanted
                begin, nbytes, at = first * PAGE, length * PAGE, slot * 31 * PAGE
                if chance.random() < 0.5:
                    oracles[index][begin : begin + nbytes] = source.bytes[
                        at : at + nbytes
                    ].tobytes()
                    ticket = queue.write(files[index], begin, source.address + at, nbytes)
                    flights.append((ticket, index, begin, at, 0))
                else:
                    commit = chance.random() < 0.5
                    ticket = queue.read(
                        files[index], begin, target.address + at, nbytes, commit=commit
                    )
                    flights.append((ticket, index, begin, at, nbytes))
            chance.shuffle(flights)
            for ticket, index, begin, at, nbytes in flights:
                assert queue.wait(ticket) >= 0.0
                read = target.bytes[at : at + nbytes].tobytes()
                assert read == oracles[index][begin : begin + nbytes]
        for file in files:
            file.close()
    for index, oracle in enumerate(oracles):
        assert (tmp_path / f"file{index}").read_bytes() == oracle


def test_closing_the_queue_finishes_what_was_submitted(engine: str, tmp_path: Path) -> None:
    memory = Memory(2048, seed=3)
    queue = IoQueue(2, PAGE * 4, engine)
    file = queue.open(tmp_path / "file", memory.nbytes)
    half = memory.nbytes // 2
    queue.write(file, 0, memory.address, half)
    queue.write(file, half, memory.address + half, half, commit=False)
    queue.close()
    queue.close()
    assert (tmp_path / "file").read_bytes() == memory.bytes.tobytes()


def test_one_thread_submits_while_another_waits(engine: str, tmp_path: Path) -> None:
    pages, memory = 300, Memory(300, seed=5)
    with IoQueue(4, PAGE, engine) as queue:
        file = queue.open(tmp_path / "file", memory.nbytes)
        tickets: list[int] = []
        submitted, waited = threading.Semaphore(0), []

        def wait_for_all() -> None:
            for index in range(pages):
                submitted.acquire()
                waited.append(queue.wait(tickets[index]))

        waiter = threading.Thread(target=wait_for_all)
        waiter.start()
        for page in range(pages):
            tickets.append(queue.write(file, page * PAGE, memory.address + page * PAGE, PAGE))
            submitted.release()
        waiter.join()
        assert len(waited) == pages
    assert (tmp_path / "file").read_bytes() == memory.bytes.tobytes()


def test_waiting_leaves_the_interpreter_to_others(engine: str, tmp_path: Path) -> None:
    memory = Memory(64 << 8)
    inside, turns = threading.Event(), 0
    interval = sys.getswitchinterval()
    with IoQueue(4, 256 * PAGE, engine) as queue:
        file = queue.open(tmp_path / "file", memory.nbytes)

        def wait() -> None:
            ticket = queue.write(file, 0, memory.address, memory.nbytes)
            inside.set()
            queue.wait(ticket)
            inside.clear()

        waiter = threading.Thread(target=wait)
        # outside the wait this thread gets that much, and no more
        sys.setswitchinterval(1e-5)
        try:
            waiter.start()
            while waiter.is_alive():
                turns += inside.is_set()
        finally:
            sys.setswitchinterval(interval)
    assert turns > 2000


# ---- Files ------------------------------------------------------------------------------------


def test_a_preallocated_file_has_its_blocks(engine: str, tmp_path: Path) -> None:
    size = 256 * PAGE
    with IoQueue(1, PAGE, engine) as queue:
        full = queue.open(tmp_path / "full", size)
        empty = queue.open(tmp_path / "empty", size, preallocate=False)
        assert not empty.preallocated
        assert os.path.getsize(tmp_path / "empty") == 0
        assert os.path.getsize(tmp_path / "full") == size
        if full.preallocated:
            assert os.stat(tmp_path / "full").st_blocks * 512 >= size
        assert os.stat(tmp_path / "full").st_mode & 0o777 == 0o600


def test_opening_shortens_nothing(engine: str, tmp_path: Path) -> None:
    content = os.urandom(10 * PAGE + 5)
    (tmp_path / "file").write_bytes(content)
    with IoQueue(1, PAGE, engine) as queue:
        queue.open(tmp_path / "file", 3 * PAGE)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm")
def test_a_file_system_without_o_direct_works_and_says_so(engine: str) -> None:
    memory, path = Memory(33, seed=7), SHM / f"stronghold-test-{os.getpid()}-{engine}"
    try:
        with IoQueue(4, 2 * PAGE, engine) as queue:
            file = queue.open(path, memory.nbytes)
            assert not file.direct
            queue.wait(queue.write(file, 0, memory.address, memory.nbytes))
            back = Memory(33)
            queue.wait(queue.read(file, 0, back.address, back.nbytes))
        assert np.array_equal(memory.bytes, back.bytes)
    finally:
        path.unlink()


# ---- Refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "skip", "nbytes", "words"),
    [
        (512, 0, PAGE, "offset is 512, expected a multiple of 4096"),
        (-PAGE, 0, PAGE, "offset is -4096"),
        (0, 0, 100, "nbytes is 100, expected a multiple of 4096"),
        (0, 0, -PAGE, "nbytes is -4096"),
        (0, 64, PAGE, "address ends in 64, expected a multiple of 4096"),
        (8 * PAGE, 0, PAGE, "read of 4096 bytes at offset 32768 passes the size given at open"),
        (PAGE, 0, 8 * PAGE, "passes the size given at open, 32768"),
    ],
)
def test_a_request_that_breaks_the_contract_is_refused(
    offset: int, skip: int, nbytes: int, words: str, engine: str, tmp_path: Path
) -> None:
    memory = Memory(16)
    with IoQueue(1, PAGE, engine) as queue:
        file = queue.open(tmp_path / "file", 8 * PAGE)
        with pytest.raises(ConfigError, match=words):
            queue.read(file, offset, memory.address + skip, nbytes)


@pytest.mark.parametrize(
    ("depth", "block", "name", "words"),
    [
        (0, PAGE, None, "depth"),
        (5000, PAGE, None, "depth"),
        (1, 0, None, "block_bytes"),
        (1, 1000, None, "block_bytes"),
        (1, PAGE, "libaio", 'engine is "libaio", expected "io_uring" or "threads"'),
    ],
)
def test_a_queue_that_cannot_be_is_refused(
    depth: int, block: int, name: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        IoQueue(depth, block, name)


def test_the_environment_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRONGHOLD_IO_ENGINE", "threads")
    with IoQueue(1, PAGE) as queue:
        assert (queue.engine, queue.note) == ("threads", "")
    monkeypatch.setenv("STRONGHOLD_IO_ENGINE", "uring")
    with pytest.raises(ConfigError, match="STRONGHOLD_IO_ENGINE"):
        IoQueue(1, PAGE)


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_threads_take_over_where_io_uring_is_refused(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRONGHOLD_IO_ENGINE", raising=False)

    def queues() -> object:
        refuse_io_uring(number)
        with IoQueue(2, PAGE) as queue:
            chosen = (queue.engine, queue.note)
        with pytest.raises(OSError) as caught:
            IoQueue(2, PAGE, "io_uring")
        return *chosen, caught.value.errno

    expected = ("threads", f"io_uring_setup: {os.strerror(number)}", number)
    assert in_child(queues) == str(expected)


def test_memory_that_cannot_be_registered_works_unregistered(engine: str, tmp_path: Path) -> None:
    memory = Memory(4, seed=9)
    hole = mmap.mmap(-1, PAGE)
    address = np.frombuffer(hole, dtype=np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    # the kernel cannot pin it
    assert libc.mprotect(ctypes.c_void_p(address), PAGE, 0) == 0
    with IoQueue(2, PAGE, engine, [(address, PAGE)]) as queue:
        assert not queue.registered
        assert ("not registered" in queue.note) == (engine == "io_uring")
        file = queue.open(tmp_path / "file", memory.nbytes)
        queue.wait(queue.write(file, 0, memory.address, memory.nbytes))
    assert (tmp_path / "file").read_bytes() == memory.bytes.tobytes()
