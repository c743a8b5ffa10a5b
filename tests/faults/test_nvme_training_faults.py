"""Laws of training on NVMe when something breaks: an error that says what and where within one
step, no weight that changes silently, a model that is given back, and a next run that starts."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from tests.faults.test_lane_failures import fail_in, in_time, run_steps
from tests.models import MODELS
from tests.support.pages import mounted
from tests.support.training import config, initialized

PAGE_NUMEL = 2048
MODES = {"no norm": (0.0, 1), "gated": (0.5, 1), "accumulated": (0.5, 2)}
# What every transfer of a broken disk reaches, and the error that it gives.


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", PAGE_NUMEL * 24)


def make_engine(path: Path, spill: str, clipping: float = 0.5, accumulation: int = 1) -> Any:
    torch.manual_seed(0)
    model, make_batch = MODELS["gpt"](num_layers=4)
    section = {"window": 2, "nvme": {"path": str(path), "spill": spill}}
    settings = config(
        clipping=clipping, accumulation=accumulation, precision="bf16", section=section
    )
    return initialized(model, settings), make_batch


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
def test_after_a_failure_every_weight_is_of_one_step_or_the_next(mode: str, tmp_path: Path) -> None:
    clipping, accumulation = MODES[mode]
    found = []
    for steps in (2, 3):
        engine, make_batch = make_engine(tmp_path, "moments", clipping, accumulation)
        run_steps(engine, make_batch, range(steps))
        engine.destroy()
        found.append(weights(engine.module))
    for layer in engine.inspect().layout.streamed[::2]:
        for verb in ("load", "spill", "update"):
            engine, make_batch = make_engine(tmp_path, "moments", clipping, accumulation)
            run_steps(engine, make_batch, range(2))
            with pytest.MonkeyPatch.context() as patch:
                fail_in(engine.inspect().device, patch, f"{verb} {layer}")
                assert in_time(partial(run_steps, engine, make_batch, range(2, 4))) is not None
            engine.destroy()
            after = weights(engine.module)
            names = engine.inspect().layers[layer].trained
            for name, value in after.items():
                same = [torch.equal(value, of_step[name]) for of_step in found]
                # A layer takes several pieces: those before the one that failed are new.
                assert any(same) or name in names, (verb, layer, name)


def test_a_failing_piece_fails_the_layer(tmp_path: Path) -> None:
    """Later pieces of a layer must not make its fence look well."""
    for verb in ("load", "update", "spill"):
        engine, make_batch = make_engine(tmp_path, "weights")
        run_steps(engine, make_batch, range(1))
        layer = engine.inspect().layout.streamed[1]
        with pytest.MonkeyPatch.context() as patch:
            fail_in(engine.inspect().device, patch, f"{verb} {layer}", only=1)
            assert in_time(partial(run_steps, engine, make_batch, range(1, 3))) is not None
        with pytest.raises(stronghold.LaneError, match=f"{verb} {layer} failed"):
            engine.inspect().layers[layer].wait()
        engine.destroy()


def test_a_read_only_path_is_refused_before_the_run(tmp_path: Path) -> None:
    model, _ = MODELS["gpt"](num_layers=4)
    before = weights(model)
    with mounted(tmp_path, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        settings = config(section={"nvme": {"path": str(tmp_path), "spill": "moments"}})
        with pytest.raises(ConfigError, match=r"stronghold.nvme.path.*no file can be made"):
            stronghold.initialize(model=model, config=settings, model_parameters=model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_that_fails_stops_nobody(beside: bool, tmp_path: Path) -> None:
    """Its error, which is kept, holds what was being read; others read on."""
    state, full, saved = (tmp_path / name for name in ("state", "full", "saved"))
    state.mkdir(), full.mkdir()
    engine, make_batch = make_engine(state, "weights")
    run_steps(engine, make_batch, range(1))
    engine.settings.stronghold.__dict__["async_checkpoint"] = beside

    def save() -> None:
        engine.save_checkpoint(full)
        engine.wait_for_checkpoint()

    kept = []
    for size in (16, 24, 32):  # in the middle of a tensor, sooner or later
        with mounted(full, "-t", "tmpfs", "-o", f"size={size}k", "tmpfs"):
            kept.append(in_time(save))
        assert isinstance(kept[-1], OSError | stronghold.LaneError)
        assert os.strerror(errno.ENOSPC) in str(kept[-1])
        assert in_time(lambda: run_steps(engine, make_batch, range(1, 2))) is None
    assert in_time(lambda: engine.save_checkpoint(saved)) is None
    assert in_time(engine.destroy) is None
    assert all(p.isfinite().all() for p in engine.module.parameters())
