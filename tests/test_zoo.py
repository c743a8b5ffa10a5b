"""Every kind of model trains through the window as in a plain loop, to the bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import stronghold
from tests.models import HUGGING_FACE, MODELS, PLAIN, loss_of
from tests.training import Run, assert_identical, config, train_plain, train_windowed

STEPS = 4
SECTIONS: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1, "activations": "keep"},
    "recompute": {"window": 2, "activations": "recompute"},
    "offload": {"window": 2, "activations": "offload"},
    "resident": {"window": 1, "resident_layers": 1, "activations": "keep"},
}


@functools.cache
def plain(name: str, clipping: float, accumulation: int) -> Run:
    return train_plain(MODELS[name], steps=STEPS, clipping=clipping, accumulation=accumulation)


def check(name: str, section: str, clipping: float, accumulation: int = 1) -> None:
    settings = config(clipping=clipping, accumulation=accumulation, section=SECTIONS[section])
    run = train_windowed(MODELS[name], steps=STEPS, settings=settings)
    assert_identical(run, plain(name, clipping, accumulation))


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", [*PLAIN, *HUGGING_FACE])
def test_any_model_trains_as_without_a_window(name: str, section: str) -> None:
    check(name, section, clipping=0.5)


@pytest.mark.parametrize("name", [*PLAIN, "t5", "bert"])
def test_early_updates_change_nothing(name: str) -> None:
    check(name, "one slot", clipping=0.0)


@pytest.mark.parametrize("name", [*PLAIN, "t5"])
def test_accumulation_uses_every_gradient_once(name: str) -> None:
    check(name, "one slot", clipping=0.5, accumulation=3)


@pytest.mark.parametrize("name", [*PLAIN, *HUGGING_FACE])
def test_evaluation_between_steps_changes_nothing(name: str) -> None:
    """The raw model, without gradients, between two steps: the same output, and training goes on as
    if it had not been.
    """
    losses, expected = [], []
    for windowed in (True, False):
        model, make_batch = MODELS[name]()
        settings = config(section=SECTIONS["one slot"])
        if not windowed:
            settings["stronghold"] = {"device": "emulated", "resident_layers": "all"}
        engine, _, _, _ = stronghold.initialize(
            model=model, config=settings, model_parameters=model.parameters()
        )
        torch.manual_seed(1)
        for step in range(3):
            if windowed or step == 2:
                model.eval()
                with torch.no_grad():
                    value = loss_of(model(**make_batch(99)))
                (losses if windowed else expected).append(value)
                model.train()
            loss = loss_of(engine(**make_batch(step)))
            engine.backward(loss)
            engine.step()
            (losses if windowed else expected).append(loss.detach())
        engine.destroy()
    assert torch.equal(losses[-1], expected[-1])
    assert torch.equal(losses[-2], expected[-2])


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_own_gradient_checkpointing_keeps_working(name: str, reentrant: bool, policy: str) -> None:
    def factory() -> Any:
        model, make_batch = MODELS[name]()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        if reentrant:
            model.enable_input_require_grads()
        return model, make_batch

    settings = config(clipping=0.5, section={"window": 1, "activations": policy})
    run = train_windowed(factory, steps=STEPS, settings=settings)
    assert_identical(run, plain(name, 0.5, 1))
