"""The window of `stronghold.train`: what is fetched, when, and what its slots hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import ConfigError
from stronghold.train.layer import WeightState
from tests.models import MODELS
from tests.support.core import Core, opened

NUM_BLOCKS = 6


@contextmanager
def streaming(name: str = "gpt", **settings: Any) -> Iterator[tuple[Core, Any]]:
    model, make_batch = MODELS[name](num_layers=NUM_BLOCKS)
    with opened(model, **settings) as core:
        yield core, make_batch


def fetched(core: Core) -> list[str]:
    """The names of the layers that are fetched from now on."""
    names: list[str] = []
    fetch = core.trainer.weights.fetch

    def note(layer: Any) -> None:
        names.append(layer.name)
        fetch(layer)

    core.trainer.weights.fetch = note  # type: ignore[method-assign]
    return names


def step(core: Core, batch: Any) -> None:
    core.trainer.backward(core.trainer.forward(**batch))
    core.trainer.step(clipping=1.0)


@pytest.mark.parametrize("window", [1, 2, 3, NUM_BLOCKS])
def test_a_step_fetches_what_the_formula_says(window: int) -> None:
    with streaming(window=window) as (core, make_batch):
        for number in range(3):
            before = core.trainer.weights.num_fetches
            step(core, make_batch(number))
        outside = sum(not layer.is_block for layer in core.layers)
        # Weights cross the link twice, but the window keeps the last layers at the turn.
        in_turn = 2 * NUM_BLOCKS - min(window, NUM_BLOCKS)
        assert core.trainer.weights.num_fetches - before == in_turn + outside


def test_layers_are_prefetched_in_the_order_of_the_last_pass() -> None:
    with streaming(window=3) as (core, make_batch):
        step(core, make_batch(0))
        names = fetched(core)
        step(core, make_batch(1))
        blocks = [name for name in names if name.startswith("blocks")]
        forward = [f"blocks.{k}" for k in range(NUM_BLOCKS)]
        backward = [f"blocks.{k}" for k in (2, 1, 0)]
        assert blocks == forward + backward


def test_residents_are_fetched_in_their_places_of_the_order() -> None:
    with streaming(window=2, resident_layers=2) as (core, make_batch):
        for number in range(2):
            step(core, make_batch(number))
        residents = [layer.name for layer in core.layers if layer.is_block and layer.is_resident]
        names = fetched(core)
        step(core, make_batch(2))
        blocks = [name for name in names if name.startswith("blocks")]
        assert len(residents) == 2
        # Once, and not before the streamed layers that come before them.
        assert all(blocks.count(name) == 1 for name in residents)
        assert blocks[: len(set(blocks))] == sorted(set(blocks))


def test_nothing_is_in_a_slot_between_two_passes() -> None:
    with streaming(window=3) as (core, make_batch):
        for number in range(2):
            core.trainer.backward(core.trainer.forward(**make_batch(number)))
            assert core.trainer.weights.held == []
            assert len(core.trainer.weights.free) == 3
        with torch.no_grad():
            core.trainer.forward(**make_batch(9))
        assert core.trainer.weights.held == []


def test_a_wrong_prediction_costs_time_and_no_bit() -> None:
    """Evaluation and training take turns in one pass, and a program calls a block by itself."""
    with streaming(window=2) as (core, make_batch):
        model = core.trainer.model
        for number in range(2):
            step(core, make_batch(number))
        loss = core.trainer.forward(**make_batch(2))
        with torch.no_grad():
            x = torch.randn(2, 8, 16)
            alone = model.blocks[4](x)
            evaluated = core.trainer.forward(**make_batch(2))
        assert torch.equal(evaluated, loss)
        core.trainer.backward(loss)
        core.trainer.synchronize()
        with torch.no_grad():
            assert torch.equal(model.blocks[4](x), alone)


class Nested(nn.Module):
    """A block inside of a block, both of them streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList([Outer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.outer:
            x = block(x)
        return x.square().mean()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x if self.inner is None else self.inner(x)
        return inner * self.scale


def test_blocks_within_each_other_need_a_slot_each() -> None:
    model = Nested()
    with opened(model, window=1, layers="outer") as core:
        object.__setattr__(model.outer[1], "inner", model.outer[0])
        with pytest.raises(ConfigError, match=r"outer.0 is called inside of other blocks.*window"):
            core.trainer.forward(torch.ones(2, 4))
    with opened(model, window=2, layers="outer") as core:
        for _ in range(3):  # from the second on the order is known
            loss = core.trainer.forward(torch.ones(2, 4))
            core.trainer.backward(loss)
            assert torch.equal(loss, torch.tensor(1.0))


def test_a_freed_slot_has_no_old_weights() -> None:
    with streaming(window=1) as (core, make_batch):
        core.trainer.forward(**make_batch(0)).detach()
        held = core.trainer.weights.held
        assert [layer.name for layer in held] == [f"blocks.{NUM_BLOCKS - 1}"]
        memory = held[0].slot.memory
        core.trainer.weights.release(held[0])
        assert memory.view(torch.float32).isnan().all()


def test_a_saved_view_is_the_same_view_of_the_slot_that_has_the_layer_then() -> None:
    with streaming(window=3) as (core, _):
        weights = core.trainer.weights
        one, other = (layer for layer in core.layers if layer.name in ("blocks.0", "blocks.1"))
        weights.refresh(one)
        weights.fetch(one)
        weights.use(one)
        weights.bind(one)
        position = one.names.index("blocks.0.mlp.up.weight")
        view = one.parameters[position].detach().t()[3:7, ::2]
        saved = weights.saved(view)
        assert saved is not None
        values, slot = view.clone(), one.slot
        assert saved.layer is one
        assert weights.saved(values) is None
        stride = view.stride()
        del view  # else the release refuses it
        weights.rest(one)
        weights.release(one)
        weights.fetch(other)
        weights.fetch(one)
        weights.use(one)
        assert one.slot is not slot
        assert torch.equal(weights.view(saved), values)
        assert weights.view(saved).stride() == stride


def test_a_write_between_two_steps_is_used_by_the_next_pass() -> None:
    model, make_batch = MODELS["gpt"]()
    with opened(model, window=1, resident_layers=1) as core:
        step(core, make_batch(0))
        core.trainer.synchronize()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        model.head.weight.data.mul_(2.0)  # no version shows it
        model.norm.weight.data = torch.full((16,), 0.25)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss = core.trainer.forward(**make_batch(1)).detach()
    plain, _ = MODELS["gpt"]()
    plain.load_state_dict(weights)
    assert torch.equal(loss, plain(**make_batch(1)))


def test_a_write_in_place_is_seen_by_its_version() -> None:
    """Nothing is on its way, so the program need not ask for anything before it writes."""
    model, make_batch = MODELS["gpt"]()
    plain, _ = MODELS["gpt"]()
    with opened(model, window=1, resident_layers=1) as core, torch.no_grad():
        core.trainer.forward(**make_batch(0))
        for of in (model, plain):
            for p in of.parameters():
                p.mul_(0.5)
        assert torch.equal(core.trainer.forward(**make_batch(1)), plain(**make_batch(1)))


def test_values_that_replace_a_parameters_come_after_its_update() -> None:
    """The update is on its way when the program points the parameter elsewhere."""
    model, make_batch = MODELS["gpt"]()
    with opened(model, window=1, device=partial(EmulatedDevice, jitter_s=0.02, seed=2)) as core:
        step(core, make_batch(0))
        for p in model.parameters():
            p.data = torch.full_like(p, 0.125)
        core.trainer.forward(**make_batch(1))
        core.trainer.synchronize()
        assert all((p == 0.125).all() for p in model.parameters())


def test_a_resident_keeps_its_slot_when_it_is_outdated() -> None:
    with streaming(window=1, resident_layers=1) as (core, make_batch):
        step(core, make_batch(0))
        resident = next(layer for layer in core.layers if layer.is_block and layer.is_resident)
        slot = resident.slot
        assert resident.weight_state is WeightState.STALE
        step(core, make_batch(1))
        assert resident.slot is slot
