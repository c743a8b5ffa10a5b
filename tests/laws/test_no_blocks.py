"""A model without repeated blocks stays whole on the device, with the bits of a plain loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import utils
from safetensors.torch import load_file
from torch import nn

import stronghold
from stronghold.checkpoint.weights import fp32_state, locate
from stronghold.errors import BudgetError, ConfigError
from tests.models import MODELS, TOYS, loss_of
from tests.support.checkpoints import assert_same, masters_of, snapshot
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
from tests.support.twin import twin

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
    "with keys of blocks": {"window": 2, "prefetch": 1, "chunk": 1, "activations": "recompute"},
}
WARNING = "no repeated blocks found in"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if WARNING in r.getMessage()]


# -- bits ------------------------------------------------------------------------------------------
@pytest.mark.sampled(3)
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
    assert plans[0].whole == (place != "updated on the host")


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


def test_a_model_with_blocks_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    initialized(MODELS["gpt"]()[0], config()).destroy()
    model = MODELS["one_block"]()[0]
    engine = initialized(model, config(section={"layers": "blocks"}))
    assert not engine.plan.whole
    engine.destroy()
    assert not said(caplog)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "lean"])
@pytest.mark.parametrize("window", [None, 2])
def test_too_little_room_is_refused_with_what_fits(precision: str, window: int | None) -> None:
    """First the state leaves the device, since the model trains without it there; then nothing
    more can."""

    def engine_within(budget: int | str) -> Any:
        section: dict[str, Any] = {"gpu_memory": budget} | ({"window": window} if window else {})
        return initialized(MODELS["one_block"]()[0], config(precision=precision, section=section))

    engine = engine_within("1GiB")
    assert engine.plan.whole
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
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["two_scalars", "one_weird_block", "half_frozen"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, mode: str, tmp_path: Path) -> None:
    """Whole, then updated on the host, then whole again."""
    places = [PLACES["derived"], PLACES["updated on the host"], PLACES["derived"]]

    def engine_of(place: dict[str, Any]) -> Any:
        return initialized(MODELS[name]()[0], config(section=place, **MODES[mode]))

    make_batch = MODELS[name]()[1]
    straight = engine_of(places[0])
    train(straight, make_batch, range(3))
    expected = snapshot(straight)
    straight.destroy()
    for step, place in enumerate(places):
        engine = engine_of(place)
        if step:
            assert engine.load_checkpoint(tmp_path)[0] is not None
        train(engine, make_batch, range(step, step + 1))
        engine.save_checkpoint(tmp_path)
        found = snapshot(engine)
        engine.destroy()
    for key in ("torch's random state", "numbers"):
        found.pop(key), expected.pop(key)
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["two_scalars", "one_weird_block"])
def test_its_checkpoint_turns_into_what_others_read(name: str, tmp_path: Path) -> None:
    engine = initialized(MODELS[name]()[0], config(precision="bf16"))
    train(engine, MODELS[name]()[1], range(2))
    engine.save_checkpoint(tmp_path / "ours")
    engine.save_16bit_model(tmp_path / "weights", "model.safetensors")
    masters, weights = masters_of(engine), engine.module_state_dict()
    read = load_file(tmp_path / "weights" / "model.safetensors")
    assert all(torch.equal(read[key], value) for key, value in weights.items())
    fp32 = fp32_state(locate(tmp_path / "ours", None))
    assert all(torch.equal(fp32[key], value) for key, value in masters.items())
    engine.destroy()


@pytest.mark.parametrize("mode", ["fp32", "bf16", "lean"])
@pytest.mark.parametrize("name", ["two_scalars", "one_weird_block"])
def test_masters_are_read(name: str, mode: str) -> None:
    with twin(name, **MODES[mode]) as both:
        both.train(0)
        for ours in both.model.parameters():
            master = utils.safe_get_full_fp32_param(ours)
            assert master.shape == ours.shape
            assert utils.safe_get_full_optimizer_state(ours, "exp_avg").shape == ours.shape
        both.backward(both.on(1))
        for ours, plain in zip(both.model.parameters(), both.plain.parameters(), strict=True):
            gradient = utils.safe_get_full_grad(ours)
            assert torch.equal(gradient, plain.grad.float())
        both.step()


def test_it_leaves_the_device_and_comes_back() -> None:
    with twin("one_weird_block", precision="bf16") as both:
        both.train(0)
        both.engine.offload_states()
        assert both.engine.inspect().device.memory.allocated_bytes == 0
        both.engine.reload_states()
        both.train(1)


def test_a_frozen_model_evaluates_and_holds_its_weights_alone() -> None:
    model, make_batch = MODELS["one_block"]()
    expected = loss_of(model(**make_batch(0))).detach()
    model.requires_grad_(False)
    engine, optimizer, *_ = stronghold.initialize(model=model, config=config())
    assert optimizer is None
    assert torch.equal(loss_of(engine(**make_batch(0))), expected)
    weights = sum(layer.numel for layer in engine.inspect().layout.layers) * 4
    assert engine.memory_report().gpu_peak == weights
    engine.destroy()


def test_a_model_without_parameters_evaluates() -> None:
    engine, *_ = stronghold.initialize(model=nn.ReLU(), config=config())
    x = torch.randn(3)
    assert torch.equal(engine(x), x.relu())
    engine.destroy()


def test_an_engine_of_it_alone_computes_what_the_optimizer_does_not_own() -> None:
    """The optimizer has one of two scalars: the other stays as it is."""
    model, make_batch = MODELS["two_scalars"]()
    before = model.b.detach().clone()
    engine, *_ = stronghold.initialize(model=model, config=config(), model_parameters=[model.a])
    train(engine, make_batch, range(2))
    engine.synchronize()
    assert torch.equal(model.b, before)
    assert not torch.equal(model.a, MODELS["two_scalars"]()[0].a)
    engine.destroy()
