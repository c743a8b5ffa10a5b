"""The model that all methods train: the artifact's GPT, or a Llama by its sizes.

Owns the architecture and its seeded weights. A `Model` has `blocks` and everything else outside of
them; called with `input_ids` and `labels` it returns an object with `loss`. Weights are drawn
parameter by parameter, so that they do not depend on what a method does with the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from methods.task import Task

LOSS_ROWS = 4096  # logits of at most so many tokens exist at once


@dataclass
class Output:
    """What a framework's model returns, as far as training needs it. ZeRO-3 walks its `__dict__`
    and writes to it."""

    loss: torch.Tensor


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        shape = (batch, seq, self._heads, hidden // self._heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """A pre-norm GPT block: 12 h^2 + 13 h parameters."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class RMSNorm(nn.Module):
    """Root mean square in fp32, as Llama's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU; no biases."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._size = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self._size, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self._size, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        by_head = (batch, seq, -1, self._size)
        q, k, v = (part(x).view(by_head).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q), rotate(k)
        if self._kv_heads < self._heads:
            repeats = self._heads // self._kv_heads
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, seq, hidden))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021), base 10,000, halves as in Llama."""
    seq, half = x.shape[-2], x.shape[-1] // 2
    rates = 1e4 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(seq, device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Model(nn.Module):
    """Embedding, blocks, final norm and head; the GPT's head is its embedding."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        hidden = task.hidden
        llama = task.family == "llama"
        self.recompute = False
        self.embedding = nn.Embedding(task.vocab, hidden)
        self.positions = None if llama else nn.Embedding(task.seq, hidden)
        self.blocks = nn.ModuleList(make_block(task) for _ in range(task.layers))
        self.norm = RMSNorm(hidden) if llama else nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, task.vocab, bias=False)
        if not llama:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return Output(self.loss(x, labels))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the first block is given."""
        x = self.embedding(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        return x

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next token in fp32; a slice of the tokens at a time."""
        rows = self.norm(x)[:, :-1].reshape(-1, x.shape[-1])
        targets = labels[:, 1:].reshape(-1)
        pieces = zip(rows.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
        if len(rows) <= LOSS_ROWS:
            return self._sum_of_losses(rows, targets) / targets.numel()
        sums = [checkpoint(self._sum_of_losses, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(sums).sum() / targets.numel()

    def _sum_of_losses(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(rows).float(), targets, reduction="sum")


def make_block(task: Task) -> nn.Module:
    if task.family == "gpt":
        return Block(task.hidden, task.heads)
    intermediate = task.intermediate or -(-8 * task.hidden // 3 // 256) * 256
    return LlamaBlock(task.hidden, task.heads, task.kv_heads or task.heads, intermediate)


def build(task: Task, *, recompute: bool) -> Model:
    """The model on the CPU, in the task's dtype; `recompute`: blocks are checkpointed by torch."""
    with torch.device("meta"):
        model = Model(task)
    model = model.to(task.dtype).to_empty(device="cpu")
    if task.family == "gpt":
        model.head.weight = model.embedding.weight  # to_empty gave each its own
    draw_weights(model, task)
    model.recompute = recompute
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, task: Task) -> None:
    """Normal with deviation 0.02 for matrices; norms are 1, biases 0.

    Drawn on the GPU where there is one, which takes seconds where a CPU takes minutes; machines
    therefore differ, methods on one machine do not.
    """
    generator = torch.Generator(task.device).manual_seed(task.seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=task.device)
            parameter.copy_(drawn.normal_(0.0, 0.02, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
