"""Gradients and updates of `stronghold.train`: each gradient is used once, with the numbers of its
step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import LaneError
from stronghold.optim.sgd import SGD
from stronghold.train.layer import GradientState
from tests.models import MODELS
from tests.support.core import Core, opened
from tests.support.training import KernelOptimizer, Trains

UPDATES = ["host", "gpu"]


@contextmanager
def streaming(name: str = "gpt", **settings: Any) -> Iterator[tuple[Core, nn.Module, Any]]:
    """On the room, and the same model in plain torch."""
    model, make_batch = MODELS[name]()
    with opened(model, **settings) as core:
        yield core, MODELS[name]()[0], make_batch


def gradients(core: Core) -> dict[str, torch.Tensor]:
    """Those that wait for the update, by name."""
    core.device.finish()
    return {
        layer.names[k]: core.trainer.arrays.gradient(layer, k).clone().view(parameter.shape)
        for layer in core.layers
        for k, parameter in enumerate(layer.parameters[: layer.num_trained])
        if k in layer.waiting
    }


def assert_equal(found: dict[str, torch.Tensor], plain: nn.Module) -> None:
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("updates", UPDATES)
def test_gradients_wait_where_the_layer_is_updated(updates: str) -> None:
    settings = {"window": 1, "resident_layers": 1, "resident_updates": updates}
    with streaming(**settings) as (core, plain, make_batch):
        core.trainer.backward(core.trainer.forward(**make_batch(0)))
        plain(**make_batch(0)).backward()
        assert_equal(gradients(core), plain)
        assert {layer.gradient_state for layer in core.layers} == {GradientState.WAITING}
        assert all(p.grad is None for p in core.trainer.model.parameters())
        core.trainer.step()
        assert {layer.gradient_state for layer in core.layers} == {GradientState.NONE}


@pytest.mark.parametrize("updates", UPDATES)
def test_a_second_backward_of_a_micro_batch_adds_as_autograd_does(updates: str) -> None:
    settings = {"window": 1, "resident_layers": 1, "resident_updates": updates}
    with streaming(**settings) as (core, plain, make_batch):
        for number in range(3):
            core.trainer.backward(core.trainer.forward(**make_batch(number)))
            plain(**make_batch(number)).backward()
        assert_equal(gradients(core), plain)


@pytest.mark.parametrize("updates", UPDATES)
def test_a_graph_may_have_two_backwards(updates: str) -> None:
    settings = {"window": 1, "resident_layers": 1, "resident_updates": updates}
    with streaming("called_twice", **settings) as (core, plain, make_batch):
        loss, expected = core.trainer.forward(**make_batch(0)), plain(**make_batch(0))
        for retains in (True, False):
            core.trainer.backward(loss, retain_graph=retains)
            expected.backward(retain_graph=retains)
        assert_equal(gradients(core), plain)


@pytest.mark.parametrize("accumulates", [False, True])
def test_slots_take_the_bytes_of_the_formula(accumulates: bool) -> None:
    """Blocks share slots for gradients, in every step. Other layers have one each."""
    settings: Any = {"window": 2, "resident_layers": 1, "accumulate": accumulates}
    with streaming(**settings) as (core, _, make_batch):
        train(core, make_batch, steps=3)
        blocks = [layer for layer in core.layers if layer.is_block]
        streamed = max(layer.num_bytes for layer in blocks if not layer.is_resident)
        residents = sum(layer.num_bytes for layer in core.layers if layer.is_resident)
        shared = max(layer.trained_bytes for layer in blocks)
        own = sum(layer.trained_bytes for layer in core.layers if not layer.is_block)
        weights = core.plan.window * streamed + residents
        gradients = core.plan.gradient_slots * shared + own
        assert core.device.memory.peak_bytes == weights + gradients


@pytest.mark.parametrize("updates", UPDATES)
def test_the_norm_is_that_of_the_gradients_of_now(updates: str) -> None:
    """Also if a backward that did not end the step came after one that did."""
    settings = {"window": 1, "resident_layers": 1, "resident_updates": updates}
    with streaming(**settings) as (core, plain, make_batch):
        for number, ends_step in enumerate((True, False)):
            core.trainer.backward(core.trainer.forward(**make_batch(number)), ends_step=ends_step)
            plain(**make_batch(number)).backward()
        result = core.trainer.step(clipping=1.0)
        squares = [p.grad.double().square().sum() for p in plain.parameters() if p.grad is not None]
        assert result.grad_norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


def test_micro_batches_without_a_gradient_keep_the_sums_of_others() -> None:
    """The last micro-batch of a step does not reach a block."""
    settings: Any = {"accumulate": True, "micro_batches": 2, "window": 1}
    with streaming("layer_drop", **settings) as (core, plain, make_batch):
        for number in range(4):
            loss = core.trainer.forward(**make_batch(number))
            core.trainer.backward(loss, ends_step=number == 3)
            plain(**make_batch(number)).backward()
        found = gradients(core)
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        result = core.trainer.step(clipping=1.0)
        squares = [gradient.double().square().sum() for gradient in expected.values()]
        assert result.grad_norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


@pytest.mark.parametrize("updates", UPDATES)
def test_without_clipping_nothing_waits_for_the_norm(updates: str) -> None:
    settings = {"window": 1, "resident_layers": 1, "resident_updates": updates}
    with streaming(**settings) as (core, plain, make_batch):
        core.trainer.backward(core.trainer.forward(**make_batch(0)))
        plain(**make_batch(0)).backward()
        norm = core.trainer.step().grad_norm
        assert callable(norm)
        core.trainer.backward(core.trainer.forward(**make_batch(1)))  # its sums are others
        squares = [p.grad.double().square().sum() for p in plain.parameters() if p.grad is not None]
        assert norm() == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


@pytest.mark.parametrize("updates", UPDATES)
def test_a_step_with_an_overflow_changes_nothing(updates: str) -> None:
    settings = {"window": 1, "resident_layers": 1, "resident_updates": updates}
    with streaming(**settings) as (core, _, make_batch):
        before = {name: p.clone() for name, p in core.trainer.model.named_parameters()}
        core.trainer.backward(core.trainer.forward(**make_batch(0)) * math.nan)
        result = core.trainer.step(clipping=1.0, skips_overflow=True)
        assert result.overflow
        assert result.grad_norm == math.inf
        core.trainer.synchronize()
        for name, p in core.trainer.model.named_parameters():
            assert torch.equal(p, before[name])
        assert not any(counts.any() for counts in core.trainer.updates.counts.values())
        assert not gradients(core)


def test_an_update_uses_the_hyper_parameters_of_its_step() -> None:
    """A schedule writes the next rate before the update has run."""
    with streaming(window=1, device=late) as (core, _, make_batch):
        core.trainer.backward(core.trainer.forward(**make_batch(0)))
        core.trainer.step(clipping=1.0)
        core.optimizer.param_groups[0]["lr"] = 1e9
        core.trainer.synchronize()
        assert all(p.abs().max() < 10 for p in core.trainer.model.parameters())


def late() -> EmulatedDevice:
    return EmulatedDevice(jitter_s=0.01, seed=3)


class Both(nn.Module):
    """Two parameters in one layer, of groups whose kernels differ."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(19, generator=generator))
        self.b = nn.Parameter(torch.randn(23, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a[:, None] * self.b * x).square().mean()


@pytest.mark.parametrize("updates", UPDATES)
def test_groups_of_one_layer_may_have_kernels_of_their_own(updates: str) -> None:
    models = Both(), Both()
    optimizers = [SGD(), SGD(has_momentum=True)]
    groups = [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}]
    plain = torch.optim.SGD(
        [{"params": [p], **g} for p, g in zip(models[1].parameters(), groups, strict=True)]
    )
    stepping = KernelOptimizer(plain, "exact", optimizers)
    trains = Trains(type="SGD", hyperparameters={"lr": 0.1}, optimizer=SGD(has_momentum=True))
    with opened(
        models[0],
        optimizer=trains,
        optimizers=optimizers,
        groups=groups_of(models[0], groups),
        resident_updates=updates,
    ) as core:
        for number in range(3):
            x = torch.full((), 1.0 + number)
            core.trainer.backward(core.trainer.forward(x))
            core.trainer.step(clipping=0.5)
            models[1](x).backward()
            gradients = {p: p.grad for p in models[1].parameters()}
            stepping.step(gradients, 0.5)
            plain.zero_grad()
        core.trainer.synchronize()
        for p, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(p, other)


def groups_of(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": [p], **g} for p, g in zip(model.parameters(), groups, strict=True)]


def train(core: Core, make_batch: Any, steps: int) -> None:
    for number in range(steps):
        core.trainer.backward(core.trainer.forward(**make_batch(number)))
        core.trainer.step(clipping=1.0)


@pytest.mark.parametrize("lane", ["fetch", "offload", "gradients", "update"])
def test_an_error_of_a_lane_ends_the_training_with_its_operation(
    lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streaming(window=1) as (core, _, make_batch):
        train(core, make_batch, steps=1)

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("broken")

        if lane in ("fetch", "offload"):
            monkeypatch.setattr(core.device, "copy", fail)
        else:
            name = "sum_squares" if lane == "gradients" else "update"
            monkeypatch.setattr(core.trainer.updates._kernels, name, fail, raising=False)
        with pytest.raises(LaneError, match="broken"):
            train(core, make_batch, steps=2)
        with pytest.raises(LaneError):
            core.trainer.forward(**make_batch(0))
