"""A rank that is killed before the ranks train together is named, and the others end."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port
from tests.support.children import ROOT
from tests.support.meeting_programs import MOMENTS, TIMEOUT_S
from tests.support.ranks import Launch

PROGRAM = "tests.support.meeting_programs"
GONE_S = 15.0  # to notice and to end, on a busy machine
LAUNCHER_S = 30.0

# As a launch by hand begins: each process by itself, and nobody ends the others.
BY_HAND = [(moment, victim) for moment in MOMENTS for victim in (0, 1)]
FAST = [("start", 0), ("groups", 1)]


def environment_of(moment: str, victim: int) -> dict[str, str]:
    environment = {"MOMENT": moment, "VICTIM": str(victim), "LOCAL_SIZE": "2"}
    return {**environment, **({"EARLY_GROUP": "1"} if moment == "group up" else {})}


def since(folder: Path, victim: int) -> float:
    """When the later of both came: the victim to its end, the other to its first wait, if it came
    to one."""
    paths = [folder / name for name in ("died", f"waits-{1 - victim}")]
    return max(float(path.read_text()) for path in paths if path.exists())


@pytest.mark.parametrize(
    ("moment", "victim"),
    [pytest.param(*at, marks=[] if at in FAST else pytest.mark.slow) for at in BY_HAND],
)
def test_the_other_rank_ends_with_the_name_of_the_killed_one(
    moment: str, victim: int, tmp_path: Path
) -> None:
    """Nothing outside shows which process is which rank."""
    with Launch(
        run=f"{PROGRAM}:meet",
        num_ranks=2,
        folder=tmp_path,
        environment=environment_of(moment, victim),
    ) as launch:
        status = launch.processes[1 - victim].wait(timeout=120)
        seconds = time.time() - since(tmp_path, victim)
        output = launch.output(1 - victim)
    assert status == 1, output
    assert re.search(rf"stronghold\.errors\.RankError: .*\brank {victim}\b", output), output
    assert seconds < TIMEOUT_S + GONE_S


@contextlib.contextmanager
def begun_by_hand(folder: Path, environment: dict[str, str]) -> Iterator[list[Any]]:
    """Two processes whose environments, which others see, name their ranks."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **address}
    processes = []
    try:
        for rank in range(2):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"log-{rank}").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", PROGRAM, str(folder)],
                        cwd=ROOT,
                        env={**shared, **places, **environment},
                        stdout=log,
                        stderr=log,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_was_seen_is_missed_at_once(victim: int, tmp_path: Path) -> None:
    """Before it comes, too: the rank stands in the environment of its process."""
    environment = {**environment_of("late", victim), "TIMEOUT_S": "300"}
    with begun_by_hand(tmp_path, environment) as processes:
        status = processes[1 - victim].wait(timeout=120)
        seconds = time.time() - since(tmp_path, victim)
        output = (tmp_path / f"log-{1 - victim}").read_text()
    assert status == 1, output
    assert f"rank {victim} (process {processes[victim].pid}) has ended" in output
    assert seconds < GONE_S


@pytest.mark.parametrize("early", [False, True])
def test_a_rank_that_lives_is_waited_for(early: bool, tmp_path: Path) -> None:
    """Longer than one may give no sign of life, be it to a process group or to the engine."""
    environment = environment_of("group up" if early else "start", 0)
    with begun_by_hand(tmp_path, {**environment, "MOMENT": "slow", "TIMEOUT_S": "2"}) as processes:
        ended = [process.wait(timeout=120) for process in processes]
    assert ended == [0, 0], [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc_per_node=2", "-m"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus=2", "--module"],
}
UNDER_LAUNCHERS = [
    (moment, victim)
    for moment in ("start", "group up", "first agreement", "groups", "building")
    for victim in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("moment", "victim"), UNDER_LAUNCHERS)
def test_launchers_end_all_ranks_in_seconds(
    launcher: str, moment: str, victim: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    environment |= {**environment_of(moment, victim), "TIMEOUT_S": "300"}
    module, *words = LAUNCHERS[launcher]
    port = f"--master_port={free_port()}"
    ended = subprocess.run(
        [sys.executable, "-m", module, port, *words, PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    seconds = time.time() - float((tmp_path / "died").read_text())
    assert ended.returncode != 0
    assert seconds < LAUNCHER_S, ended.stderr[-3000:]
    for path in tmp_path.glob("process-*"):
        assert not Path("/proc", path.read_text()).exists(), path
    assert len(list(tmp_path.glob("process-*"))) == 2
