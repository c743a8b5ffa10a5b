"""What the processes of a launch run: each function is entered by every rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from stronghold.errors import LaneError, RankError
from stronghold.train import rates
from tests.models import MODELS, loss_of, token_batch
from tests.support.counted import of_bytes
from tests.support.rank_cases import CASES, CLOSE, FILES, files, planned
from tests.support.rank_checkpoints import checkpoint, full_disk, replaced, thrown_away
from tests.support.rank_looks import (
    accumulated,
    alone,
    gradients,
    halved,
    life,
    memory,
    overflow,
    refused,
    surface,
    traces,
)
from tests.support.rank_models import engine_of, full, num_ranks, rank, train
from tests.support.training import Run, config, initialized, on


def tested(key: str, all_names: Iterable[str]) -> list[str]:
    """The names that this run tests: the environment's, or all."""
    return json.loads(os.environ[key]) if key in os.environ else list(all_names)


def two_ranks(folder: Path) -> dict[str, Any]:
    """Everything that needs two ranks and no failure."""
    return {
        "bits": {name: CASES[name]() for name in tested("BITS", CASES)},
        "close": {name: CLOSE[name]() for name in tested("CLOSE", CLOSE)},
        "files": {
            name: (FILES[name](), FILES[name](in_memory=True)) for name in tested("FILES", FILES)
        },
        "memory on files": memory(clipping=1.0, **files("masters")),
        "memory": memory(clipping=1.0),
        "memory without gate": memory(clipping=0.0),
        **alone(),
        "halved": halved(),
        "surface": surface(),
        "accumulated": accumulated(),
        "thrown away": thrown_away(folder),
        "gradients": {name: gradients(name) for name in ("fp32", "bf16")},
        "overflow": overflow(),
        "refused": refused(),
        "checkpoint": checkpoint(folder),
        "life": life(),
        "traces": traces(folder),
        "planned": planned(),
        "broken": broken(),
        "full disk": full_disk(folder),
        "replaced": replaced(folder),
        "machine": machine_at_start(folder),
    }


def streams(_: Path) -> list[Run]:
    """On GPUs: chunks that take turns on two streams, and on one."""
    section = {"device": "cuda", "window": 1, "resident_layers": 0, "activations": "recompute"}
    return [
        train("gpt", config(clipping=0.5, section={**section, "chunk": 1, "streams": count}))
        for count in (2, 1)
    ]


LENGTHS = (64, 256)  # tokens of a sequence, of each rank


def longer(_: Path) -> dict[str, Any]:
    """Rank 1 has the longer batches, and the plan is made for them."""
    total_bytes = 20_000_000
    found: dict[str, Any] = {"losses": []}
    with pytest.MonkeyPatch.context() as patch:
        of_bytes(total_bytes, patch)
        section = {"gpu_memory": total_bytes, "cpu_threads": 1}
        torch.manual_seed(0)
        model, _ = MODELS["llama"]()
        engine = initialized(model, config(clipping=0.0, section=section))
        with engine.inspect().device.counted():
            for step in range(3):
                batch = token_batch(2 * step + rank(), length=LENGTHS[rank()])
                loss = loss_of(engine(**batch))
                engine.backward(loss)
                engine.step()
                found["losses"].append(loss.detach().clone())
                del loss
        found["tokens"] = engine.plan.demand.tokens
        found["plan"] = (engine.plan.activations, sorted(engine.plan.resident))
        state = engine.module_state_dict()
        found["weights"] = {name: value.clone() for name, value in state.items()}
        engine.destroy()
    return found


def communicators(_: Path) -> dict[str, Any]:
    """On GPUs: what the ranks' communicator takes, and a step beside it."""
    before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    model, make_batch = MODELS["gpt"]()
    section = {"device": "cuda", "window": 1, "resident_layers": 0}
    engine = engine_of(model, config(clipping=0.5, section=section))
    counted = dict(engine.inspect().ranks.sent_bytes)
    loss = loss_of(engine(**on(engine.device, make_batch(0))))
    engine.backward(loss)
    engine.step()
    now = engine.inspect()
    found = {
        "before": before,
        "taken": now.ranks.device_bytes,
        "budget": now.demand.gpu_budget_bytes,
        "counted": counted,
    }
    engine.destroy()
    return found


FOUR: dict[str, dict[str, Any]] = {"gpt": {}, "experts": {}, "choosy": {"alike": 4}}


def four_ranks(folder: Path) -> dict[str, Run]:
    """Cases that are exact with four ranks too: their batches are the same one."""
    return {
        name: train(
            name, config(clipping=0.0), steps=2, batches_per_step=4, options=options, same=True
        )
        for name, options in FOUR.items()
    }


def fail(folder: Path) -> None:
    """The last rank ends, in the way that HOW names, in its third step."""
    how = os.environ["HOW"]
    model, make_batch = MODELS["gpt"]()
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()  # on a busy machine processes start seconds apart
    section = {"rank_timeout_s": 8.0, "nvme": {"path": str(disk), "spill": "masters"}}
    engine = engine_of(model, config(clipping=0.0, section=section))
    for step in range(5):
        loss = loss_of(engine(**make_batch(step)))
        if step == 3 and rank() == num_ranks() - 1:
            (folder / "failing").write_text(str(time.time()))
            if how == "raise":
                raise ArithmeticError("a batch of nonsense")
            if how == "disk":
                engine._job.trainer.arrays._files.write = full
            else:
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        engine.backward(loss)
        engine.step()
    engine.synchronize()
    engine.destroy()


def broken() -> str:
    """Backward raises on one rank, when other layers were reduced."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, config(clipping=0.0))
    said = ""
    if rank() == 1:
        next(iter(model.parameters())).register_hook(lambda gradient: 1 / 0)
    try:
        engine.backward(loss_of(engine(**make_batch(rank()))))
        engine.step()
    except (RankError, LaneError, ZeroDivisionError) as error:
        said = str(error)
    torch.distributed.barrier()
    try:
        engine.backward(loss_of(engine(**make_batch(rank()))))
    except (RankError, LaneError) as error:
        said += " | " + str(error)
    with contextlib.suppress(LaneError, RankError):
        engine.destroy()
    return said


def machine_at_start(folder: Path) -> tuple[Any, int]:
    """The rates with which an engine starts that finds no profile, and how often this rank has
    measured."""
    section = {"gpu_memory": 1 << 20, "cpu_threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STRONGHOLD_PROFILE")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(rates, "last_cache_bytes", lambda: 64 << 20)  # as in test_doctor
        measure = Mock(wraps=rates.measure_machine)
        patch.setattr(rates, "measure_machine", measure)
        engine = engine_of(MODELS["llama"]()[0], config(section=section))
        try:
            return engine._job.machine, measure.call_count
        finally:
            engine.destroy()
