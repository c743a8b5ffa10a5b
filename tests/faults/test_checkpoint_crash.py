"""A kill at any instant of a save leaves the newest complete checkpoint, and `latest` names it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.checkpoint import directory
from stronghold.checkpoint.export import write_weights
from stronghold.checkpoint.files import TensorHeader, write_durably, write_tensors
from stronghold.devices.threads import Workers
from stronghold.errors import CheckpointError
from tests.support.checkpoints import BESIDE_TAGS, resume, session, train, without_exchange
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
        if engine.load_checkpoint(save_dir)[0] is not None:
            engine.restore_random_states()
        while True:
            train(engine, 1)
            engine.save_checkpoint(save_dir)
            engine.wait_for_checkpoint()
            # replaces one
            engine.save_checkpoint(save_dir, tag=REPEATED, save_latest=False)
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
    crash_and_load(tmp_path, kills=4, seed=0)
    with session(**OPTIONS) as engine:
        engine.load_checkpoint(tmp_path)
        for _ in range(2):
            train(engine, 1)
            engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, tag=REPEATED)
    hidden = [path.name for path in tmp_path.glob(".*.saving")]
    assert hidden == [], "the next save of a tag replaces what a dead process left"


@pytest.mark.slow
def test_kill_9_fifty_times(tmp_path: Path) -> None:
    cut = crash_and_load(tmp_path, kills=50, seed=1)
    print(f"50 kills, {cut} of them within a save; the newest complete checkpoint loaded 50 times")
    assert cut >= 10, f"only {cut} of 50 kills hit a save: the test shows little"


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from stronghold.checkpoint import export
torch.save = lambda _, path: (path.touch(), os.kill(os.getpid(), signal.SIGKILL))
export.write_weights({}, Path(sys.argv[1]), "pytorch_model.bin")
"""


def test_the_next_file_of_weights_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    assert Child(KILLED, tmp_path).wait() == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name == ".pytorch_model.bin.saving"
    write_weights({}, tmp_path, "pytorch_model.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


@pytest.fixture
def child() -> Iterator[Callable[[], None]]:
    """Forks a process that sleeps until the test has ended."""
    children: list[int] = []

    def fork() -> None:
        children.append(os.fork())
        if not children[-1]:
            signal.pause()

    yield fork
    for process in children:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_a_second_save_of_a_tag_is_refused_while_one_runs(
    tmp_path: Path, child: Callable[[], None]
) -> None:
    """Also by this process. A forked child, which has the lock too, does not prolong the first."""
    with directory.appearing(tmp_path / "tag") as hidden:
        (hidden / "file").write_text("first")
        child()
        with (
            pytest.raises(CheckpointError, match="tag: another save of it has not ended"),
            directory.appearing(tmp_path / "tag"),
        ):
            pass
        with directory.appearing(tmp_path / "other"):
            pass
    assert (tmp_path / "tag" / "file").read_text() == "first"
    with directory.appearing(tmp_path / "tag") as hidden:
        (hidden / "file").write_text("second")
    assert (tmp_path / "tag" / "file").read_text() == "second"
    assert {path.name for path in tmp_path.iterdir()} == {"tag", "other"}


def save_and_die(save_dir: Path, content: str, number: int) -> None:
    """The body of a child: save, and be killed before the call of this number, from 0 on, of those
    that change the disk. Ends with status 0 when there is no such call."""
    countdown = [number]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if countdown[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            countdown[0] -= 1
            return original(*arguments, **options)

        return call

    for owner, names in (
        (os, ("open", "write", "fsync", "unlink", "rmdir", "rename", "replace", "mkdir")),
        (os, ("pwrite", "ftruncate")),
        (directory, ("exchange_names", "remove")),
    ):
        for name in names:
            setattr(owner, name, counting(getattr(owner, name)))
    with directory.appearing(save_dir / "tag") as hidden:
        write_durably(hidden / "one", content.encode())
        data = torch.tensor(list(content.encode()), dtype=torch.uint8)
        headers = [TensorHeader("t", torch.uint8, (len(content),))]
        with Workers("save", 1) as threads:
            write_tensors(hidden / "two", headers, [data], threads)
    directory.write_latest(save_dir, "tag")


@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_crash_before_any_call_leaves_the_old_tag_or_the_new_one(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        without_exchange(monkeypatch)
    seen = []
    for number in itertools.count():
        save_dir = tmp_path / str(number)
        with directory.appearing(save_dir / "tag") as hidden:
            for name in ("one", "two"):
                (hidden / name).write_text("old")
        directory.write_latest(save_dir, "tag")
        child = os.fork()
        if child == 0:
            gc.freeze()
            try:
                save_and_die(save_dir, "new", number)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert directory.read_latest(save_dir) == "tag"
        tag = directory.resolve(save_dir, "tag")
        contents = [path.read_text()[-3:] for path in sorted(tag.iterdir())]
        assert contents in (["old"] * 2, ["new"] * 2)
        seen.append(contents[0])
        with directory.appearing(save_dir / "tag") as hidden:
            (hidden / "one").write_text("again")
        assert [path.read_text() for path in tag.iterdir()] == ["again"]
        assert [path.name for path in save_dir.glob("*tag*")] == ["tag"]
        if status == 0:
            break
        assert os.WIFSIGNALED(status), number
    assert seen == sorted(seen, reverse=True), "the new tag stays, once it is there"
    assert len(seen) > 20


@pytest.mark.parametrize("exchange", [True, False])
def test_a_tag_is_replaced_without_a_moment_without_one(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        without_exchange(monkeypatch)
    for content in ("old", "new"):
        with directory.appearing(tmp_path / "tag") as hidden:
            (hidden / "file").write_text(content)
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
        tag.rename(tmp_path / ".global_step1.replaced")
        engine.load_checkpoint(tmp_path)
        assert tag.is_dir()
        tag.rename(tmp_path / ".global_step1.replaced")
        engine.save_checkpoint(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", *BESIDE_TAGS]
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
    assert names == {".global_step1.old", "global_step1", *BESIDE_TAGS}


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
        with monkeypatch.context() as patched:
            patched.setattr(directory.ctypes, "CDLL", Library)
            with directory.appearing(tmp_path / "tag") as hidden:
                (hidden / "file").write_text(content)
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
        resume(engine, tmp_path / "elsewhere", tag="global_step1")
        train(engine, 1)
        assert all(map(torch.equal, train(engine, 3), expected))
    assert step >= 1
