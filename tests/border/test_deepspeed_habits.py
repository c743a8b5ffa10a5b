"""What programs written for DeepSpeed do besides training; each was found by DeepSpeed's tests."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import logging as deepspeed_logging
from torch import nn

import stronghold
from stronghold import config as configs
from stronghold.errors import ConfigError
from tests.models import MODELS
from tests.support.stock import deepspeeds_engine, one_rank
from tests.support.training import config
from tests.support.twin import Twin, twin


def test_a_model_in_torchs_data_parallelism_is_refused_with_the_way(tmp_path: Path) -> None:
    model, _ = MODELS["gpt"]()
    with one_rank(tmp_path):
        wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ConfigError, match="pass the plain module"):
        stronghold.initialize(model=wrapped, config=config())


@pytest.mark.parametrize(
    ("mpu", "found"),
    [
        (SimpleNamespace(), "no data-parallel group"),
        (SimpleNamespace(get_data_parallel_world_size=lambda: 2), "a data-parallel group of 2"),
    ],
)
def test_ranks_that_split_the_model_are_refused_with_the_way(
    mpu: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    # without the refusal the engine would wait for the other ranks: let it fail at once
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    # another test may have left a process group of one rank
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=f"{found}, expected .* 4 ranks.*Leave mpu out"):
        stronghold.initialize(model=MODELS["gpt"]()[0], config=config(), mpu=mpu)


def test_emptying_the_partition_cache_changes_nothing() -> None:
    with twin() as both:
        both.train(0)
        both.engine.empty_partition_cache()
        both.train(1)


def test_generation_without_the_hooks_of_stage_3_changes_nothing() -> None:
    with twin() as both:
        both.train(0)
        with deepspeed.runtime.zero.unwrap_model_for_generation(both.engine) as unwrapped:
            assert all(p.numel() for p in unwrapped.parameters())
        both.train(1)


def test_an_engine_without_experts_or_sparse_gradients_says_so() -> None:
    with twin() as both:
        assert both.engine.has_moe_layers is False
        assert both.engine.sparse_tensor_module_names == set()


@pytest.mark.parametrize("folder", [None, ""])
def test_a_checkpoint_without_a_directory_is_a_value_error(folder: Any) -> None:
    with twin() as both, pytest.raises(ValueError, match="expected a directory"):
        both.engine.save_checkpoint(folder)


def test_the_config_sets_the_level_of_deepspeeds_logger() -> None:
    logger = deepspeed_logging.logger
    levels = [(each, each.level) for each in (logger, *logger.handlers)]
    try:
        with twin(extra={"log_level": "ERROR"}):
            assert logger.getEffectiveLevel() == logging.ERROR
    finally:
        for each, level in levels:
            each.setLevel(level)


def test_what_deepspeed_refuses_is_its_own_error_too() -> None:
    wrong = {"train_batch_size": 1, "checkpoint": {"tag_validation": "foo"}}
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="tag_validation") as refusal:
        configs.load(wrong)
    assert isinstance(refusal.value, ConfigError)


def test_the_loss_scale_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    section = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}}
    first, second = (Twin(extra=section) for _ in range(2))
    try:
        for micro in range(3):
            first.engine.backward(first.on(micro)(first.engine))
            first.engine.step()
        scale = first.engine.optimizer.loss_scale
        assert scale > 64
        first.engine.save_checkpoint(str(tmp_path / "fp16"))
        second.engine.load_checkpoint(str(tmp_path / "fp16"))
        assert second.engine.optimizer.loss_scale == scale
    finally:
        first.engine.destroy()
        second.engine.destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_no_loss_is_scaled_the_scale_is_1_and_fixed(precision: str, tmp_path: Path) -> None:
    """As DeepSpeed's optimizer says. Its engine answers with `fp16.loss_scale` of the config, which
    is 0, for dynamic, where there is no such section."""
    with one_rank(tmp_path):
        theirs_model, _ = MODELS["gpt"]()
        bf16 = precision == "bf16"
        with deepspeeds_engine(theirs_model, stage=1, bf16=bf16) as theirs:
            theirs_scale = (theirs.optimizer.loss_scale, theirs.optimizer.dynamic_loss_scale)
    with twin(precision=precision) as both:
        optimizer = both.engine.optimizer
        assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == theirs_scale
        assert (both.engine.loss_scale(), both.engine.dynamic_loss_scale()) == theirs_scale


@pytest.mark.parametrize(
    ("section", "expected"), [({}, (0.0, True)), ({"loss_scale": 64}, (64.0, False))]
)
def test_in_fp16_the_engines_scale_is_the_configs(section: dict[str, Any], expected: Any) -> None:
    """0 means dynamic: `optimizer.loss_scale` is what the next loss is multiplied with."""
    both = Twin(extra={"fp16": {"enabled": True, **section}})
    assert (both.engine.loss_scale(), both.engine.dynamic_loss_scale()) == expected
    both.engine.destroy()
