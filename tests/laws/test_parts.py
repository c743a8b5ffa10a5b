"""A layer whose gradients come in parts: blocks are called twice, the second call alone uses one of
their parameters, and other layers need the gradient slot in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training import assert_identical, config, train_plain, train_windowed

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
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for last in (False, True):
            for block in self.blocks:
                x = block(x, last)
        return x.square().mean()


def factory() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model()

    def batch(number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(2, WIDTH, generator=generator)}

    return model, batch


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_parts_are_updated_once_when_backward_has_ended(clipping: float, activations: str) -> None:
    """Neither in the middle of backward, which needs the weights once more, nor for each part."""
    section = {"window": 1, "activations": activations, "emulated": {"jitter_s": 3e-4}}
    settings = config(clipping=clipping, section=section)
    run = train_windowed(factory, steps=3, settings=settings)
    expected = train_plain(factory, steps=3, clipping=clipping)
    assert_identical(run, expected)
    assert run.norms == expected.norms
