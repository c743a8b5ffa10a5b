"""A kill at any instant of a save leaves the newest complete checkpoint, and `latest` names it."""

from __future__ import annotations

import gc
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.checkpoint import directory
from stronghold.checkpoint.weights import write_weights
from stronghold.process import Process
from tests.support.checkpoints import make_model, session, train, without_exchange
from tests.support.children import Child

OPTIONS: dict[str, Any] = {"precision": "bf16", "clipping": 0.5}
LONGEST_S = 0.4  # of the random wait before the kill: several saves
REPEATED = "newest"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Torch's other threads do not come along when a process forks."""
    torch.set_num_threads(1)


def save_for_ever(save_dir: Path, asynchronous: bool, done: int) -> None:
    """Train and save, saying each completed step through the pipe `done`."""
    section = {"async_checkpoint": asynchronous, "window": 2}
    with session(section=section, **OPTIONS) as engine:
        engine.load_checkpoint(save_dir)
        while True:
            train(engine, 1)
            engine.save_checkpoint(save_dir)
            engine.wait_for_checkpoint()
            engine.save_checkpoint(save_dir, tag=REPEATED, save_latest=False)  # replaces one
            engine.wait_for_checkpoint()
            os.write(done, engine.global_steps.to_bytes(4, "little"))


def kill_while_saving(save_dir: Path, asynchronous: bool, wait_s: float) -> int:
    """The last step that a killed process had saved completely, 0 for none. The wait starts when it
    has saved once."""
    read, write = os.pipe()
    child = os.fork()  # a new interpreter would take seconds to import torch
    if child == 0:
        gc.freeze()  # slabs of this process are not mapped there: nobody may unmap them
        try:
            save_for_ever(save_dir, asynchronous, write)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    try:
        assert select.select([read], [], [], 60)[0], "the child never saved"
        time.sleep(wait_s)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    said = b""
    while piece := os.read(read, 1 << 16):
        said += piece
    os.close(read)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    return int.from_bytes(said[-4:], "little") if said else 0


def crash_and_load(save_dir: Path, kills: int, seed: int) -> int:
    """Kill `kills` times; returns how often a save was cut in two."""
    chosen, cut = random.Random(seed), 0
    for kill in range(kills):
        step = kill_while_saving(save_dir, kill % 2 == 1, chosen.uniform(0.0, LONGEST_S))
        cut += any(path.is_dir() and path.name[0] == "." for path in save_dir.iterdir())
        assert (save_dir / "latest").read_text() in (f"global_step{step}", f"global_step{step + 1}")
        for tag in (None, REPEATED):
            with session(**OPTIONS) as engine:
                engine.load_checkpoint(save_dir, tag=tag)
                assert engine.global_steps in (step, step + 1)
        for path in save_dir.glob("global_step*"):
            if path.name != (save_dir / "latest").read_text():
                directory.remove(path)
    return cut


def test_kill_9_at_a_random_instant_costs_one_save(tmp_path: Path) -> None:
    crash_and_load(tmp_path, kills=6, seed=0)
    with session(**OPTIONS) as engine:
        engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path)
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert hidden == [], "the next save removes what dead processes left"


@pytest.mark.slow
def test_kill_9_fifty_times(tmp_path: Path) -> None:
    cut = crash_and_load(tmp_path, kills=50, seed=1)
    print(f"50 kills, {cut} of them within a save; the newest complete checkpoint loaded 50 times")
    assert cut >= 10, f"only {cut} of 50 kills hit a save: the test shows little"


def leftover(save_dir: Path, tag: str = "old", **changes: Any) -> Path:
    """A hidden directory as a process that differs from this one in that would have left it."""
    here = Process.this()
    name = directory.hidden_name(tag).replace(str(here), str(replace(here, **changes)))
    (save_dir / name).mkdir()
    (save_dir / name / "file").touch()
    return save_dir / name


def test_leftovers_of_a_living_process_are_kept(tmp_path: Path) -> None:
    mine = directory.begin(tmp_path, "one")
    directory.begin(tmp_path, "two")
    assert mine.is_dir()
    dead = leftover(tmp_path, started=1)  # the same number, started at another time
    directory.begin(tmp_path, "three")
    assert mine.is_dir()
    assert not dead.exists()


def test_leftovers_of_another_user_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leftover(tmp_path, started=1)
    if os.geteuid() == 0:
        os.chown(left, 12345, -1)
    else:
        monkeypatch.setattr(directory.os, "geteuid", lambda: os.getuid() + 1)
    directory.begin(tmp_path, "tag")
    assert left.exists()


