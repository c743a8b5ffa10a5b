"""Laws of ownership: what dead runs leave is removed; the living and the forked lose nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from stronghold.memory import runfolder
from stronghold.memory.nvme import Extent, NvmeStore
from stronghold.memory.runfolder import OWNER, Owner, RunDirectory, reclaim
from stronghold.memory.slab import map_slab
from stronghold.process import start_of
from tests.support.children import Child

PAGE = 4096

# A run that holds a store under argv[1], says so, and waits.
RUN = f"""
import os, signal, sys
from stronghold.memory.nvme import Extent
from stronghold.memory.nvme import NvmeStore
store = NvmeStore(
    [sys.argv[1]],
    extents=[Extent(layer=0, array="low", nbytes=512 * {PAGE})],
    ring_entries=1,
    piece_bytes={PAGE},
)
"""
WAIT = "print('ready', flush=True); sys.stdin.read()\n"
# The same, killed between open and unlink.
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
    return NvmeStore([path], extents=[request], ring_entries=1, piece_bytes=PAGE)


def directories(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def abandoned(path: Path, owner: Owner) -> Path:
    """A directory as `owner` would have left it, with a page of data."""
    folder = path / "stronghold-0123"
    folder.mkdir()
    (folder / OWNER).write_text(owner.as_json())
    (folder / "spill").write_bytes(bytes(PAGE))
    return folder


def owner_of(**changes: Any) -> Owner:
    """This process as owner, or one that differs in that."""
    here = Owner.this_process()
    return replace(here, process=replace(here.process, **changes))


def a_dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


# ---- Dead runs --------------------------------------------------------------------------------


def test_a_killed_run_gives_its_bytes_back_at_once(tmp_path: Path) -> None:
    with running(RUN + WAIT, tmp_path) as (process, _, _):
        (folder,) = tmp_path.iterdir()
        assert directories(folder) == [OWNER]
        links = [f"/proc/{process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{process.pid}/fd")]
        held = {os.stat(link).st_size for link in links if "spill" in os.readlink(link)}
        assert held == {512 * PAGE}
        process.kill()
        process.wait()
    assert directories(folder) == [OWNER], "nothing but the name of who was here"


def test_the_next_run_removes_what_a_killed_one_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(RUN + WAIT, tmp_path) as (process, _, _):
        (folder,) = tmp_path.iterdir()
    with caplog.at_level(logging.WARNING, "stronghold"), store_under(tmp_path) as store:
        assert len(directories(tmp_path)) == 1
        assert directories(tmp_path) != [folder.name]
        store.submit("read", store.extent(0, "low"), 0, map_slab(PAGE, torch.uint8)).wait()
    assert directories(tmp_path) == []
    (record,) = [record for record in caplog.records if "reclaimed" in record.message]
    assert str(folder) in record.message
    assert f"process {process.pid}, " in record.message


def test_bytes_of_a_run_killed_before_it_unlinked_its_files_are_reclaimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Child(KILLED, tmp_path).wait() == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    assert directories(folder) == [OWNER, "spill"]
    with caplog.at_level(logging.WARNING, "stronghold"):
        reclaimed = reclaim(tmp_path)
    assert 512 * PAGE <= reclaimed <= 514 * PAGE
    assert f"{reclaimed} bytes reclaimed" in caplog.records[0].message
    assert directories(tmp_path) == []


def test_a_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    abandoned(tmp_path, owner_of(started=1))
    assert reclaim(tmp_path) > 0
    assert directories(tmp_path) == []


def test_a_process_before_a_reboot_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stronghold.process._machine", lambda: "0123456789ab"
    )  # a container may have none
    abandoned(tmp_path, owner_of(boot="ffffffffffff"))
    assert reclaim(tmp_path) > 0


def test_a_name_space_with_another_host_name_is_judged(tmp_path: Path) -> None:
    abandoned(tmp_path, replace(owner_of(pid=a_dead_pid()), host="renamed"))
    assert reclaim(tmp_path) > 0


def test_a_zombie_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        started = start_of(process.pid)
        assert started
        abandoned(tmp_path, owner_of(pid=process.pid, started=started))
        assert reclaim(tmp_path) == 0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert reclaim(tmp_path) > 0


# ---- Living runs, and what is not ours --------------------------------------------------------


def test_a_living_run_is_left_alone_and_shares_the_path(tmp_path: Path) -> None:
    with running(RUN + WAIT, tmp_path) as (process, stdin, _):
        theirs = directories(tmp_path)
        with store_under(tmp_path) as one, store_under(tmp_path) as other:
            assert len(directories(tmp_path)) == 3
            page = map_slab(PAGE, torch.uint8)
            one.submit("write", one.extent(0, "low"), 0, page.fill_(1)).wait()
            other.submit("write", other.extent(0, "low"), 0, page.fill_(2)).wait()
            one.submit("read", one.extent(0, "low"), 0, page).wait()
            assert bool((page == 1).all())
        assert directories(tmp_path) == theirs
        assert process.poll() is None
        stdin.close()
        assert process.wait() == 0
        assert directories(tmp_path) == [], "a run that ends without close() cleans up"


def test_an_owner_that_lives_is_left_alone_also_where_locks_are_forgotten(tmp_path: Path) -> None:
    abandoned(tmp_path, Owner.this_process())
    assert reclaim(tmp_path) == 0
    assert directories(tmp_path) == ["stronghold-0123"]


def test_a_lock_that_is_held_is_respected_whoever_the_owner_is(tmp_path: Path) -> None:
    folder = abandoned(tmp_path, owner_of(started=1))
    with open(folder / OWNER) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert reclaim(tmp_path) == 0
    assert reclaim(tmp_path) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": "ffffffffffff", "boot": "ffffffffffff"},
        {"machine": "", "boot": "ffffffffffff"},
        {"namespace": 7},
        {"boot": ""},
    ],
    ids=["another machine", "a machine without an id", "another container", "nobody says"],
)
def test_a_process_that_cannot_be_seen_is_left_alone_with_a_warning(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its host name: containers and machines may have equal ones."""
    folder = abandoned(tmp_path, owner_of(pid=a_dead_pid(), **changes))
    with caplog.at_level(logging.WARNING, "stronghold"):
        assert reclaim(tmp_path) == 0
    assert directories(tmp_path) == [folder.name]
    assert "of another host or container" in caplog.records[0].message


