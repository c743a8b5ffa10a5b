"""Gradients that come in parts, by reentrant checkpoints around blocks and inside of them.

All of them are in the step, and none of them is too late.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.training import assert_identical, config, train_plain, train_windowed

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.tanh(self.linear(x))) * self.last


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # so that each block has a backward
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))}


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
                x = checkpoint(block, x, use_reentrant=True)
        return x.square().mean()

    def keep(self, _: torch.Tensor) -> None:
        # at rest
        self.kept += [block.linear.weight.detach() for block in self.blocks[1:]]


def model_of(model: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(), batch


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


class Checkpointed(Block):
    """Each call has a backward of its own inside of the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Twice(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(block(x))
        return x.square().mean()


class CheckpointedInside(Block):
    """One call, of which nothing tells that it hands over its gradients twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True)
        return x


class CheckpointedBefore(Model):
    """Of its first layer two calls hand over together, and then the one inside the checkpoint."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return super().forward(self.first(self.first(x)))


@pytest.mark.parametrize("jitter_s", [0.0, 0.0003])
@pytest.mark.parametrize("make", [partial(Model, CheckpointedInside), CheckpointedBefore])
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


class TwoInside(Block):
    """Two backwards inside of the backward. What `kept` has of the block is dropped between
    them."""

    kept: dict[int, torch.Tensor]
    number: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = checkpoint(super().forward, x, use_reentrant=True)
        middle.register_hook(self.drop)
        return checkpoint(super().forward, middle, use_reentrant=True)

    def drop(self, _: torch.Tensor) -> None:
        self.kept.pop(self.number, None)


class AliasedForAWhile(Model):
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


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_no_gradient_is_lost_when_an_alias_goes_in_the_middle_of_backward(
    clipping: float, activations: str
) -> None:
    """The gradients before wait for the end of backward, and so do those that follow."""
    factory = partial(model_of, AliasedForAWhile)
    section = {"window": 1, "activations": activations, "early_layers": "all"}
    settings = config(clipping=clipping, section=section)
    run = train_windowed(factory, steps=3, settings=settings)
    expected = train_plain(factory, steps=3, clipping=clipping)
    assert_identical(run, expected)
    assert run.norms == expected.norms
