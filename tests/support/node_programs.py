"""What the processes of `test_nodes` run: each function is entered by every rank of every node."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import directory
from stronghold.errors import CheckpointError
from tests.conftest import choose_kernels
from tests.models import MODELS, loss_of
from tests.support import rank_cases, rank_checkpoints, rank_looks, rank_programs
from tests.support.rank_cases import CASES
from tests.support.rank_models import Wide, engine_of, num_ranks, rank, train
from tests.support.training import config

# Frozen and tied parameters, experts chosen by the data, ranks that skip layers, files.
BITS = ("gpt_tied", "frozen", "experts", "choosy", "hostile", "retried", "written", "all in files")


def two_nodes(folder: Path) -> dict[str, Any]:
    """Everything that needs two nodes of one rank and no failure."""
    return {
        "bits": {name: CASES[name]() for name in json.loads(os.environ["BITS"])},
        "memory": memory(),
        "traffic": traffic(),
        **rank_looks.alone(),
        "checkpoint": rank_checkpoints.checkpoint(folder),
        "apart": apart(folder),
        "seeds": seeds(),
        "new weights": new_weights(),
        "cores": cores(),
        "planned": rank_cases.planned(),
    }


def four_ranks(folder: Path) -> dict[str, Any]:
    """Two nodes of two ranks."""
    return {
        "bits": rank_programs.four_ranks(folder),
        "memory": memory(),
        "traffic": traffic(),
        "elsewhere": rank_checkpoints.load_elsewhere(folder) if "CHECKPOINT" in os.environ else {},
    }


def memory() -> dict[str, Any]:
    engine = engine_of(Wide(), config(precision="bf16", section={"layers": "blocks"}))
    try:
        engine.backward(engine(torch.ones(2, 512, dtype=torch.bfloat16)).float().mean())
        engine.step()
        engine.synchronize()
        report = engine.memory_report()
        return {
            "host_peak": report.host_peak,
            "host_planned": report.host_planned,
            "padded_numel": sum(layer.trained_numel for layer in engine.inspect().layout.layers),
            "plan": str(engine.plan),
        }
    finally:
        engine.destroy()


def traffic() -> dict[str, Any]:
    """Bytes that a rank gives to collectives in a step, and the model's padded elements."""
    model, make_batch = MODELS["gpt"](num_layers=3)
    engine = engine_of(model, config())
    try:
        before: dict[str, int] = {}
        for step in range(2):
            before = dict(engine.inspect().ranks.sent_bytes)
            engine.backward(loss_of(engine(**make_batch(num_ranks() * step + rank()))))
            engine.step()
            engine.synchronize()
        now = engine.inspect()
        return {
            "sent": {k: n - before.get(k, 0) for k, n in now.ranks.sent_bytes.items()},
            "trained": sum(layer.trained_numel for layer in now.layout.layers),
        }
    finally:
        engine.destroy()


def apart(folder: Path) -> dict[str, str]:
    """A save into a folder that each node has for itself, and a load from there."""
    model, _ = MODELS["gpt"]()
    engine = engine_of(model, config())
    own, found = folder / f"of-node-{rank()}", {}
    directory.WAIT_S = 0.5
    try:
        engine.save_checkpoint(own)
    except CheckpointError as error:
        found["save"] = str(error)
    found["left"] = str(own.exists())
    if rank() == 0:
        shutil.copytree(folder / "saved", own)
    try:
        engine.load_checkpoint(own)
    except CheckpointError as error:
        found["load"] = str(error)
    engine.destroy()
    return found


def seeds() -> dict[str, torch.Tensor]:
    """Models of different values on every rank: the first's hold, as under DeepSpeed."""
    torch.manual_seed(rank())
    engine = engine_of(Wide(16, 2), config(section={"layers": "blocks"}))
    try:
        return {name: p.detach().clone() for name, p in engine.named_parameters()}
    finally:
        engine.destroy()


def new_weights() -> dict[str, torch.Tensor]:
    """A state dict of other values on every rank."""
    engine = engine_of(Wide(16, 2), config(section={"layers": "blocks"}))
    try:
        state = {k: torch.full_like(v, 1.0 + rank()) for k, v in engine.module.state_dict().items()}
        engine.module.load_state_dict(state)
        return {name: p.detach().clone() for name, p in engine.named_parameters()}
    finally:
        engine.destroy()


def cores() -> dict[str, Any]:
    engine = engine_of(Wide(16, 2), config(section={"layers": "blocks"}))
    ranks = engine.inspect().ranks
    engine.destroy()
    return {"cores": len(ranks.cores), "node": ranks.node, "nodes": ranks.num_nodes}


def machine(folder: Path) -> dict[str, Any]:
    """What each of two machines finds."""
    engine = engine_of(Wide(16, 2), config(section={"layers": "blocks"}))
    found = {
        "host": socket.gethostname(),
        "processes": os.stat("/proc/self/ns/pid").st_ino,
        "nodes": engine.inspect().ranks.num_nodes,
    }
    engine.destroy()
    return found | {
        "run": train("gpt", config(clipping=0.0)),
        "checkpoint": rank_checkpoints.session(folder / "saved", None, steps=1)["losses"],
    }


def enter(folder: Path) -> None:
    """The body of a process that torchrun starts."""
    choose_kernels()
    torch.distributed.init_process_group("gloo")
    (folder / f"result-{rank()}").write_bytes(pickle.dumps(machine(folder)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    enter(Path(sys.argv[1]))