def owner_text(**changes: object) -> bytes:
    return json.dumps({**json.loads(owner_of(started=1).as_json()), **changes}).encode()


BROKEN_FILES = {
    "nothing": b"",
    "cut off": b"{",
    "a list": b"[]",
    "too little": b'{"pid": 1}',
    "text": b"hello",
    "a NUL": owner_text(process="\0"),
    "slashes": owner_text(process="--0-../../tmp/pipe-0"),
    "a huge number": owner_text(process="--0-" + "9" * 400 + "-0"),
    "no strings": owner_text(process=[1], host={"a": 1}, created=2),
    "other digits": owner_text(process=str(owner_of().process).replace("1", "\u0661")),
    "deep": b"[" * 4000,
    "deeper": b'{"process":' * 100_000,
    "binary": bytes(range(256)),
    "huge": owner_text() + b" " * (64 << 20),
    "of an earlier version": b'{"pid": 1, "host": "h", "boot_id": "b", "started": "1"}',
}


@pytest.mark.parametrize("kind", [*BROKEN_FILES, "a pipe", "a directory", "a link", "a socket"])
def test_an_owner_that_cannot_be_read_is_left_alone_with_a_warning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, elsewhere = tmp_path / "path", tmp_path / "elsewhere"
    path.mkdir()
    elsewhere.write_bytes(owner_text())
    folder = abandoned(path, owner_of(started=1))
    (folder / OWNER).unlink()
    if kind == "a pipe":
        os.mkfifo(folder / OWNER)
    elif kind == "a directory":
        (folder / OWNER).mkdir()
    elif kind == "a link":
        (folder / OWNER).symlink_to(elsewhere)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            monkeypatch.chdir(folder)  # a socket's name is at most 107 characters long
            server.bind(OWNER)
    else:
        (folder / OWNER).write_bytes(BROKEN_FILES[kind])
    with caplog.at_level(logging.WARNING, "stronghold"):
        store_under(path).close()
    assert directories(path) == [folder.name]
    assert directories(folder) == [OWNER, "spill"]
    (record,) = caplog.records
    assert f"{folder}: its owner file " in record.message


