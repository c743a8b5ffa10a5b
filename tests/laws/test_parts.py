"""Blocks that are called twice: the second call alone uses one of their parameters, or trains them,
and other layers need the gradient slot in between."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.training import (
    assert_identical,
    config,
    initialized,
    train_plain,
    train_windowed,
)

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x))
        return x * self.last if last else x


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # so that each block has a backward
        self.blocks = nn.ModuleList(block() for _ in range(6))
        for one in self.blocks if block is Shared else ():
            one.shared = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for last in (False, True):
            for block in self.blocks:
                x = block(x, last)
        return x.square().mean()


class Once(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, True)
        return x.square().mean()


class Half(Block):
    """Only its last call is trained, and is the first in backward."""

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        if last:
            return super().forward(x, last)
        weight, bias = self.linear.weight.detach(), self.linear.bias.detach()
        return x + torch.tanh(nn.functional.linear(x, weight, bias))


class Shared(Block):
    """Calls a module of all blocks, which has no block, before it reads its own weights."""

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        return super().forward(self.shared(x), last)


class Checkpointed(Block):
    """Each call has a backward of its own inside of the backward."""

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        return checkpoint(super().forward, x, True, use_reentrant=True)


def factory(block: type[Block] = Block) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(block)

    def batch(number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(2, WIDTH, generator=generator)}

    return model, batch


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("block", [Block, Half, Shared, Checkpointed])
def test_parts_are_updated_once_when_backward_has_ended(
    block: type[Block], clipping: float, activations: str
) -> None:
    """Neither in the middle of backward, which needs the weights once more, nor for each part."""
    section = {"window": 1, "activations": activations, "emulated": {"jitter_s": 3e-4}}
    settings = config(clipping=clipping, section=section)
    run = train_windowed(partial(factory, block), steps=3, settings=settings)
    expected = train_plain(partial(factory, block), steps=3, clipping=clipping)
    assert_identical(run, expected)
    assert run.norms == expected.norms


class CheckpointedFromOutside(Model):
    """Backward comes to a block once more, and a layer may still need its weights. In between it
    `keeps` aliases of them, before which updates wait."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__(Block)
        self.keeps = keeps
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.keeps:
                x.register_hook(self.keep)
            for block in self.blocks:
                x = checkpoint(block, x, True, use_reentrant=True)
        return x.square().mean()

    def keep(self, _: torch.Tensor) -> None:
        # at rest
        self.kept += [block.linear.weight.detach() for block in self.blocks[1:]]


