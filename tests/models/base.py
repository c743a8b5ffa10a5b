"""The zoo's register, and the parts that its models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Any]
MakeBatch = Callable[[int], Batch]
Factory = Callable[..., tuple[nn.Module, MakeBatch]]

VOCAB, HIDDEN, HEADS, LENGTH = 37, 16, 2, 8

MODELS: dict[str, Factory] = {}  # all of them
PLAIN: list[str] = []  # plain PyTorch: no import beyond torch
HUGGING_FACE: list[str] = []  # importing transformers takes seconds
TOYS: list[str] = []  # without repeated blocks


def loss_of(output: Any) -> Tensor:
    """The scalar loss in any model's output: itself, `.loss`, ["loss"] or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["loss"] if isinstance(output, dict) else output.loss


def _register(names: list[str]) -> Callable[[Factory], Factory]:
    def register(factory: Factory) -> Factory:
        def seeded(*, seed: int = 0, **options: Any) -> tuple[nn.Module, MakeBatch]:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model, make_batch = factory(**options)
            return model.train(), make_batch

        name = factory.__name__
        MODELS[name] = seeded
        names.append(name)
        return seeded

    return register


plain, hugging_face, toy = _register(PLAIN), _register(HUGGING_FACE), _register(TOYS)


def without_caches(model: nn.Module) -> nn.Module:
    """The model with `use_cache` switched off wherever a Transformers config has it on: a plain
    loop's, which keeps no key-value cache either while it trains."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model


def token_batch(seed: int, vocab: int = VOCAB, length: int = LENGTH) -> Batch:
    """Two sequences of tokens and the labels to predict."""
    random = torch.Generator().manual_seed(seed)
    draw = torch.randint(vocab, (2, length + 1), generator=random)
    return {"input_ids": draw[:, :-1].contiguous(), "labels": draw[:, 1:].contiguous()}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# --- parts ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    def __init__(self, hidden: int = HIDDEN, inner: int = 4 * HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int = HIDDEN, inner: int = 4 * HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; returns the loss. Subclasses change `run`, the way through the
    blocks."""

    def __init__(self, blocks: list[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        x = self.run(x, input_ids)
        return cross_entropy(self.head(self.norm(x)), labels)
