"""A rank is killed: all processes end, and the log names the rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.support.children import ROOT
from tests.support.killed_programs import MOMENTS, TIMEOUT_S
from tests.support.ranks import Launch

PROGRAM = "tests.support.killed_programs"
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc_per_node=2", "-m"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus=2", "--module"],
}
LIMIT_S = 30.0
# Without a connection only a launcher's agent knows which rank has ended; torchrun's says so.
UNNAMED = [("deepspeed", "start")]


def names(rank: int) -> str:
    """What the log has of a rank that was killed: from another rank, or from torchrun's agent."""
    return rf"rank {rank} has (ended|failed)|rank +: {rank} \(local_rank: {rank}\)"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize("moment", MOMENTS)
def test_launchers_end_all_ranks_in_seconds(
    launcher: str, moment: str, victim: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    environment |= {"MOMENT": moment, "VICTIM": str(victim), "TIMEOUT_S": "300"}
    module, *words = LAUNCHERS[launcher]
    port = f"--master_port={free_port()}"
    ended = subprocess.run(
        [sys.executable, "-m", module, port, *words, PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    seconds = time.time() - float((tmp_path / "died").read_text())
    assert ended.returncode != 0
    assert seconds < LIMIT_S, ended.stdout[-3000:]
    print(f"{launcher}, {moment}, rank {victim}: {seconds:.1f} s, {ended.returncode}")
    if (launcher, moment) not in UNNAMED:
        assert re.search(names(victim), ended.stdout), ended.stdout[-6000:]
    for path in tmp_path.glob("process-*"):
        assert not Path("/proc", path.read_text()).exists(), path


def test_a_rank_that_never_comes_ends_the_other_after_the_time_out(tmp_path: Path) -> None:
    """Each process was started by hand: no launcher ends the others."""
    environment = {"MOMENT": "start", "VICTIM": "1"}
    run = f"{PROGRAM}:train"
    with Launch(run=run, num_ranks=2, folder=tmp_path, environment=environment) as launch:
        status = launch.processes[0].wait(timeout=120)
        # On a busy machine the victim may still import when the other one gives up.
        died = tmp_path / "died"
        seconds = time.time() - float(died.read_text()) if died.exists() else 0.0
        output = launch.output(0)
    assert status == 1, output
    assert "RankError: stronghold.initialize: not all ranks have come" in output
    assert "stronghold.rank_timeout_s" in output
    assert seconds < TIMEOUT_S + LIMIT_S