def model_of(model: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(), factory()[1]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("keeps", [False, True])
def test_blocks_that_are_checkpointed_from_outside_hand_over_each_call_by_itself(
    keeps: bool, accumulation: int
) -> None:
    """All of them before an update, and before they are added to those of other micro-batches."""
    make = partial(model_of, partial(CheckpointedFromOutside, keeps=keeps))
    settings = config(accumulation=accumulation, clipping=0.0, section={"window": 1})
    run = train_windowed(make, steps=2, settings=settings)
    expected = train_plain(make, steps=2, accumulation=accumulation, clipping=0.0)
    assert_identical(run, expected)


@pytest.mark.parametrize("place", [{"window": 1}, {"window": 1, "resident_layers": 2}], ids=str)
def test_calls_are_known_in_each_of_two_backwards(place: dict[str, Any]) -> None:
    """Checkpoints inside of blocks: a resident's gradients come together without them."""
    model, batch = model_of(partial(Model, Checkpointed))
    plain = copy.deepcopy(model)
    settings = config(accumulation=3, section={**place, "activations": "offload"})
    engine: Any = initialized(model, settings)
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    for _ in range(2):
        for each, backward in ((plain, lambda x: (x / 3).backward()), (engine, engine.backward)):
            for loss in [each(**batch(number)) for number in range(2)]:
                backward(loss)
                for p, total in zip(plain.parameters(), sums, strict=True):
                    total += 0.0 if p.grad is None else p.grad
                    p.grad = None
        engine.step()
    for p, total in zip(model.parameters(), sums, strict=True):
        assert torch.equal(safe_get_full_grad(p), total)
    engine.destroy()


class Twice(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(block(x, True), True)
        return x.square().mean()


@pytest.mark.parametrize("window", [1, 64])
def test_parts_of_a_further_backward_are_added_one_by_one(window: int) -> None:
    """As autograd does, also where they come together in a slot."""
    model, batch = model_of(partial(Twice, Checkpointed))
    plain = copy.deepcopy(model)
    engine: Any = initialized(model, config(clipping=0.5, section={"window": window}))
    for each, backward in ((plain, torch.Tensor.backward), (engine, engine.backward)):
        for number in range(3):
            backward(each(**batch(number)))
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(safe_get_full_grad(p), expected.grad)
    engine.destroy()


class CheckpointedInside(Block):
    """One call, of which nothing tells that it hands over its gradients twice."""

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(super().forward, x, True, use_reentrant=True)
        return x


class CheckpointedBefore(Model):
    """Of its first layer two calls hand over together, and then the one inside the checkpoint."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return super().forward(self.first(self.first(x)))


@pytest.mark.parametrize("jitter_s", [0.0, 0.0003])
@pytest.mark.parametrize("make", [partial(Once, CheckpointedInside), CheckpointedBefore])
def test_a_gradient_that_comes_after_its_early_update_is_in_the_step(
    make: Any, jitter_s: float
) -> None:
    factory_of_it = partial(model_of, make)
    section = {"window": 1, "early_layers": "all", "emulated": {"jitter_s": jitter_s}}
    settings = config(clipping=0.0, section=section)
    run = train_windowed(factory_of_it, steps=4, settings=settings)
    expected = train_plain(factory_of_it, steps=4, clipping=0.0)
    assert_identical(run, expected)
    assert run.norms == expected.norms


@pytest.mark.xfail(strict=True, reason="the parts of one backward are summed up one by one")
@pytest.mark.parametrize("make", [partial(Once, CheckpointedInside), CheckpointedBefore])
def test_a_further_gradient_is_added_to_the_first_before_both_are_summed_up(make: Any) -> None:
    """What a call hands over in two parts is one gradient of its micro-batch."""
    factory_of_it = partial(model_of, make)
    settings = config(clipping=0.5, accumulation=2, section={"window": 1})
    run = train_windowed(factory_of_it, steps=3, settings=settings)
    assert_identical(run, train_plain(factory_of_it, steps=3, clipping=0.5, accumulation=2))


class TwoInside(Block):
    """Two backwards inside of the backward. What `kept` has of the block is dropped between
    them."""

    kept: dict[int, torch.Tensor]
    number: int

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        middle = checkpoint(super().forward, x, True, use_reentrant=True)
        middle.register_hook(self.drop)
        return checkpoint(super().forward, middle, True, use_reentrant=True)

    def drop(self, _: torch.Tensor) -> None:
        self.kept.pop(self.number, None)


class AliasedForAWhile(Once):
    """An alias of each block's weights lives until the second half of the block's backward."""

    def __init__(self) -> None:
        super().__init__(TwoInside)
        self.kept: dict[int, torch.Tensor] = {}
        for number, block in enumerate(self.blocks):
            block.kept, block.number = self.kept, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        for number, block in enumerate(self.blocks):
            self.kept[number] = block.linear.weight.detach()
        return loss


def aliased_for_a_while() -> Any:
    _, batch = factory()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AliasedForAWhile(), batch


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_no_gradient_is_lost_when_an_alias_goes_in_the_middle_of_backward(
    clipping: float, activations: str
) -> None:
    """The gradients before wait for the end of backward, and so do those that follow."""
    section = {"window": 1, "activations": activations, "early_layers": "all"}
    settings = config(clipping=clipping, section=section)
    run = train_windowed(aliased_for_a_while, steps=3, settings=settings)
    expected = train_plain(aliased_for_a_while, steps=3, clipping=clipping)
    assert_identical(run, expected)
    assert run.norms == expected.norms
