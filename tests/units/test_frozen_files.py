"""Laws of the store over a prepared base: each transfer reaches the place of its bytes, and no call
writes the base's files."""

from __future__ import annotations

import errno
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stronghold.errors import StateError
from stronghold.memory.frozen_files import FrozenFiles
from stronghold.memory.slab import flush
from stronghold.memory.stores import Extent, NullStore
from stronghold.model.file_ranges import FileRange, FrozenFile
from tests.support.pages import ENGINES, PAGE
from tests.support.stores import memory, store_of

# Pages of layer 0's weights: two that train, a frozen range of five of which the file has four, and
# a frozen range of six. The file has the second range first, behind three pages of another layer.
TRAINED, FIRST, STORED, SECOND = 2, 5, 4, 6
WEIGHTS = Extent(layer=0, array="weights", nbytes=(TRAINED + FIRST + SECOND) * PAGE)
MOMENTS = Extent(layer=0, array="exp_avg", nbytes=3 * PAGE)
OTHER = Extent(layer=1, array="weights", nbytes=2 * PAGE)
FILE_PAGES = 3 + SECOND + STORED


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    path = tmp_path / "layers.bin"
    path.write_bytes(memory(FILE_PAGES, seed=5).numpy().tobytes())
    return path


def ranges_of(path: Path) -> list[FileRange]:
    file = FrozenFile(path=str(path), opened=str(path), num_bytes=FILE_PAGES * PAGE)
    middle = (TRAINED + FIRST) * PAGE
    return [
        FileRange(
            file=file,
            offset=(3 + SECOND) * PAGE,
            begin=TRAINED * PAGE,
            end=middle,
            num_stored=STORED * PAGE,
        ),
        FileRange(
            file=file, offset=3 * PAGE, begin=middle, end=WEIGHTS.nbytes, num_stored=SECOND * PAGE
        ),
    ]


def frozen_files(path: Path, folder: Path, engine: str | None = None) -> FrozenFiles:
    spilled = store_of([folder], MOMENTS, OTHER)
    ranges = {0: ranges_of(path)}
    return FrozenFiles(spilled, ranges, engine=engine, depth=4, block_bytes=4 * PAGE)


@pytest.fixture
def store(base_path: Path, folders: list[Path]) -> Iterator[FrozenFiles]:
    made = frozen_files(base_path, folders[0])
    yield made
    made.close()


def expected(path: Path) -> torch.Tensor:
    """The frozen bytes of layer 0, as the array has them."""
    stored = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    second, first = (stored[3 * PAGE : (3 + SECOND) * PAGE], stored[(3 + SECOND) * PAGE :])
    padding = torch.zeros((FIRST - STORED) * PAGE, dtype=torch.uint8)
    return torch.cat([first, padding, second])


