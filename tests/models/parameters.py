"""Models whose parameters are of every kind: tied, frozen, unused, shared, uneven, of odd sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models.base import HIDDEN, Batch, Block, Decoder, plain, token_batch

# --- the ordinary one, and its options ------------------------------------------------------------


@plain
def gpt(num_layers: int = 3, dropout: float = 0.0, tied: bool = False) -> Any:
    return Decoder([Block(dropout=dropout) for _ in range(num_layers)], tied=tied), token_batch


@plain
def gpt_tied(num_layers: int = 3) -> Any:
    return Decoder([Block() for _ in range(num_layers)], tied=True), token_batch


@plain
def gpt_dropout(num_layers: int = 3, dropout: float = 0.2) -> Any:
    return Decoder([Block(dropout=dropout) for _ in range(num_layers)]), token_batch


class _Checkpointed(Decoder):
    use_reentrant = False

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@plain
def gpt_checkpointed(num_layers: int = 3, dropout: float = 0.1, use_reentrant: bool = False) -> Any:
    """The user's own gradient checkpointing: blocks run again in backward, with the same
    dropout."""
    model = _Checkpointed([Block(dropout=dropout) for _ in range(num_layers)])
    model.use_reentrant = use_reentrant
    return model, token_batch


# --- parameters -----------------------------------------------------------------------------------


class WeirdBlock(nn.Module):
    """Parameters of 1, 15, 17 and 4097 elements, one without dimensions and one without
    elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.first = nn.Parameter(0.1 * torch.randn(15))
        self.last = nn.Parameter(0.1 * torch.randn(17))
        self.table = nn.Parameter(0.02 * torch.randn(4097))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.first[:HIDDEN], self.last[:HIDDEN]
        mixed = self.table[: HIDDEN * HIDDEN].view(HIDDEN, HIDDEN)
        rest = (
            self.table[HIDDEN * HIDDEN :].square().mean() + self.last[HIDDEN] + self.nothing.sum()
        )
        shifted = torch.cat([x[..., :15] * low, x[..., 15:]], dim=-1) + high
        return x + self.scale * torch.tanh(shifted @ mixed) * self.gain + rest


@plain
def weird_model(num_layers: int = 4) -> Any:
    return Decoder([WeirdBlock() for _ in range(num_layers)]), token_batch


@plain
def frozen(num_layers: int = 4) -> Any:
    """A whole frozen block, one with a frozen matrix in front of trainable ones, a frozen
    embedding."""
    model = Decoder([Block() for _ in range(num_layers)])
    model.blocks[1].requires_grad_(False)
    model.blocks[2].norm1.weight.requires_grad_(False)
    model.blocks[2].mlp.up.weight.requires_grad_(False)
    model.embedding.weight.requires_grad_(False)
    return model, token_batch


@plain
def frozen_prefix(num_layers: int = 4) -> Any:
    """Everything up to block 1 is frozen: backward ends before it reaches the first blocks."""
    model = Decoder([Block() for _ in range(num_layers)])
    for part in (model.embedding, *model.blocks[:2]):
        part.requires_grad_(False)
    model.positions.requires_grad_(False)
    return model, token_batch


class _Adapted(Block):
    """A frozen block with a low-rank trainable path beside it, as LoRA trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.low = nn.Linear(HIDDEN, 2, bias=False)
        self.high = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.high(self.low(x))


@plain
def adapters(num_layers: int = 3) -> Any:
    """Only the adapters in the blocks are trained; embedding, norm and head are frozen."""
    model = Decoder([])
    model.requires_grad_(False)
    model.blocks.extend(_Adapted() for _ in range(num_layers))
    return model, token_batch


class _WithSpare(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(HIDDEN, 3)


@plain
def unused(num_layers: int = 3) -> Any:
    """Parameters that no forward uses: in every block, a whole block, and beside the blocks."""
    model = Decoder([_WithSpare() for _ in range(num_layers)])
    model.blocks.insert(1, _Idle())
    model.spare = nn.Linear(HIDDEN, 5)
    return model, token_batch


class _Idle(Block):
    """A block whose call uses none of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


@plain
def tied_blocks(num_layers: int = 4) -> Any:
    """Blocks 0 and 2 share a matrix; block 1 has a matrix under two names; block 3 shares a module
    with block 0."""
    model = Decoder([Block() for _ in range(num_layers)])
    model.blocks[2].mlp.up.weight = model.blocks[0].mlp.up.weight
    model.blocks[1].mlp.down.weight = nn.Parameter(model.blocks[1].mlp.down.weight.detach().clone())
    model.blocks[1].again = nn.Linear(4 * HIDDEN, HIDDEN)
    model.blocks[1].again.weight = model.blocks[1].mlp.down.weight
    model.blocks[3].norm1 = model.blocks[0].norm1
    return model, token_batch


class _Resized(nn.Module):
    """MLP of its own width between a projection in and out: no two blocks have the same shapes."""

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, inner, bias=bias)
        self.down = nn.Linear(inner, HIDDEN, bias=not bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@plain
def uneven() -> Any:
    return Decoder(
        [_Resized(7, True), _Resized(120, False), _Resized(33, True), Block()]
    ), token_batch


@plain
def sequential() -> Any:
    """A list of unlike layers, some without parameters, and nothing that repeats."""
    first, middle, last = nn.Linear(9, 33), nn.Linear(33, 65), nn.Linear(65, 1)
    net = nn.Sequential(first, nn.ReLU(), middle, nn.LayerNorm(65), nn.GELU(), last)
    return _Regression(net), _regression_batch


class _Regression(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.net(inputs), targets)


def _regression_batch(seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, 9, generator=random)
    return {"inputs": inputs, "targets": inputs.sum(dim=1, keepdim=True).sin()}
