"""Laws of forked children: an engine is its process's; a child is told so at once, and ends."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.engine import live_engines
from tests.support.checkpoints import BESIDE_TAGS, make_batch, session, train
from tests.support.children import run
from tests.support.training import on

OURS = "this engine belongs to the parent process"
LIMIT_S = 30.0  # a child that hangs does so for ever
# Every operation is late: updates are under way whenever a child is forked.
SLOW = {"jitter_s": 0.005, "seed": 1}
STREAMED: dict[str, Any] = {"window": 2, "emulated": SLOW}
WHOLE: dict[str, Any] = {"emulated": SLOW}


def forked(body: Callable[[], object]) -> str:
    """What `body` raises in a forked child, "" for nothing; "hangs", or the signal that ended it,
    where it does not come back."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        said = ""
        try:
            body()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + LIMIT_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            return "hangs"
        time.sleep(0.005)
    with os.fdopen(reader) as pipe:
        if os.WIFSIGNALED(ended[1]):
            return signal.Signals(os.WTERMSIG(ended[1])).name
        return pipe.read()


def batch_of(engine: Any) -> dict[str, torch.Tensor]:
    return on(engine.device, make_batch(7))


def first_value(engine: Any) -> float:
    return float(next(iter(engine.module.parameters())).sum())


USES: dict[str, Callable[[Any, Path], object]] = {
    "forward": lambda engine, _: engine(**batch_of(engine)),
    "backward": lambda engine, _: engine.backward(torch.zeros(())),
    "step": lambda engine, _: engine.step(),
    "train": lambda engine, _: train(engine, 1),
    "parameters": lambda engine, _: first_value(engine),
    "state_dict": lambda engine, _: engine.module.state_dict(),
    "module_state_dict": lambda engine, _: engine.module_state_dict(),
    "load_state_dict": lambda engine, _: engine.module.load_state_dict({}, strict=False),
    "copy": lambda engine, _: copy.deepcopy(engine.module),
    "pickle": lambda engine, _: torch.save(engine.module, io.BytesIO()),
    "synchronize": lambda engine, _: engine.synchronize(),
    "save_checkpoint": lambda engine, path: engine.save_checkpoint(path),
    "load_checkpoint": lambda engine, path: engine.load_checkpoint(path),
    "wait_for_checkpoint": lambda engine, _: engine.wait_for_checkpoint(),
    "save_16bit_model": lambda engine, path: engine.save_16bit_model(path),
}
# A whole model has nothing of ours on its modules: calling it computes with its values.
CALLS = {"the model itself": lambda engine, _: engine.module(**batch_of(engine))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("section", "uses"), [(STREAMED, USES | CALLS), (WHOLE, USES)])
def test_whatever_uses_an_engine_in_a_child_is_refused_at_once(
    section: dict[str, Any], uses: dict[str, Callable[[Any, Path], object]], tmp_path: Path
) -> None:
    with session(section={**section, "emulated": {}}) as engine:
        expected = train(engine, len(uses) + 1)
    found = {}
    with session(section=section) as engine:
        losses = train(engine, 1)
        for name, use in uses.items():
            found[name] = forked(lambda use=use: use(engine, tmp_path))
            losses += train(engine, 1)
    assert {name for name, said in found.items() if OURS not in said} == set(), found
    assert all(map(torch.equal, losses, expected)), "the parent loses nothing"
    assert list(tmp_path.iterdir()) == []


def drop(engines: list[Any]) -> None:
    engines.clear()
    gc.collect()


ENDS: dict[str, Callable[[list[Any]], object]] = {
    "destroy": lambda engines: engines[0].destroy(),
    "finish": lambda engines: engines[0].finish(),
    "exit": lambda engines: live_engines.finish_engines(),
    "drop": drop,
}


@pytest.mark.parametrize("section", [STREAMED, WHOLE], ids=["streamed", "whole"])
def test_a_child_ends_an_engine_without_a_trace(section: dict[str, Any], tmp_path: Path) -> None:
    section = {**section, "async_checkpoint": True}
    with session(section={**section, "emulated": {}}) as engine:
        expected = train(engine, len(ENDS) + 1)
    with session(section=section) as engine:
        losses = train(engine, 1)
        for name, end in ENDS.items():
            engine.save_checkpoint(tmp_path, tag=name)
            assert forked(lambda end=end: end([engine])) == "", name
            losses += train(engine, 1)
        engine.wait_for_checkpoint()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*ENDS, *BESIDE_TAGS])
    assert all(map(torch.equal, losses, expected))


PROGRAM = """
import os, sys
from tests.support.checkpoints import session, train
with session(section={"async_checkpoint": True, "window": 2, "emulated": {"jitter_s": 0.01}}) as e:
    train(e, 1)
    e.save_checkpoint(sys.argv[1])
    child = os.fork()
    if child == 0:
        sys.exit(7)  # as a data loader's worker or a helper of the user's ends
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    e.wait_for_checkpoint()
"""


def test_a_child_that_exits_during_an_asynchronous_save_ends(tmp_path: Path) -> None:
    # Without a process group: a child that exits with gloo's is aborted by gloo itself.
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    status, said = run(PROGRAM, tmp_path / "saved", folder=tmp_path, env=environment)
    assert status == 0, said
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "global_step1",
        *BESIDE_TAGS,
    ]
