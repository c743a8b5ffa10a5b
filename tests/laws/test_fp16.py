"""Training in fp16: the loss scale, what an overflow does, and what both leave exactly alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.precision_config import DeepSpeedFP16Config

import stronghold
from stronghold.errors import ConfigError
from stronghold.train.optimizer import make_scaler, scaler_state
from tests.models import MODELS
from tests.support.training import config, initialized

OVERFLOWS = [0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]


def fp16(**section: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **section}}


def settings(*, accumulation: int, clipping: float, section: Any, **window: Any) -> dict[str, Any]:
    made = config(accumulation=accumulation, clipping=clipping, section=window)
    return {**made, **fp16(**section)}


def test_an_overflow_skips_the_step_the_schedule_and_halves_the_scale() -> None:
    model, make_batch = MODELS["gpt"]()
    made = {
        **settings(accumulation=1, clipping=1.0, section={"initial_scale_power": 8}),
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_num_steps": 10},
        },
    }
    engine, optimizer, _, schedule = stronghold.initialize(
        model=model, config=made, model_parameters=model.parameters()
    )
    try:
        assert (engine.fp16_enabled(), engine.dynamic_loss_scale()) == (True, True)
        for scale, factor in ((256, 1.0), (256, math.inf), (128, math.nan), (64, 1.0)):
            assert optimizer.loss_scale == optimizer.cur_scale == scale
            before = {k: v.clone() for k, v in engine.module_state_dict().items()}
            rate, skipped = schedule.last_batch_iteration, engine.skipped_steps
            engine.backward(engine(**make_batch(0)) * factor)
            engine.step()
            applied = factor == 1.0
            assert (engine.was_step_applied(), optimizer.overflow) == (applied, not applied)
            assert (schedule.last_batch_iteration - rate, engine.skipped_steps - skipped) == (
                (1, 0) if applied else (0, 1)
            )
            same = [torch.equal(v, before[k]) for k, v in engine.module_state_dict().items()]
            assert all(same) is not applied
        assert engine.global_steps == 4
    finally:
        engine.destroy()


def test_backward_returns_the_loss_without_its_scale() -> None:
    model, make_batch = MODELS["gpt"]()
    made = settings(accumulation=2, clipping=1.0, section={"loss_scale": 512})
    engine = initialized(model, made)
    try:
        loss = engine(**make_batch(0))
        assert torch.equal(engine.backward(loss), loss / 2)
        engine.optimizer.override_loss_scale(4.0)
        assert (engine.optimizer.loss_scale, engine.optimizer.dynamic_loss_scale) == (4.0, False)
    finally:
        engine.destroy()


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_scale_moves_as_deepspeeds_own_scaler_moves_it(
    window: int, hysteresis: int, consecutive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)
    options = {
        "init_scale": 256.0,
        "scale_window": window,
        "min_scale": 1,
        "delayed_shift": hysteresis,
        "consecutive_hysteresis": consecutive,
    }
    theirs = loss_scaler.DynamicLossScaler(**options, raise_error_at_min_scale=False)
    ours = make_scaler(
        DeepSpeedFP16Config(
            enabled=True,
            initial_scale_power=8,
            loss_scale_window=window,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive,
        ),
        1,
    )
    ours.raise_error_at_min_scale = False
    for overflow in map(bool, OVERFLOWS * 2):
        theirs.update_scale(overflow)
        ours.update_scale(overflow)
        assert scaler_state(ours) == scaler_state(theirs)


def test_at_the_smallest_scale_zero_raises_and_stage_0_goes_on() -> None:
    section = DeepSpeedFP16Config(enabled=True, initial_scale_power=1, hysteresis=1)
    scaler = make_scaler(section, 2)
    scaler.update_scale(True)
    with pytest.raises(ConfigError, match="smallest loss scale"):
        scaler.update_scale(True)
    scaler = make_scaler(section, 0)
    for _ in range(3):
        scaler.update_scale(True)
    assert scaler.cur_scale == 1
