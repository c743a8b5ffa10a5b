"""The trainer of `stronghold.train` between two steps: another plan, dropped gradients, new
masters, and backwards that the program starts."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import ConfigError
from stronghold.plan.plan import make_plan
from stronghold.train.arrays import Arrays
from stronghold.train.layer import Layer
from tests.models import MODELS, loss_of
from tests.support.core import Core, opened
from tests.support.training import ADAMW, OPTIMIZERS, KernelOptimizer, cast, same_bits

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"resident_layers": 0, "resident_updates": "host"},
    "one resident": {"resident_layers": 1, "resident_updates": "host"},
    "one updated there": {"resident_layers": 1, "resident_updates": "gpu"},
    "all updated there": {"resident_layers": 3, "resident_updates": "gpu"},
}


class Twin:
    """A model on the room, and the same one in a plain loop."""

    def __init__(self, precision: str = "bf16", **settings: Any) -> None:
        model, self.make_batch = MODELS["llama"]()
        self.plain = MODELS["llama"]()[0]
        cast(self.plain, torch.bfloat16 if precision != "fp32" else torch.float32)
        kind = "lean" if precision == "lean" else "exact"
        groups = OPTIMIZERS["adamw"].groups(self.plain.parameters())
        self.optimizer = KernelOptimizer(groups, kind, ADAMW)
        self.opened = opened(model, precision=precision, **{"window": 1, **settings})
        self.num_batches = 0

    def __enter__(self) -> Twin:
        self.core: Core = self.opened.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.opened.__exit__(*raised)

    def batch(self) -> dict[str, Any]:
        self.num_batches += 1
        return self.make_batch(self.num_batches)

    def step(self) -> None:
        batch, trainer = self.batch(), self.core.trainer
        loss, expected = loss_of(trainer.forward(**batch)), loss_of(self.plain(**batch))
        trainer.backward(loss)
        expected.backward()
        assert torch.equal(loss, expected)
        norm = trainer.step(clipping=0.5).grad_norm
        gradients = {p: p.grad for p in self.plain.parameters() if p.grad is not None}
        assert norm == self.optimizer.step(gradients, 0.5)
        self.plain.zero_grad()

    def check(self) -> None:
        self.core.trainer.synchronize()
        pairs = zip(self.core.trainer.model.parameters(), self.plain.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        for name, moments in self.core.moments().items():
            expected = self.optimizer.moments(self.plain)[name]
            assert all(map(same_bits, moments, expected)), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "lean"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (before, after)
        for before in ("streamed", "one resident", "one updated there")
        for after in PLACES
        if "there" in after or "there" not in before  # layers move to the device alone
    ],
)
def test_another_plan_between_two_steps_changes_no_bit(
    before: str, after: str, precision: str
) -> None:
    with Twin(precision, **PLACES[before]) as twin:
        core, memory = twin.core, twin.core.device.memory
        twin.step()
        twin.step()
        with torch.no_grad():
            core.trainer.forward(
                **twin.batch()
            )  # residents are there, and have their newest values
        demand = replace(core.plan.demand, window=2, activations="recompute", **PLACES[after])
        plan = make_plan(core.layout, demand)
        core.trainer.take_plan(plan)
        assert {x.index for x in core.layers if x.is_on_gpu} == plan.updated_on_gpu
        assert all(x.level == "recompute" for x in core.layers if x.is_block)
        twin.step()
        twin.step()
        twin.check()
        assert core.trainer.arrays.host_bytes == plan.host_total_bytes
        assert memory.allocated_bytes == plan.gpu_total_bytes
    assert memory.allocated_bytes == 0


def test_gradients_are_dropped_and_a_graph_stays_alive() -> None:
    with Twin() as twin:
        trainer = twin.core.trainer
        trainer.backward(loss_of(trainer.forward(**twin.batch())))
        batch = twin.batch()
        loss = loss_of(trainer.forward(**batch))
        assert trainer.is_in_step
        trainer.drop_gradients()
        assert not trainer.is_in_step
        trainer.backward(loss)
        trainer.step(clipping=0.5)
        loss_of(twin.plain(**batch)).backward()
        gradients = {p: p.grad for p in twin.plain.parameters() if p.grad is not None}
        twin.optimizer.step(gradients, 0.5)
        twin.plain.zero_grad()
        twin.check()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "lean"])
@pytest.mark.parametrize("place", list(PLACES))
def test_a_new_weight_becomes_the_master(place: str, precision: str) -> None:
    with opened(MODELS["gpt"]()[0], precision=precision, **{"window": 1, **PLACES[place]}) as core:
        trainer, make_batch = core.trainer, MODELS["gpt"]()[1]
        trainer.backward(loss_of(trainer.forward(**make_batch(0))))
        trainer.step()
        trainer.synchronize()
        for layer in core.layers:
            written, other = layer.parameters[0], layer.parameters[-1]
            assert layer.states is not None
            before = other.clone()
            with torch.no_grad():
                written.fill_(1.25)
            trainer.arrays.restart_master(layer, 0)
            begin, numel = layer.element(0), written.numel()
            if layer.states.low is not None:
                low = trainer.arrays.of(layer, "low")[begin : begin + numel]
                master = 1.25 if layer.states.low is torch.float32 else 0
                assert bool((low == master).all())
            assert other is written or torch.equal(other, before)


def test_a_gradient_that_was_set_by_hand_is_refused_once() -> None:
    with Twin() as twin:
        trainer = twin.core.trainer
        loss = loss_of(trainer.forward(**twin.batch()))
        trainer.backward(loss)
        layer = twin.core.layers[1]
        layer.parameters[0].grad = torch.zeros_like(layer.parameters[0])
        with pytest.raises(ConfigError, match=layer.names[0]):
            trainer.step()
        assert trainer.is_in_step
        trainer.step()


def test_the_models_own_code_runs_alone_while_hooks_rest() -> None:
    with Twin() as twin:
        trainer, batch = twin.core.trainer, twin.batch()
        num_fetches = trainer.weights.num_fetches
        with trainer.resting_hooks():
            loss = loss_of(trainer.model(**batch))
        assert trainer.weights.num_fetches == num_fetches
        assert torch.equal(loss, loss_of(twin.plain(**batch)))


def test_callbacks_see_a_backward_that_the_program_starts() -> None:
    seen = []
    with Twin() as twin:
        trainer, batch = twin.core.trainer, twin.batch()
        trainer.program.reached = seen.append
        trainer.program.divisor = 4
        loss_of(trainer.forward(**batch)).backward()
        trainer.step(clipping=0.5)
        (loss_of(twin.plain(**batch)) / 4).backward()
        gradients = {p: p.grad for p in twin.plain.parameters() if p.grad is not None}
        twin.optimizer.step(gradients, 0.5)
        num_parameters = len(gradients)
        twin.plain.zero_grad()
        twin.check()
    assert seen.count(True) == num_parameters
    assert seen.count(False) == 1


def test_a_take_over_that_fails_leaves_a_plain_model_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, make_batch = MODELS["llama"]()
    expected = loss_of(model(**make_batch(0)))
    taken = 0

    def fail(arrays: Arrays, layer: Layer) -> None:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise OSError("no memory")
        take_over(arrays, layer)

    take_over = Arrays._take_over
    monkeypatch.setattr(Arrays, "_take_over", fail)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    device = EmulatedDevice()
    with pytest.raises(OSError, match="no memory"):
        Core(model, device=lambda: device, folders=[tmp_path], spill="moments")
    device.close()
    assert taken == 3
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert torch.equal(loss_of(model(**make_batch(0))), expected)
