"""Laws of ownership: files on NVMe end with their processes."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch

from stronghold.memory.nvme import NvmeStore
from stronghold.memory.slab import map_slab
from stronghold.memory.stores import Extent
from tests.support.children import Child
from tests.support.pages import PAGE

# A run that holds a store under argv[1], says so, and waits.
RUN = f"""
import os, signal, sys
from stronghold.memory.nvme import NvmeStore
from stronghold.memory.stores import Extent
store = NvmeStore(
    [sys.argv[1]],
    extents=[Extent(layer=0, array="low", nbytes=512 * {PAGE})],
)
"""
WAIT = "print('ready', flush=True); sys.stdin.read()\n"
# The same, killed between creation and unlink.
KILLED = "import pathlib, os\npathlib.Path.unlink = lambda _: os.kill(os.getpid(), 9)\n" + RUN


@contextmanager
def running(script: str, path: Path) -> Iterator[tuple[Child, IO[str], IO[str]]]:
    """A process that has reached WAIT, what it reads and what it writes; killed at the end."""
    (theirs, stdin), (stdout, said) = os.pipe(), os.pipe()
    process = Child(script, path, stdin=theirs, stdout=said)
    os.close(theirs)
    os.close(said)
    with os.fdopen(stdin, "w") as stdin_file, os.fdopen(stdout) as stdout_file:
        assert stdout_file.readline() == "ready\n"
        try:
            yield process, stdin_file, stdout_file
        finally:
            process.kill()
            process.wait()


def store_under(path: Path) -> NvmeStore:
    request = Extent(layer=0, array="low", nbytes=64 * PAGE)
    return NvmeStore([path], extents=[request])


# ---- Files --------------------------------------------------------------------------------------


def test_a_killed_run_gives_its_bytes_back_at_once(tmp_path: Path) -> None:
    with running(RUN + WAIT, tmp_path) as (process, _, _):
        assert list(tmp_path.iterdir()) == []
        links = [f"/proc/{process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{process.pid}/fd")]
        held = {os.stat(link).st_size for link in links if "spill" in os.readlink(link)}
        assert held == {512 * PAGE}
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_killed_before_it_unlinks_leaves_no_bytes(tmp_path: Path) -> None:
    assert Child(KILLED, tmp_path).wait() == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.stat().st_blocks == 0


def test_runs_share_a_path(tmp_path: Path) -> None:
    with (
        running(RUN + WAIT, tmp_path) as (process, stdin, _),
        store_under(tmp_path) as one,
        store_under(tmp_path) as other,
    ):
        page = map_slab(PAGE, torch.uint8)
        one.submit("write", one.extent(0, "low"), 0, page.fill_(1)).wait()
        other.submit("write", other.extent(0, "low"), 0, page.fill_(2)).wait()
        one.submit("read", one.extent(0, "low"), 0, page).wait()
        assert bool((page == 1).all())
        stdin.close()
        assert process.wait() == 0


def test_what_is_not_a_runs_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "stronghold-mine").mkdir()
    (tmp_path / "stronghold-spill-file").touch()
    before = sorted(tmp_path.rglob("*"))
    store_under(tmp_path).close()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("stronghold.memory.nvme.os.truncate", refuse)
    with pytest.raises(OSError, match="Input/output"):
        store_under(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_keeps_names_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "stronghold"):
        patch.setattr(Path, "unlink", lambda _: os.unlink("/proc"))  # refused
        store = store_under(tmp_path)
    (left,) = tmp_path.iterdir()
    assert f"remove {left}" in caplog.records[-1].message
    store.close()
    assert list(tmp_path.iterdir()) == []


# ---- Forked children ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "drop", "exit"])
def test_a_forked_child_takes_nothing_from_its_parent(end: str, tmp_path: Path) -> None:
    store = store_under(tmp_path)
    extent, page = store.extent(0, "low"), map_slab(PAGE, torch.uint8)
    store.submit("write", extent, 0, page.fill_(7)).wait()
    if (child := os.fork()) == 0:
        if end == "close":
            store.close()
        elif end == "drop":
            del store
            gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    page.zero_()
    store.submit("read", extent, 0, page).wait()
    assert bool((page == 7).all())
    store.close()
