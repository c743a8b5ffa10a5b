"""A random config of documented keys trains exactly as the plain loop, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from torch import nn

from stronghold.errors import ConfigError
from stronghold.train.optimizer import make_scaler
from tests.models import LENGTH, MODELS, VOCAB, Decoder, loss_of
from tests.models.families import llama_of
from tests.support.fuzzed_configs import BATCH, NUM_BLOCKS, Drawn, drawn
from tests.support.training import Run, assert_identical, initialized, moments_of, train_plain

NUM_CONFIGS = 120
STEPS = 4
DAILY = 4  # of the configs are in the default run


def llama() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return llama_of(32, 48, NUM_BLOCKS, 4, 2, VOCAB).train(), batch


def gpt() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return MODELS["gpt"](num_layers=NUM_BLOCKS)[0], batch


def batch(seed: int) -> dict[str, Any]:
    """BATCH sequences of LENGTH tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.blocks if isinstance(model, Decoder) else model.model.layers)


FACTORIES = {"llama": llama, "gpt": gpt}


def schedule_of(drawn_config: Drawn) -> Callable[[torch.optim.Optimizer], Any] | None:
    """DeepSpeed's schedule, or torch's, of the config."""
    section = drawn_config.config.get("scheduler")
    if section is None:
        return None
    module = lr_schedules if hasattr(lr_schedules, section["type"]) else torch.optim.lr_scheduler
    return functools.partial(getattr(module, section["type"]), **section["params"])


def expected_run(case: Drawn) -> tuple[Run, Any]:
    """The plain loop, and its loss scaler or None."""
    scaler = None
    if case.precision == "fp16":
        scaler = make_scaler(DeepSpeedFP16Config(**case.config["fp16"]), case.stage)
    chunk = case.section.get("chunk")
    run = train_plain(
        FACTORIES[case.model],
        steps=STEPS,
        accumulation=case.accumulation,
        clipping=case.clipping,
        precision=case.precision,
        scaler=scaler,
        chunks=(blocks_of, chunk) if isinstance(chunk, int) else None,
        optimizer=case.trains,
        schedule=schedule_of(case),
    )
    return run, scaler


def trained(case: Drawn) -> tuple[Run, Any]:
    """The engine's run, and its last loss scale."""
    torch.manual_seed(0)
    model, make_batch = FACTORIES[case.model]()
    engine: Any = initialized(model, case.config)
    run = Run()
    try:
        torch.manual_seed(1)
        for micro in range(STEPS * case.accumulation):
            ends = (micro + 1) % case.accumulation == 0
            loss = loss_of(engine(**make_batch(micro)))
            engine.backward(loss)
            run.losses.append(loss.detach().clone())
            if case.managed or ends:
                engine.step()
            if ends and engine.was_step_applied():
                run.norms.append(engine.get_global_grad_norm())
        run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        run.moments = moments_of(engine)
        return run, getattr(engine.optimizer, "cur_scale", None)
    finally:
        engine.destroy()


# The groups of the plain loop have no step of torch's, which its schedules look for.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n < DAILY else pytest.mark.slow) for n in range(NUM_CONFIGS)],
)
def test_a_config_trains_as_the_plain_loop_or_is_refused_by_name(
    number: int, tmp_path: Path
) -> None:
    case = drawn(number, tmp_path)
    if case.refused:
        with pytest.raises(ConfigError) as caught:
            trained(case)
        message = str(caught.value).lower()
        assert any(key.lower() in message for key in case.refused), caught.value
        return
    run, scale = trained(case)
    expected, scaler = expected_run(case)
    assert_identical(run, expected)
    assert run.norms == expected.norms
    assert scaler is None or scale == scaler.cur_scale


def test_most_configs_train(tmp_path: Path) -> None:
    """And some are refused: both sides of the law are tested."""
    refused = [drawn(number, tmp_path).refused for number in range(NUM_CONFIGS)]
    assert NUM_CONFIGS // 2 < refused.count(()) < NUM_CONFIGS - 20