def test_a_broken_directory_does_not_hide_a_dead_one(tmp_path: Path) -> None:
    broken = tmp_path / "stronghold-0000"
    broken.mkdir()
    os.mkfifo(broken / OWNER)
    abandoned(tmp_path, owner_of(started=1))
    assert reclaim(tmp_path) > 0
    assert directories(tmp_path) == [broken.name]


@pytest.mark.parametrize("whose", ["another user's", "open to others"])
def test_only_what_is_this_users_alone_is_removed(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = abandoned(tmp_path, owner_of(started=1))
    if whose == "open to others":
        folder.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(runfolder.os, "geteuid", lambda: os.getuid() + 1)
    with caplog.at_level(logging.INFO, "stronghold"):
        assert reclaim(tmp_path) == 0
    assert directories(folder) == [OWNER, "spill"]
    (record,) = caplog.records
    assert str(folder) in record.message
    assert "left alone" in record.message


def exchange_until(stop: threading.Event, one: Path, two: Path) -> None:
    """Swap two names, each time in one system call, as long as both are there."""
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    call = functools.partial(ctypes.CDLL(None).renameat2, here, bytes(one), here, bytes(two), swap)
    while not stop.is_set() and call() == 0:
        pass


@pytest.mark.parametrize("verb", ["reclaim", "close"])
def test_a_directory_that_is_exchanged_for_a_link_meanwhile_leads_nowhere(
    verb: str, tmp_path: Path
) -> None:
    """Somebody who may write into the path puts a link to a home in the place of a run's directory,
    again and again, while it is removed."""
    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True)
    (home / "thesis" / "chapter").touch()
    (home / "notes").touch()
    before = sorted(home.rglob("*"))
    for round_ in range(40):
        path = tmp_path / str(round_)
        path.mkdir()
        (path / "link").symlink_to(home)
        run = RunDirectory(path) if verb == "close" else None
        folder = run.path if run is not None else abandoned(path, owner_of(started=1))
        for number in range(200):
            (folder / f"file{number}").touch()
        stop = threading.Event()
        swap = functools.partial(exchange_until, stop, folder, path / "link")
        attacker = threading.Thread(target=swap)
        attacker.start()
        time.sleep(0.001)
        try:
            run.close() if run is not None else reclaim(path)
        finally:
            stop.set()
            attacker.join()
        assert sorted(home.rglob("*")) == before, round_


def test_what_is_not_a_runs_is_never_touched(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "path", tmp_path / "elsewhere"
    path.mkdir()
    elsewhere.mkdir()
    target = abandoned(elsewhere, owner_of(started=1))
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

    monkeypatch.setattr(runfolder.os, "write", refuse)
    with pytest.raises(OSError, match="No space"):
        RunDirectory(tmp_path)
    assert directories(tmp_path) == []


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(runfolder.fcntl, "flock", refuse)
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
    store.submit("write", extent, 0, page.fill_(7)).wait()
    before = directories(tmp_path)
    if (child := os.fork()) == 0:
        if end == "close":
            store.close()
        elif end == "drop":
            del store
            gc.collect()
        elif end == "interpreter exit":
            runfolder.weakref.finalize._exitfunc()  # type: ignore[attr-defined]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert directories(tmp_path) == before
    assert reclaim(tmp_path) == 0, "the parent's lock is still held"
    page.zero_()
    store.submit("read", extent, 0, page).wait()
    assert bool((page == 7).all())
    store.close()
    assert directories(tmp_path) == []


def test_a_child_that_outlives_its_killed_parent_ends_the_claim_with_itself(tmp_path: Path) -> None:
    """A data loader's worker holds the files as long as it lives: they are not free until then."""
    script = RUN + "child = os.fork()\nif child == 0: sys.stdin.read(); os._exit(0)\n"
    script += "print('ready', flush=True); signal.pause()\n"
    with running(script, tmp_path) as (process, stdin, stdout):
        process.kill()
        process.wait()
        assert reclaim(tmp_path) == 0
        stdin.close()
        assert stdout.read() == "", "closed when the child ends"
    assert reclaim(tmp_path) > 0
