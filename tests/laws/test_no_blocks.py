"""A model without repeated blocks stays whole on the device, with the bits of a plain loop."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import BudgetError, ConfigError
from tests.models import MODELS, TOYS, loss_of
from tests.support.pairs import pairs
from tests.support.sizes import named_size
from tests.support.training import (
    assert_identical,
    config,
    initialized,
    train,
    train_plain,
    train_windowed,
)

STEPS = 4
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"clipping": 0.5},
    "fp32, no gate": {"clipping": 0.0},
    "fp32, accumulated": {"clipping": 0.5, "accumulation": 3},
    "bf16": {"precision": "bf16", "clipping": 0.5},
    "bf16, no gate": {"precision": "bf16", "clipping": 0.0},
    "bf16, accumulated": {"precision": "bf16", "clipping": 0.0, "accumulation": 2},
    "fp16": {"precision": "fp16", "clipping": 0.5},
    "lean": {"precision": "lean", "clipping": 0.5},
}
PLACES: dict[str, dict[str, Any]] = {
    "derived": {},
    "updated on the host": {"resident_updates": "host"},
    "with keys of blocks": {"window": 2, "chunk": 1, "activations": "recompute"},
}
WARNING = "no repeated blocks found in"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if WARNING in r.getMessage()]


# -- bits ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "mode", "place"), pairs(TOYS, list(MODES), list(PLACES)))
def test_a_toy_trains_as_in_a_plain_loop(name: str, mode: str, place: str) -> None:
    options = MODES[mode]
    plans: list[Any] = []
    run = train_windowed(
        MODELS[name],
        steps=STEPS,
        settings=config(section=PLACES[place], **options),
        inspect=lambda engine: plans.append(engine.plan),
    )
    plain = train_plain(MODELS[name], steps=STEPS, **options)
    assert_identical(run, plain)
    assert run.norms == plain.norms
    assert bool(plans[0].updated_on_gpu) == (place != "updated on the host")


# -- what is said ----------------------------------------------------------------------------------
@pytest.mark.parametrize("section", [{}, {"window": 2, "chunk": 1}], ids=str)
def test_one_warning_says_so_and_how_blocks_are_named(
    section: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, make_batch = MODELS["one_block"]()
    engine = initialized(model, config(section=section))
    train(engine, make_batch, range(4))
    engine.destroy()
    (warning,) = said(caplog)
    assert "the whole model stays on the device" in warning
    assert '"blocks" (3,280 parameters)' in warning
    assert "set stronghold.layers" in warning
    assert ("Without effect" in warning) == bool(section)
    assert warning.endswith("stronghold.window, stronghold.chunk.") == bool(section)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "lean"])
@pytest.mark.parametrize("window", [None, 2])
def test_too_little_room_is_refused_with_what_fits(precision: str, window: int | None) -> None:
    """First the state leaves the device, since the model trains without it there; then nothing
    more can."""

    def engine_within(budget: int | str) -> Any:
        section: dict[str, Any] = {"gpu_memory": budget} | ({"window": window} if window else {})
        return initialized(MODELS["one_block"]()[0], config(precision=precision, section=section))

    engine = engine_within("1GiB")
    assert engine.plan.updated_on_gpu
    need = engine.plan.gpu_total_bytes
    engine.destroy()
    engine = engine_within(need - 1)
    assert not engine.plan.updated_on_gpu
    need = engine.plan.gpu_total_bytes
    train(engine, MODELS["one_block"]()[1], range(4))
    report = engine.memory_report()
    assert report.gpu_peak == report.gpu_planned <= need
    engine.destroy()
    with pytest.raises(BudgetError, match="the model has no repeated blocks") as caught:
        engine_within(need - 1)
    enough = named_size(str(caught.value), "raise gpu_memory to at least")
    assert "stronghold.layers" in str(caught.value)
    assert "outside the blocks" in str(caught.value)
    engine = engine_within(enough)
    train(engine, MODELS["one_block"]()[1], range(1))
    engine.destroy()


def test_what_is_pinned_about_blocks_is_refused_where_there_are_none() -> None:
    for section in ({"resident_layers": 1}, {"activations": {"keep": 2}}):
        with pytest.raises(ConfigError, match=r"0 blocks|expected 0"):
            initialized(MODELS["one_linear"]()[0], config(section=section))


# -- what else an engine does ----------------------------------------------------------------------


def test_a_frozen_model_evaluates_and_holds_its_weights_alone() -> None:
    model, make_batch = MODELS["one_block"]()
    expected = loss_of(model(**make_batch(0))).detach()
    model.requires_grad_(False)
    engine, optimizer, *_ = stronghold.initialize(model=model, config=config())
    assert optimizer is None
    assert torch.equal(loss_of(engine(**make_batch(0))), expected)
    weights = sum(layer.weight_bytes for layer in engine.inspect().layout.layers)
    assert engine.memory_report().gpu_peak == weights
    engine.destroy()


def test_a_model_without_parameters_evaluates() -> None:
    engine, *_ = stronghold.initialize(model=nn.ReLU(), config=config())
    x = torch.randn(3)
    assert torch.equal(engine(x), x.relu())
    engine.destroy()
