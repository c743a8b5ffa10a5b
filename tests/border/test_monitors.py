"""DeepSpeed's monitors on our engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import stronghold
from stronghold.errors import ConfigError
from tests.models import MODELS
from tests.support.training import assert_identical, config, initialized, train_windowed

WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_num_steps": 9}}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DeepSpeed's monitors ask its process group for the rank."""
    mine = not torch.distributed.is_initialized()  # another test may have left one
    if mine:
        store = tmp_path_factory.mktemp("group") / "store"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=0, world_size=1
        )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    yield
    if mine:
        deepspeed.comm.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def rows(folder: Path, name: str) -> list[tuple[int, float]]:
    """(samples, value) of one event, as the CSV writer left them."""
    (written,) = folder.rglob(f"Train_Samples_{name}.csv")
    lines = written.read_text().splitlines()
    assert lines[0] == f"step,{name}"
    return [(int(samples), float(found)) for samples, found in (x.split(",") for x in lines[1:])]


def train(extra: dict[str, Any], *, micro_batches: int, accumulation: int = 1) -> Any:
    """An engine that has trained, and the losses of its micro-batches."""
    model, make_batch = MODELS["gpt"]()
    engine = initialized(model, {**config(accumulation=accumulation), **extra})
    losses = []
    for micro in range(micro_batches):
        loss = engine(**make_batch(micro))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def csv(folder: Path) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"}}


def test_monitors_get_the_mean_loss_and_the_rate_of_each_step_over_samples(tmp_path: Path) -> None:
    extra = {**csv(tmp_path), "scheduler": WARMUP}
    engine, losses = train(extra, micro_batches=6, accumulation=2)
    engine.destroy()
    means = [(losses[i] + losses[i + 1]) / 2 for i in (0, 2, 4)]
    found = rows(tmp_path, "train_loss")
    assert [samples for samples, _ in found] == [4, 8, 12]
    assert [mean for _, mean in found] == pytest.approx(
        means, rel=1e-6
    )  # halves are summed in fp32
    assert [samples for samples, _ in rows(tmp_path, "lr")] == [4, 8, 12]
    assert not list(tmp_path.rglob("*loss_scale*"))


def test_monitors_get_the_early_updates_of_each_step(tmp_path: Path) -> None:
    extra = {**csv(tmp_path), "stronghold": {"window": 2, "early_layers": "all"}}
    engine, _ = train(extra, micro_batches=3)
    num_early = len(engine.plan.early)
    engine.destroy()
    kinds = ("committed", "left", "dropped")
    found = [rows(tmp_path, f"early_{kind}") for kind in kinds]
    assert [samples for samples, _ in found[0]] == [2, 4, 6]
    assert [sum(n for _, n in row) for row in zip(*found, strict=True)] == [num_early] * 3


def test_monitors_get_the_loss_scale_in_fp16(tmp_path: Path) -> None:
    section = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}
    engine, _ = train({**csv(tmp_path), "fp16": section}, micro_batches=3)
    scale = engine.optimizer.loss_scale
    engine.destroy()
    found = rows(tmp_path, "loss_scale")
    assert found[-1] == (6, scale)
    assert scale > 64


def test_a_writer_that_is_not_installed_is_an_import_error_and_frees_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    model, make_batch = MODELS["gpt"]()
    made = {**config(), "wandb": {"enabled": True}}
    with pytest.raises(ImportError):
        stronghold.initialize(model=model, config=made, model_parameters=model.parameters())
    model(**make_batch(0)).backward()


def test_without_a_monitor_the_engine_says_that_it_is_off() -> None:
    engine, _ = train({}, micro_batches=1)
    assert engine.monitor.enabled is False
    engine.destroy()


def test_monitors_never_change_training(tmp_path: Path) -> None:
    runs = [
        train_windowed(MODELS["gpt"], steps=3, settings={**config(accumulation=2), **extra})
        for extra in ({}, csv(tmp_path))
    ]
    assert_identical(*runs)


def test_dump_state_logs_the_config(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("DeepSpeed").propagate = True
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        engine, _ = train({"dump_state": True}, micro_batches=1)
    engine.destroy()
    assert any("gradient_accumulation_steps" in record.message for record in caplog.records)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "torch.bfloat16"])
def test_sums_are_fp32_whichever_dtype_the_config_names(dtype: str) -> None:
    engine, _ = train({"data_types": {"grad_accum_dtype": dtype}}, micro_batches=1)
    assert engine.get_data_types()[1] is torch.float32
    engine.destroy()


def test_sums_in_a_dtype_without_gradients_are_refused() -> None:
    made = {**config(), "data_types": {"grad_accum_dtype": "int8"}}
    with pytest.raises(ConfigError, match=r"grad_accum_dtype: got .* added up in fp32"):
        stronghold.initialize(model=MODELS["gpt"]()[0], config=made)
