"""Laws of ownership: what dead runs leave is removed; the living and the forked lose nothing."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from stronghold.memory import ownership
from stronghold.memory.extents import ExtentRequest
from stronghold.memory.nvme import NvmeStore
from stronghold.memory.ownership import OWNER, Owner, RunDirectory, reclaim
from stronghold.memory.slab import map_slab

PAGE = 4096

# A run that holds a store under argv[1], says so, and waits.
RUN = f"""
import os, signal, sys
from stronghold.memory.extents import ExtentRequest
from stronghold.memory.nvme import NvmeStore
store = NvmeStore(
    [sys.argv[1]],
    extents=[ExtentRequest(layer=0, array="low", nbytes=512 * {PAGE})],
    ring_entries=1,
    piece_bytes={PAGE},
)
"""
WAIT = "print('ready', flush=True); sys.stdin.read()\n"
# The same, killed between open and unlink.
KILLED = "import pathlib, os\npathlib.Path.unlink = lambda _: os.kill(os.getpid(), 9)\n" + RUN


@contextmanager
def running(script: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has reached WAIT; killed at the end."""
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def store_under(path: Path) -> NvmeStore:
    request = ExtentRequest(layer=0, array="low", nbytes=64 * PAGE)
    return NvmeStore([path], extents=[request], ring_entries=1, piece_bytes=PAGE)


def directories(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def abandoned(path: Path, owner: Owner) -> Path:
    """A directory as `owner` would have left it, with a page of data."""
    folder = path / "stronghold-0123"
    folder.mkdir()
    (folder / OWNER).write_text(json.dumps(asdict(owner)))
    (folder / "spill").write_bytes(bytes(PAGE))
    return folder


def a_dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


# ---- Dead runs --------------------------------------------------------------------------------


def test_a_killed_run_gives_its_bytes_back_at_once(tmp_path: Path) -> None:
    with running(RUN + WAIT, tmp_path) as process:
        (folder,) = tmp_path.iterdir()
        assert directories(folder) == [OWNER]
        links = [f"/proc/{process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{process.pid}/fd")]
        held = {os.stat(link).st_size for link in links if "spill" in os.readlink(link)}
        assert held == {512 * PAGE}
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert directories(folder) == [OWNER], "nothing but the name of who was here"


def test_the_next_run_removes_what_a_killed_one_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(RUN + WAIT, tmp_path) as process:
        (folder,) = tmp_path.iterdir()
    with caplog.at_level(logging.WARNING, "stronghold"), store_under(tmp_path) as store:
        assert len(directories(tmp_path)) == 1
        assert directories(tmp_path) != [folder.name]
        store.read_into(store.extent(0, "low"), 0, map_slab(PAGE, torch.uint8))
    assert directories(tmp_path) == []
    (record,) = [record for record in caplog.records if "reclaimed" in record.message]
    assert str(folder) in record.message
    assert f"process {process.pid}, " in record.message


def test_bytes_of_a_run_killed_before_it_unlinked_its_files_are_reclaimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    assert directories(folder) == [OWNER, "spill"]
    with caplog.at_level(logging.WARNING, "stronghold"):
        reclaimed = reclaim(tmp_path)
    assert 512 * PAGE <= reclaimed <= 514 * PAGE
    assert f"{reclaimed} bytes reclaimed" in caplog.records[0].message
    assert directories(tmp_path) == []


def test_a_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    abandoned(tmp_path, replace(Owner.this_process(), started="1"))
    assert reclaim(tmp_path) > 0
    assert directories(tmp_path) == []


def test_a_process_before_a_reboot_is_gone(tmp_path: Path) -> None:
    abandoned(tmp_path, replace(Owner.this_process(), boot_id="another boot"))
    assert reclaim(tmp_path) > 0


def test_a_container_with_another_name_on_this_kernel_is_judged(tmp_path: Path) -> None:
    abandoned(tmp_path, replace(Owner.this_process(), host="container", pid=a_dead_pid()))
    assert reclaim(tmp_path) > 0


def test_a_zombie_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        started = ownership._start_of(process.pid)
        assert started
        abandoned(tmp_path, replace(Owner.this_process(), pid=process.pid, started=started))
        assert reclaim(tmp_path) == 0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert reclaim(tmp_path) > 0


# ---- Living runs, and what is not ours --------------------------------------------------------


