"""A kill at any instant of `stronghold prepare` leaves no base; a full disk leaves none either."""

from __future__ import annotations

import errno
import gc
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stronghold.checkpoint import directory
from stronghold.checkpoint.base import BaseManifest, open_base
from stronghold.checkpoint.prepare import prepare
from stronghold.native import IoQueue
from tests.support.bases import write_model

LONGEST_S = 0.4  # of the random wait before the kill: several bases


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Torch's other threads do not come along when a process forks."""
    torch.set_num_threads(1)


def prepare_for_ever(model_dir: Path, folder: Path, done: int) -> None:
    """Prepare bases with new names, and say each through the pipe `done`."""
    number = len(list(folder.glob("base*")))
    while True:
        prepare(model_dir, folder / f"base{number}", frozen="nf4", max_file_bytes=1)
        os.write(done, number.to_bytes(4, "little"))
        number += 1


def kill_while_preparing(model_dir: Path, folder: Path, wait_s: float) -> int:
    """The number of the last base that a killed process said. The wait starts at the first one."""
    read, write = os.pipe()
    child = os.fork()  # a new interpreter would take seconds to import torch
    if child == 0:
        gc.freeze()  # slabs of this process are not mapped there
        try:
            prepare_for_ever(model_dir, folder, write)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    try:
        assert select.select([read], [], [], 60)[0], "the child never prepared a base"
        time.sleep(wait_s)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    said = b""
    while piece := os.read(read, 1 << 16):
        said += piece
    os.close(read)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    return int.from_bytes(said[-4:], "little")


def kill_and_open(folder: Path, kills: int, seed: int) -> int:
    """Kill `kills` times. Returns how often a base was cut in two."""
    model_dir = folder / "model"
    write_model(model_dir)
    chosen, num_cut = random.Random(seed), 0
    for _ in range(kills):
        last = kill_while_preparing(model_dir, folder, chosen.uniform(0.0, LONGEST_S))
        num_cut += any(path.name.startswith(".base") for path in folder.iterdir())
        published = sorted(int(path.name[4:]) for path in folder.glob("base*"))
        # The last one may have got its name just before the kill.
        assert published in (list(range(last + 1)), list(range(last + 2)))
        for number in published[-2:]:
            with open_base(folder / f"base{number}", frozen="nf4") as base:
                base.check_contents()
    return num_cut


def test_kill_9_at_a_random_instant_leaves_whole_bases_alone(tmp_path: Path) -> None:
    kill_and_open(tmp_path, kills=4, seed=0)
    prepare(tmp_path / "model", tmp_path / "after", frozen="nf4")
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert hidden == [], "the next one removes what killed processes left"


@pytest.mark.slow
def test_kill_9_fifty_times(tmp_path: Path) -> None:
    num_cut = kill_and_open(tmp_path, kills=50, seed=1)
    print(f"50 kills, {num_cut} of them within a base; all others opened with their checksums")
    assert num_cut >= 10, f"only {num_cut} of 50 kills hit a base: the test shows little"


MOMENTS = ("write", "manifest", "publish")


def fail_at(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at this moment of the next base."""

    def refuse(*_: object, **__: object) -> Iterator[None]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if moment == "write":
        monkeypatch.setattr(IoQueue, "wait", refuse)
    elif moment == "manifest":
        monkeypatch.setattr(BaseManifest, "write", refuse)
    else:
        monkeypatch.setattr(directory, "publish", refuse)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_full_disk_leaves_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", num_layers=1)
    fail_at(moment, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        prepare(tmp_path / "model", tmp_path / "bases" / "one", frozen="nf4")
    assert list((tmp_path / "bases").iterdir()) == []
