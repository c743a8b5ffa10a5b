"""Models whose blocks are called in every way: twice, never, by choice, with nested arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.models.base import (
    HIDDEN,
    LENGTH,
    MLP,
    Batch,
    Block,
    Decoder,
    cross_entropy,
    plain,
    token_batch,
)


class _Twice(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in (
            self.blocks[0],
            self.blocks[1],
            self.blocks[1],
            self.blocks[2],
            self.blocks[0],
        ):
            x = block(x)
        return x


@plain
def called_twice() -> Any:
    """Block 1 runs twice in a row, block 0 first and last."""
    return _Twice([Block() for _ in range(3)]), token_batch


@plain
def shared_list() -> Any:
    """The same module stands in the list more than once: two blocks make five calls."""
    first, second = Block(), Block()
    return Decoder([first, second, second, first, second]), token_batch


class _StructuredBlock(Block):
    """Takes a tuple and keyword arguments, among them a dict; returns a dict in a tuple."""

    def forward(  # type: ignore[override]
        self, state: tuple[Tensor, int], *, context: dict[str, Tensor], scale: float = 1.0
    ) -> tuple[dict[str, Any], int]:
        x, depth = state
        x = super().forward(x * context["mask"].unsqueeze(-1))
        return {"hidden": scale * x, "aux": [x.square().mean(), None]}, depth + 1


class _Structured(Decoder):
    def forward(self, input_ids: Tensor, labels: Tensor, *, mask: Tensor) -> dict[str, Any]:
        x, depth = self.embedding(input_ids) + self.positions, 0
        penalty = x.new_zeros(())
        for block in self.blocks:
            output, depth = block((x, depth), context={"mask": mask}, scale=0.9)
            x, penalty = output["hidden"], penalty + output["aux"][0]
        logits = self.head(self.norm(x))
        loss = cross_entropy(logits, labels) + 0.01 * penalty
        return {"logits": logits, "loss": loss, "depth": depth}


@plain
def structured(num_layers: int = 3) -> Any:
    def make_batch(seed: int) -> Batch:
        mask = torch.ones(2, LENGTH)
        mask[0, LENGTH - 1 - seed % 3 :] = 0.0
        return {**token_batch(seed), "mask": mask}

    return _Structured([_StructuredBlock() for _ in range(num_layers)]), make_batch


class _Skipping(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if int(input_ids[0, index]) % 2:
                x = block(x)
        return x


@plain
def layer_drop(num_layers: int = 4) -> Any:
    """Which blocks are called depends on the batch; a block may be left out altogether."""
    return _Skipping([Block() for _ in range(num_layers)]), token_batch


class _MayPass(Block):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach()[0, 0, self.index]) > 0 else super().forward(x)


@plain
def skip_inside(num_layers: int = 4) -> Any:
    """A block that may return its very input: called, without a use of its parameters."""
    return Decoder([_MayPass(index) for index in range(num_layers)]), token_batch


class _ExpertBlock(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(HIDDEN, 2 * HIDDEN) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.norm(x).flatten(0, 1)
        weight, choice = self.router(inputs).softmax(dim=-1).max(dim=-1)
        mixed = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            mine = (choice == index).nonzero().squeeze(-1)
            if mine.numel():
                mixed = mixed.index_add(0, mine, expert(inputs[mine]) * weight[mine].unsqueeze(-1))
        return x + mixed.view_as(x)


@plain
def experts(num_layers: int = 3, num_experts: int = 7) -> Any:
    """Top-1 mixture: some experts get no token in some batches, and then no gradient."""
    return Decoder([_ExpertBlock(num_experts) for _ in range(num_layers)]), token_batch


class _BufferBlock(nn.Module):
    """Running statistics, a counter and a table that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HIDDEN)
        self.mlp = MLP()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer(
            "signs", torch.tensor([1.0, -1.0]).repeat(HIDDEN // 2), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        normed = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(normed * self.signs)


@plain
def buffers(num_layers: int = 3) -> Any:
    return Decoder([_BufferBlock() for _ in range(num_layers)]), token_batch


class _GrowingBlock(Block):
    """Power iterations, whose vectors every forward moves and uses, and tables that a forward makes
    when it first needs them, or makes anew when they are too short."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.mlp.up)
        self.register_buffer("table", torch.ones(1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.table.shape[0] < length:
            self.table = torch.arange(length, device=x.device).cos().unsqueeze(-1)
            self.register_buffer("other", self.table.square(), persistent=False)
        return super().forward(x * self.table[:length] + self.other[:length])


@plain
def growing_buffers(num_layers: int = 3) -> Any:
    return Decoder([_GrowingBlock() for _ in range(num_layers)]), token_batch


class _FusedLoss(Decoder):
    """As fused losses do it: in training the head's weight is read, in evaluation its module is
    called."""

    fused: bool | None = None  # None: in training

    def encode(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        return self.norm(self.run(x, input_ids))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.encode(input_ids)
        if self.training if self.fused is None else self.fused:
            return cross_entropy(F.linear(hidden, self.head.weight), labels)
        return cross_entropy(self.head(hidden), labels)


@plain
def fused_loss() -> Any:
    return _FusedLoss([Block() for _ in range(3)]), token_batch