def test_a_living_run_is_left_alone_and_shares_the_path(tmp_path: Path) -> None:
    with running(RUN + WAIT, tmp_path) as process:
        theirs = directories(tmp_path)
        with store_under(tmp_path) as one, store_under(tmp_path) as other:
            assert len(directories(tmp_path)) == 3
            page = map_slab(PAGE, torch.uint8)
            one.write_from(one.extent(0, "low"), 0, page.fill_(1))
            other.write_from(other.extent(0, "low"), 0, page.fill_(2))
            one.read_into(one.extent(0, "low"), 0, page)
            assert bool((page == 1).all())
        assert directories(tmp_path) == theirs
        assert process.poll() is None
        process.communicate("", timeout=60)
        assert process.returncode == 0
        assert directories(tmp_path) == [], "a run that ends without close() cleans up"


def test_an_owner_that_lives_is_left_alone_also_where_locks_are_forgotten(tmp_path: Path) -> None:
    abandoned(tmp_path, Owner.this_process())
    assert reclaim(tmp_path) == 0
    assert directories(tmp_path) == ["stronghold-0123"]


def test_a_lock_that_is_held_is_respected_whoever_the_owner_is(tmp_path: Path) -> None:
    folder = abandoned(tmp_path, replace(Owner.this_process(), started="1"))
    with open(folder / OWNER) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert reclaim(tmp_path) == 0
    assert reclaim(tmp_path) > 0


def test_a_directory_of_another_host_is_left_alone_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = replace(Owner.this_process(), host="elsewhere", boot_id="another boot", pid=7)
    folder = abandoned(tmp_path, owner)
    with caplog.at_level(logging.WARNING, "stronghold"):
        assert reclaim(tmp_path) == 0
    assert directories(tmp_path) == [folder.name]
    assert f"{folder} belongs to process 7 of another host (elsewhere)" in caplog.records[0].message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '"x"'])
def test_an_owner_that_cannot_be_read_is_left_alone_with_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = abandoned(tmp_path, Owner.this_process())
    (folder / OWNER).write_text(text)
    with caplog.at_level(logging.WARNING, "stronghold"):
        assert reclaim(tmp_path) == 0
    assert directories(tmp_path) == [folder.name]
    assert "cannot be read" in caplog.records[0].message


def test_what_is_not_a_runs_is_never_touched(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "path", tmp_path / "elsewhere"
    path.mkdir()
    elsewhere.mkdir()
    target = abandoned(elsewhere, replace(Owner.this_process(), started="1"))
    (path / "stronghold-link").symlink_to(target)
    (path / "stronghold-file").touch()
    (path / "stronghold-mine").mkdir()
    (path / "stronghold-mine" / "notes.txt").touch()
    (path / "data").mkdir()
    before = sorted(path.rglob("*")), sorted(elsewhere.rglob("*"))
    assert reclaim(path) == 0
    assert (sorted(path.rglob("*")), sorted(elsewhere.rglob("*"))) == before


def test_a_directory_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ownership.os, "write", refuse)
    with pytest.raises(OSError, match="No space"):
        RunDirectory(tmp_path)
    assert directories(tmp_path) == []


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(ownership.fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, "stronghold"):
        folder = RunDirectory(tmp_path)
    assert "cannot be locked" in caplog.records[0].message
    assert reclaim(tmp_path) == 0
    folder.close()
    assert directories(tmp_path) == []


# ---- Forked children --------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "drop", "exit", "interpreter exit"])
def test_a_forked_child_takes_nothing_from_its_parent(end: str, tmp_path: Path) -> None:
    store = store_under(tmp_path)
    extent, page = store.extent(0, "low"), map_slab(PAGE, torch.uint8)
    store.write_from(extent, 0, page.fill_(7))
    before = directories(tmp_path)
    if (child := os.fork()) == 0:
        if end == "close":
            store.close()
        elif end == "drop":
            del store
            gc.collect()
        elif end == "interpreter exit":
            ownership.weakref.finalize._exitfunc()  # type: ignore[attr-defined]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert directories(tmp_path) == before
    assert reclaim(tmp_path) == 0, "the parent's lock is still held"
    page.zero_()
    store.read_into(extent, 0, page)
    assert bool((page == 7).all())
    store.close()
    assert directories(tmp_path) == []


def test_a_child_that_outlives_its_killed_parent_ends_the_claim_with_itself(tmp_path: Path) -> None:
    """A data loader's worker holds the files as long as it lives: they are not free until then."""
    script = RUN + "child = os.fork()\nif child == 0: sys.stdin.read(); os._exit(0)\n"
    script += "print('ready', flush=True); signal.pause()\n"
    with running(script, tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert reclaim(tmp_path) == 0
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.read() == "", "closed when the child ends"
    assert reclaim(tmp_path) > 0