@pytest.mark.parametrize("changes", [{"namespace": 7}, {"machine": "", "boot": "ffffffffffff"}])
def test_leftovers_of_another_container_or_machine_are_kept_and_named(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = leftover(tmp_path, pid=2, started=1, **changes)
    with caplog.at_level(logging.WARNING, "stronghold"):
        directory.begin(tmp_path, "tag")
    assert left.exists()
    assert str(left) in caplog.records[0].message


IN_A_CONTAINER = """
import sys
from pathlib import Path
from stronghold.checkpoint import directory
print(directory.begin(Path(sys.argv[1]), "tag"), flush=True)
sys.stdin.read()
"""


def test_a_save_in_a_container_of_the_same_host_name_is_left_alone(tmp_path: Path) -> None:
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0 or subprocess.run([*container, "true"], check=False).returncode:
        pytest.skip("this user may make no PID name space")
    command = [*container, sys.executable, "-c", IN_A_CONTAINER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        theirs = Path(process.stdout.readline().strip())
        assert theirs.is_dir()
        mine = directory.begin(tmp_path, "tag")
        assert theirs.is_dir()
        assert mine != theirs
        process.communicate("")


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from stronghold.checkpoint import weights
torch.save = lambda _, path: (path.touch(), os.kill(os.getpid(), signal.SIGKILL))
weights.write_weights({}, Path(sys.argv[1]), "pytorch_model.bin")
"""


def test_the_next_file_of_weights_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    assert Child(KILLED, tmp_path).wait() == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".pytorch_model.bin.tmp-")
    write_weights({}, tmp_path, "pytorch_model.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_two_engines_that_save_one_tag_beside_each_other_leave_a_whole_one(tmp_path: Path) -> None:
    section = {"async_checkpoint": True}
    with (
        session(section=section, **OPTIONS) as one,
        session(make_model(seed=1), section=section, **OPTIONS) as two,
    ):
        for _ in range(5):
            for engine in (one, two):
                train(engine, 1)
                engine.save_checkpoint(tmp_path, tag=REPEATED)
            for engine in (one, two):
                engine.wait_for_checkpoint()
            assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", REPEATED]
            saved = [engine.module_state_dict()["transformer.wte.weight"] for engine in (one, two)]
            saved = [values.clone() for values in saved]
            with session(**OPTIONS) as third:
                third.load_checkpoint(tmp_path)
                found = third.module_state_dict()["transformer.wte.weight"]
                assert any(torch.equal(found, values) for values in saved)


def test_a_link_in_the_place_of_the_hidden_latest_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, planted = tmp_path / "victim", directory.hidden_name("latest")
    victim.write_text("theirs")
    (tmp_path / planted).symlink_to(victim)
    directory.write_latest(tmp_path, "tag")
    assert directory.read_latest(tmp_path) == "tag"
    assert (tmp_path / planted).is_symlink(), "another name is used every time"
    monkeypatch.setattr(directory, "hidden_name", lambda _: planted)
    with pytest.raises(FileExistsError):
        directory.write_latest(tmp_path, "tag")
    assert victim.read_text() == "theirs"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_tag_is_replaced_without_a_moment_without_one(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        without_exchange(monkeypatch)
    for content in ("old", "new"):
        hidden = directory.begin(tmp_path, "tag")
        (hidden / "file").write_text(content)
        directory.publish(hidden, tmp_path / "tag")
        assert (tmp_path / "tag" / "file").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_a_tag_that_stepped_aside_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instant between the two renames, where the file system cannot exchange."""
    without_exchange(monkeypatch)
    with session(**OPTIONS) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        tag = tmp_path / "global_step1"
        tag.rename(directory.aside_of(tmp_path, tag.name))
        engine.load_checkpoint(tmp_path)
        assert tag.is_dir()
        tag.rename(directory.aside_of(tmp_path, tag.name))
        engine.save_checkpoint(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("exchange", [True, False])
def test_what_a_user_has_put_aside_is_left_alone(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name, too, that a tag which steps aside once had."""
    if not exchange:
        without_exchange(monkeypatch)
    with session(**OPTIONS) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        (tmp_path / "global_step1").rename(tmp_path / ".global_step1.old")
        expected = sorted(path.name for path in (tmp_path / ".global_step1.old").iterdir())
        for _ in range(2):
            engine.save_checkpoint(tmp_path)
            engine.load_checkpoint(tmp_path)
    assert sorted(path.name for path in (tmp_path / ".global_step1.old").iterdir()) == expected
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".global_step1.old", "global_step1", "latest"}


def test_a_file_system_that_refuses_to_exchange_names_has_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    class Library:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.renameat2 = self.refuse

        def refuse(self, *_: Any) -> int:
            refused.append("renameat2")
            directory.ctypes.set_errno(directory.errno.EINVAL)
            return -1

    for content in ("old", "new"):
        hidden = directory.begin(tmp_path, "tag")
        (hidden / "file").write_text(content)
        with monkeypatch.context() as patched:
            patched.setattr(directory.ctypes, "CDLL", Library)
            directory.publish(hidden, tmp_path / "tag")
    assert refused == ["renameat2"]
    assert (tmp_path / "tag" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_tensors_survive(tmp_path: Path) -> None:
    """What is loaded after a crash is what was saved, not only something complete."""
    with session(**OPTIONS) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 3)
    kill_while_saving(tmp_path / "elsewhere", False, 0.0)
    step = int((tmp_path / "elsewhere" / "latest").read_text().removeprefix("global_step"))
    with session(**OPTIONS) as engine:
        engine.load_checkpoint(tmp_path / "elsewhere", tag="global_step1")
        train(engine, 1)
        assert all(map(torch.equal, train(engine, 3), expected))
    assert step >= 1
