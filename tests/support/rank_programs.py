"""What the processes of a launch run: each function is entered by every rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from stronghold.distributed.sharding import RankTeam
from stronghold.errors import LaneError, RankError
from stronghold.memory import rates
from tests.models import MODELS, loss_of, token_batch
from tests.support.counted import of_bytes
from tests.support.rank_cases import CASES, CLOSE, FILES, files, planned
from tests.support.rank_checkpoints import checkpoint, full_disk, replaced
from tests.support.rank_looks import (
    alone,
    gradients,
    halved,
    life,
    memory,
    overflow,
    refused,
    surface,
    traces,
    traffic,
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
        "traffic": traffic(),
        **alone(),
        "halved": halved(),
        "surface": surface(),
        "gradients": {name: gradients(name) for name in ("fp32", "bf16")},
        "overflow": overflow(),
        "refused": refused(),
        "checkpoint": checkpoint(folder),
        "life": life(),
        "traces": traces(folder),
        "planned": planned(),
        "astray": [astray("gather", clipping=1.0), astray("reduce", clipping=0.0)],
        "diverged": {way: diverged(way) for way in tested("WAYS", WAYS)},
        "broken": [broken(0), broken(-1)],
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
    """On GPUs: what the ranks' communicators take, and a step beside them."""
    before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    model, make_batch = MODELS["gpt"]()
    section = {"device": "cuda", "window": 1, "resident_layers": 0}
    engine = engine_of(model, config(clipping=0.5, section=section))
    counted = engine.inspect().ranks.received_bytes
    loss = loss_of(engine(**on(engine.device, make_batch(0))))
    engine.backward(loss)
    engine.step()
    now = engine.inspect()
    found = {
        "before": before,
        "taken": now.ranks.communicator_bytes,
        "budget": now.demand.gpu_budget_bytes,
        "counted": counted,
    }
    engine.destroy()
    return found


FOUR: dict[str, dict[str, Any]] = {"gpt": {}, "experts": {}, "choosy": {"alike": 4}}


def four_ranks(folder: Path) -> dict[str, Run]:
    """Cases that are exact with four ranks too."""
    return {
        name: train(name, config(clipping=0.0), steps=2, batches_per_step=4, options=options)
        for name, options in FOUR.items()
    }


def submit_or_fail(submit: Any, verb: str, *what: Any) -> Any:
    return full() if verb == "write" else submit(verb, *what)


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
                store = engine.inspect().files
                store.submit = partial(submit_or_fail, store.submit)
            else:
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        engine.backward(loss)
        engine.step()
    engine.synchronize()
    engine.destroy()


def astray(lane: str, *, clipping: float) -> str:
    """One rank is noted for a gather or a reduction that the other does not make."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, config(clipping=clipping))
    before = [p.detach().clone() for p in engine.parameters()]
    said, meet = "nothing was raised", RankTeam.meet

    def note_and_meet(team: RankTeam, *step: Any) -> list[float]:
        team.note(lane, 0)
        return meet(team, *step)

    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(RankTeam, "meet", note_and_meet)
        try:
            engine.backward(loss_of(engine(**make_batch(rank()))))
            engine.step()
        except (RankError, LaneError) as error:
            said = str(error)
    torch.distributed.barrier()
    with contextlib.suppress(LaneError):
        engine.destroy()
    assert all(map(torch.equal, before, model.parameters())), "weights have changed"
    return said


WAYS = ("skips", "order", "forward", "backward")


def diverged(way: str) -> str:
    """Rank 1 skips a block, takes three in another order, or calls a pass once more. What the error
    says; weights are those before."""
    model, make_batch = MODELS["gpt"](num_layers=4)
    section = {"window": 2, "rank_timeout_s": 5.0}  # one way waits as long
    engine = engine_of(model, config(clipping=0.0, section=section))
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    error_text = "nothing was raised"
    first, *others = model.blocks
    if rank() == 1 and way == "skips":
        model.run = lambda x, _: torch.nn.Sequential(first, *others[1:])(x)
    if rank() == 1 and way == "order":
        model.run = lambda x, _: torch.nn.Sequential(first, *others[::-1])(x)
    more = {way} if rank() == 1 else set()
    try:
        loss = loss_of(engine(**make_batch(rank())))
        if "forward" in more:
            loss = loss + loss_of(engine(**make_batch(rank())))
        engine.backward(loss)
        if "backward" in more:
            engine.backward(loss_of(engine(**make_batch(rank()))))
        engine.step()
    except (RankError, LaneError) as error:
        error_text = str(error)
    torch.distributed.barrier()
    with contextlib.suppress(LaneError, RankError):
        engine.destroy()
    assert all(map(torch.equal, before, parameters)), "weights have changed"
    return error_text


def broken(parameter: int) -> str:
    """Backward raises on one rank, when other layers were reduced, or before."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, config(clipping=0.0))
    said = ""
    if rank() == 1:
        list(model.parameters())[parameter].register_hook(lambda gradient: 1 / 0)
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
    with contextlib.suppress(LaneError):
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
            return engine._stack.machine, measure.call_count
        finally:
            engine.destroy()
