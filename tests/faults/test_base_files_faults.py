"""A prepared base that is removed, replaced, truncated or written while a run reads it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.checkpoint.prepare import prepare
from stronghold.devices.lane_name import LaneName
from tests.faults.test_lane_failures import in_time, run_steps
from tests.models import loss_of
from tests.support.bases import write_model
from tests.support.packed import adapted, token_batch
from tests.support.training import config, initialized


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture
def base(directory: Path, tmp_path: Path) -> Path:
    prepare(directory, tmp_path / "base", frozen="nf4")
    return tmp_path / "base"


def engine_of(directory: Path, base: Path, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    model: nn.Module = stronghold.from_pretrained(directory, use_cache=False)
    torch.manual_seed(0)
    with stronghold.placeholders(model):
        model = adapted(model, ["q_proj", "down_proj"])
    nvme = {"path": str(folder), "spill": "weights"}
    section = {"window": 1, "base": str(base), "nvme": nvme}
    return initialized(model, config(clipping=0.5, precision="bf16", section=section))


def train(engine: Any, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        loss = loss_of(engine(**token_batch(step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("way", ["removed", pytest.param("replaced", marks=pytest.mark.slow)])
def test_a_base_that_is_removed_or_replaced_is_read_on(
    way: str, directory: Path, base: Path, tmp_path: Path
) -> None:
    engine = engine_of(directory, base, tmp_path / "a")
    expected = train(engine, range(3))
    engine.destroy()
    engine = engine_of(directory, base, tmp_path / "a")
    losses = train(engine, range(1))
    shutil.rmtree(base)
    if way == "replaced":
        other = tmp_path / "other"
        write_model(other, scale=2.0)
        prepare(other, base, frozen="nf4")
    losses += train(engine, range(1, 3))
    assert all(map(torch.equal, losses, expected))
    model = engine.module
    engine.destroy()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("way", ["truncated", "written to"])
def test_a_base_that_changes_ends_the_run_by_name(
    way: str, directory: Path, base: Path, tmp_path: Path
) -> None:
    engine = engine_of(directory, base, tmp_path / "a")
    train(engine, range(1))
    engine.synchronize()
    # What the next forward needs first is read ahead: that read ends before the file changes.
    stage = engine.inspect().device.lane(LaneName.STAGE)
    stage.submit("nothing", lambda: None).wait()
    (path,) = base.glob("*.bin")
    if way == "truncated":
        os.truncate(path, 4096)
    else:
        with open(path, "r+b") as file:
            file.write(b"x")
        os.utime(path, (1, 1))  # a clock of any resolution
    # mapped: a read past the end would end the process
    read = in_time(engine.module_state_dict)
    assert isinstance(read, OSError)
    assert f"the prepared base was {way}" in str(read)
    error = in_time(lambda: run_steps(engine, token_batch, range(1, 3)))
    assert isinstance(error, stronghold.LaneError)
    cause = error.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == (errno.ENODATA if way == "truncated" else errno.ESTALE)
    assert f"the prepared base was {way}" in str(error)
    assert str(path) in str(error)
    ended = in_time(engine.destroy)
    assert isinstance(ended, OSError)
    assert "cannot be read back" in str(ended)
    assert f"the prepared base was {way}" in str(ended)
    assert list((tmp_path / "a").iterdir()) == []
    shutil.rmtree(base)
    prepare(directory, base, frozen="nf4")
    engine = engine_of(directory, base, tmp_path / "a")  # the next run starts
    train(engine, range(1))
    engine.destroy()
