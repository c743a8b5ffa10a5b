"""Processes for tests of several ranks: each runs one function of a module, over gloo on loopback.

Owns their launch and their end. A test that fails kills those that are left.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import choose_kernels, free_port
from tests.support.children import ROOT, Child

CODE = "import sys; from tests.support.ranks import enter; enter(*sys.argv[1:])"
PATIENCE_S = 60.0


@dataclass(kw_only=True)
class Launch:
    """Running ranks: `run` is "module:function", called with the folder as its only argument."""

    run: str
    num_ranks: int
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    num_nodes: int = 1  # by the environment, which is all that tells them apart
    processes: list[Any] = field(default_factory=list)

    def __enter__(self) -> Launch:
        shared = {
            **os.environ,
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks // self.num_nodes),
            "LOCAL_SIZE": str(self.num_ranks // self.num_nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        num_local = self.num_ranks // self.num_nodes
        for rank in range(self.num_ranks):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank % num_local)}
            if self.num_nodes > 1:
                places["STRONGHOLD_NODE"] = f"node {rank // num_local}"
            words = (CODE, self.run, str(self.folder))
            env = {**shared, **places, **self.environment}
            with open(self.folder / f"log-{rank}", "w") as log:
                if env["DS_ACCELERATOR"] == "cuda":  # which does not fork
                    command = [sys.executable, "-c", *words]
                    process: Any = subprocess.Popen(
                        command, cwd=ROOT, env=env, stdout=log, stderr=log
                    )
                else:
                    process = Child(*words, env=env, server=rank % 2, stdout=log, stderr=log)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def finish(self, timeout_s: float = 240.0) -> list[tuple[int | None, str]]:
        """Wait for all: (exit status, output) by rank. Those that do not end, or not within
        `PATIENCE_S` of one that failed, are aborted, and their output ends with their stacks.
        """
        deadline = time.monotonic() + timeout_s
        while None in (ended := [process.poll() for process in self.processes]):
            if any(ended):
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
            if time.monotonic() > deadline:
                for process in self.processes:
                    if process.poll() is None:
                        os.kill(process.pid, signal.SIGABRT)
                        process.wait(timeout=30)
                break
            time.sleep(0.01)
        return [(process.poll(), self.output(rank)) for rank, process in enumerate(self.processes)]

    def output(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text(errors="replace")


def run_ranks(
    run: str, num_ranks: int, folder: Path, *, num_nodes: int = 1, **environment: str
) -> list[Any]:
    """What the function returned on every rank; fails with the output of one that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    with Launch(
        run=run, num_ranks=num_ranks, folder=folder, environment=environment, num_nodes=num_nodes
    ) as launch:
        ended = launch.finish()
    said = "\n".join(
        f"rank {rank} of {num_ranks} ended with {status}:\n{output[-6000:]}"
        for rank, (status, output) in enumerate(ended)
    )
    assert not any(status for status, _ in ended), said
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]


def names_tested(request: pytest.FixtureRequest, test: str) -> str:
    """JSON: the names with which this run calls a test of the module that asks."""
    items: list[Any] = request.session.items
    of_test = [item for item in items if item.path == request.path and item.originalname == test]
    return json.dumps([item.callspec.params["name"] for item in of_test])


def ranks_once(
    run: str,
    num_ranks: int,
    places: pytest.TempPathFactory,
    *,
    num_nodes: int = 1,
    **environment: str,
) -> list[Any]:
    """`run_ranks`, once for all processes of a test run: a file of tests that several take their
    parts of has its fixtures in each."""
    base = places.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / run
    folder.mkdir(exist_ok=True)
    results = [folder / f"result-{rank}" for rank in range(num_ranks)]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(result.exists() for result in results):
            return run_ranks(run, num_ranks, folder, num_nodes=num_nodes, **environment)
    return [pickle.loads(result.read_bytes()) for result in results]


def enter(run: str, folder: str) -> None:
    """The body of each process."""
    faulthandler.enable()
    choose_kernels()
    module, _, function = run.partition(":")
    result = getattr(importlib.import_module(module), function)(Path(folder))
    (Path(folder) / f"result-{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
