"""Models without repeated blocks: nothing of them can be streamed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.base import HIDDEN, Batch, Block, Decoder, token_batch, toy
from tests.models.parameters import WeirdBlock


def numbers(seed: int, width: int) -> Batch:
    """Four rows of numbers, and a number for each to predict."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(4, width, generator=random)
    return {"x": x, "labels": x.sum(dim=1) + 0.1 * torch.randn(4, generator=random)}


def squared_error(found: Tensor, labels: Tensor) -> Tensor:
    return (found - labels.to(found.dtype)).square().mean()


class _TwoScalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7))
        self.b = nn.Parameter(torch.tensor(-1.3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return squared_error(x.to(self.a.dtype)[:, 0] * self.a + self.b, labels)


@toy
def two_scalars() -> Any:
    """The regression of Accelerate's own tests: the root holds all parameters."""
    return _TwoScalars(), lambda seed: numbers(seed, 1)


class _OneLinear(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return squared_error(super().forward(x.to(self.weight.dtype))[:, 0], labels)


@toy
def one_linear() -> Any:
    """The model is a layer itself."""
    return _OneLinear(5, 1), lambda seed: numbers(seed, 5)


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.LayerNorm(6)
        self.register_buffer("num_calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.norm(self.first(x))


class _Nested(nn.Module):
    """A Sequential in a module in a module, a buffer that counts, and a weight that two share."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _Body()
        self.scale = nn.Parameter(torch.ones(6))
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.body.first[0].weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.body(x.to(self.scale.dtype)) * self.scale
        return squared_error(self.last(x).sum(dim=1), labels)


@toy
def nested() -> Any:
    return _Nested(), lambda seed: numbers(seed, 6)


@toy
def one_block() -> Any:
    """A decoder of one block, which nothing repeats."""
    return Decoder([Block()]), token_batch


@toy
def one_weird_block() -> Any:
    """Parameters of odd sizes, one without dimensions, one without elements."""
    return Decoder([WeirdBlock()]), token_batch


@toy
def half_frozen() -> Any:
    """The embedding and a matrix of the block are frozen, and a parameter is never used."""
    model = Decoder([Block()])
    model.embedding.weight.requires_grad_(False)
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(HIDDEN))
    return model, token_batch