@pytest.mark.parametrize("engine", ENGINES)
def test_pieces_come_from_memory_from_the_base_and_from_the_spill_files(
    engine: str, base_path: Path, folders: list[Path]
) -> None:
    store = frozen_files(base_path, folders[0], engine)
    try:
        trained = memory(TRAINED, seed=1)
        store.submit("write", WEIGHTS, 0, trained).wait()
        store.submit("write", OTHER, 0, memory(2, seed=2)).wait()
        read = memory(TRAINED + FIRST + SECOND)
        cuts = [0, TRAINED, TRAINED + 3, TRAINED + FIRST, TRAINED + FIRST + 1, len(read) // PAGE]
        pending = [
            store.submit("read", WEIGHTS, begin * PAGE, read[begin * PAGE : end * PAGE])
            for begin, end in itertools.pairwise(cuts)
        ]
        for transfer in reversed(pending):
            transfer.wait()
        assert torch.equal(read[: TRAINED * PAGE], trained)
        assert torch.equal(read[TRAINED * PAGE :], expected(base_path))
        other = memory(2)
        store.submit("read", OTHER, 0, other).wait()
        assert torch.equal(other, memory(2, seed=2))
        assert store.bytes_written == 2 * PAGE
        assert store.bytes_read == (STORED + SECOND + 2) * PAGE
        assert store.file_bytes == (3 + 2) * PAGE
    finally:
        store.close()
        store.close()
    assert list(folders[0].iterdir()) == []


def test_a_write_of_frozen_bytes_is_refused(store: FrozenFiles, base_path: Path) -> None:
    before = zlib.crc32(base_path.read_bytes())
    for begin, count in ((TRAINED, 1), (TRAINED + FIRST, SECOND)):
        with pytest.raises(StateError, match=r"expected a read of one of the ranges"):
            store.submit("write", WEIGHTS, begin * PAGE, memory(count))
    assert zlib.crc32(base_path.read_bytes()) == before
    assert store.bytes_written == 0


@pytest.mark.parametrize(
    ("begin", "count"),
    [(TRAINED + FIRST - 1, 2), (TRAINED - 1, 2), (TRAINED + FIRST + SECOND - 1, 2)],
)
def test_a_transfer_lies_in_one_range(begin: int, count: int, store: FrozenFiles) -> None:
    with pytest.raises(StateError):
        store.submit("read", WEIGHTS, begin * PAGE, memory(count))


def test_what_a_program_writes_into_a_mapping_never_reaches_the_base(
    store: FrozenFiles, base_path: Path
) -> None:
    before = base_path.read_bytes()
    mapped = store.mapped(WEIGHTS)
    frozen = mapped[TRAINED * PAGE :]
    assert torch.equal(frozen, expected(base_path))
    mapped.fill_(7)
    flush(mapped)
    assert base_path.read_bytes() == before
    trained = memory(TRAINED)
    store.submit("read", WEIGHTS, 0, trained).wait()
    assert bool((trained == 7).all())  # what trains lies there
    store.restore(0)
    assert torch.equal(frozen, expected(base_path))
    assert bool((mapped[: TRAINED * PAGE] == 7).all())


def test_a_mapping_outlives_the_store_and_the_name(
    base_path: Path, folders: list[Path], tmp_path: Path
) -> None:
    store = frozen_files(base_path, folders[0])
    known = expected(base_path)
    base_path.rename(tmp_path / "elsewhere")
    base_path.write_bytes(b"another base")
    mapped, read = store.mapped(WEIGHTS), memory(SECOND)
    store.submit("read", WEIGHTS, (TRAINED + FIRST) * PAGE, read).wait()
    assert torch.equal(read, known[FIRST * PAGE :])
    (tmp_path / "elsewhere").unlink()
    store.check()
    store.close()
    assert torch.equal(mapped[TRAINED * PAGE :], known)


@pytest.mark.parametrize(
    ("change", "number", "words"),
    [
        (lambda path: os.truncate(path, PAGE), errno.ENODATA, "truncated during the run"),
        (lambda path: os.utime(path, (1, 1)), errno.ESTALE, "written to during the run"),
    ],
)
def test_a_changed_base_is_noticed_before_each_transfer(
    change: object, number: int, words: str, store: FrozenFiles, base_path: Path
) -> None:
    assert callable(change)
    change(base_path)
    calls = (
        lambda: store.submit("read", WEIGHTS, TRAINED * PAGE, memory(1)),
        lambda: store.mapped(WEIGHTS),
        store.check,
    )
    for call in calls:
        with pytest.raises(OSError, match=words) as raised:
            call()
        assert (raised.value.errno, raised.value.filename) == (number, str(base_path))
    store.submit("write", MOMENTS, 0, memory(3)).wait()  # the spill files are well


def test_a_base_needs_no_spill_files(base_path: Path) -> None:
    store = FrozenFiles(NullStore(), {0: ranges_of(base_path)})
    read = memory(SECOND)
    store.submit("read", WEIGHTS, (TRAINED + FIRST) * PAGE, read).wait()
    assert torch.equal(read, expected(base_path)[FIRST * PAGE :])
    assert store.file_bytes == store.bytes_written == 0
    store.close()


def test_a_missing_base_leaves_no_file_behind(tmp_path: Path, folders: list[Path]) -> None:
    with pytest.raises(FileNotFoundError):
        frozen_files(tmp_path / "missing", folders[0])
    assert list(folders[0].iterdir()) == []


def test_a_closed_store_refuses_reads(base_path: Path, folders: list[Path]) -> None:
    store = frozen_files(base_path, folders[0])
    store.close()
    with pytest.raises(StateError, match="closed"):
        store.submit("read", WEIGHTS, TRAINED * PAGE, memory(1))
