"""Modules whose weights are frozen int8, uint8 or float8 numbers, beside what trains."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.mixed import VOCABULARY, token_batch
from tests.support.training import Factory

BYTES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
WIDTH = 33


class Dequantised(nn.Module):
    """y = x (weight * scale) + x A B + bias: the weight is stored in one byte for each number."""

    def __init__(self, inputs: int, outputs: int, stored: torch.dtype, half: torch.dtype) -> None:
        super().__init__()
        numbers = torch.randint(-100, 101, (outputs, inputs))
        numbers = numbers.abs() if stored is torch.uint8 else numbers
        self.weight = nn.Parameter(numbers.to(half).to(stored), requires_grad=False)
        self.scale = nn.Parameter(torch.full((outputs, 1), 2e-3), requires_grad=False)
        self.down = nn.Parameter(0.1 * torch.randn(4, inputs))
        self.up = nn.Parameter(0.1 * torch.randn(outputs, 4))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
        low_rank = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)
        return F.linear(x, weight, self.bias) + low_rank.to(x.dtype)


class QuantisedBlock(nn.Module):
    def __init__(self, stored: torch.dtype, half: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=half)
        self.inner = Dequantised(WIDTH, 95, stored, half)
        self.outer = Dequantised(95, WIDTH, stored, half)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Quantised(nn.Module):
    def __init__(self, stored: torch.dtype, half: torch.dtype, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=half)
        self.embedding.requires_grad_(False)
        self.blocks = nn.ModuleList(QuantisedBlock(stored, half) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=half)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def quantised_model(
    stored: torch.dtype, half: torch.dtype = torch.bfloat16, num_layers: int = 3, seed: int = 0
) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Quantised(stored, half, num_layers).train()


def quantised(stored: torch.dtype, half: torch.dtype = torch.bfloat16) -> Factory:
    return lambda seed=0: (quantised_model(stored, half, seed=seed), token_batch)


def raw(value: torch.Tensor) -> torch.Tensor:
    """The bytes, in which float8 numbers can be compared."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8)
