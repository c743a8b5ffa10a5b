"""Models that nobody wrote: what blocks do in their forward, how they are called, what they return,
and which way a model goes through them, drawn by a number.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models.base import HIDDEN, LENGTH, MLP, VOCAB, Attention, Batch, cross_entropy

Context = dict[str, Any]  # what a model gives all of its blocks


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Sampler:
    """No module: it draws by generators of its own."""

    def __init__(self) -> None:
        self.torchs = torch.Generator().manual_seed(1)
        self.others = [np.random.default_rng(2), random.Random(3)]

    def draw(self) -> float:
        first = float(torch.rand((), generator=self.torchs))
        return first + sum(each.random() for each in self.others)


# --- parts of blocks ------------------------------------------------------------------------------


class _Part(nn.Module):
    """A residual part; `calls`, `history`, `passing` and `sampler` are in no state dict."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp, self.mix = MLP(HIDDEN, 2 * HIDDEN), Attention()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.convolution = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        used = {"attention": "mix", "words": "words", "convolution": "convolution"}
        used |= dict.fromkeys(("mlp", "checkpointed", "reentrant", "loop", "branch"), "mlp")
        for name in {"mlp", "mix", "words", "convolution"} - {used.get(kind)}:
            delattr(self, name)
        if kind == "parametrized":
            nn.utils.parametrizations.weight_norm(self.linear)
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("passing", torch.zeros((), dtype=torch.int64), persistent=False)
        self.calls, self.history, self.aside = 0, [], torch.zeros(())
        self.sampler = Sampler()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.kind == "its argument":
            x.add_(0.1)
        return x + 0.5 * KINDS[self.kind](self, self.norm(x), context)

    def in_place(self, y: Tensor) -> Tensor:
        z = self.linear(y).sigmoid() * 2.0
        z += 1.0
        z[..., 0] = 0.5
        return z.relu_()

    def counted(self, y: Tensor) -> Tensor:
        self.calls += self.training
        if self.training:
            self.passing += 1
        return self.linear(y) * (1.0 + self.calls % 3 + self.passing % 2)

    def remembered(self, y: Tensor) -> Tensor:
        before = self.history[-1] if self.history else y.new_zeros(())
        self.history.append(y.detach().mean())
        del self.history[:-3]
        return self.linear(y + before)

    def averaged(self, y: Tensor, *, anew: bool) -> Tensor:
        now = y.detach().float().mean((0, 1))
        if self.training and anew:
            self.mean = 0.9 * self.mean + 0.1 * now
        elif self.training:
            self.mean.lerp_(now, 0.1)
        return self.linear(y - self.mean.to(y.dtype))

    def gradient(self, y: Tensor) -> Tensor:
        """Taken inside of the forward, and trained through."""
        trained = torch.is_grad_enabled()
        with torch.enable_grad():
            inside = y if trained and y.requires_grad else y.detach().requires_grad_()
            energy = self.linear(inside).tanh().sum()
            return torch.autograd.grad(energy, inside, create_graph=trained)[0]

    def without(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(y).sigmoid()

    def narrow(self, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(y)

    def hooked(self, y: Tensor) -> Tensor:
        y = self.linear(y)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y

    def left(self, y: Tensor, context: Context) -> Tensor:
        """What it leaves for others, for the loss, and at itself."""
        carried = context["carried"]
        value = self.linear(y + 0.1 * carried.hidden)
        carried.hidden, carried.extra = value.mean(), (carried.extra or 0) + 1
        context["sum"] = context.get("sum", 0.0) + value.square().mean()
        self.aside = value.square().mean()
        context.setdefault("asides", []).append(self)
        return 0.5 * (value + context.setdefault("value", value))

    def repeated(self, y: Tensor, times: int) -> Tensor:
        for _ in range(times):
            y = self.mlp(y)
        return y

    def routed(self, y: Tensor, chosen: Tensor) -> Tensor:
        """Of some tokens, or of none."""
        return torch.zeros_like(y).masked_scatter(chosen.unsqueeze(-1), self.linear(y[chosen]))


KINDS: dict[str, Callable[[Any, Tensor, Context], Tensor]] = {
    "mlp": lambda p, y, c: p.mlp(y),
    "attention": lambda p, y, c: p.mix(y),
    "in place": lambda p, y, c: p.in_place(y),
    "its argument": lambda p, y, c: p.linear(y),
    "function": lambda p, y, c: _Product.apply(y, p.linear.weight),
    "autocast": lambda p, y, c: p.narrow(y).to(y.dtype),
    "checkpointed": lambda p, y, c: checkpoint(p.mlp, y, use_reentrant=False),
    "reentrant": lambda p, y, c: checkpoint(p.mlp, y, use_reentrant=True),
    "noise": lambda p, y, c: p.linear(y) * (torch.rand_like(y) < (0.8 if p.training else 2.0)),
    "python's": lambda p, y, c: p.linear(y * (random.random() if p.training else 1.0)),
    "numpy's": lambda p, y, c: p.linear(y * (np.random.rand() if p.training else 1.0)),
    "own": lambda p, y, c: p.linear(y * (p.sampler.draw() if p.training else 1.0)),
    "counted": lambda p, y, c: p.counted(y),
    "remembered": lambda p, y, c: p.remembered(y),
    "average": lambda p, y, c: p.averaged(y, anew=False),
    "new average": lambda p, y, c: p.averaged(y, anew=True),
    "left": lambda p, y, c: p.left(y, c),
    "gradient": lambda p, y, c: p.gradient(y),
    "stopped": lambda p, y, c: p.linear(torch.cat([y[..., :8], y[..., 8:].detach()], -1)),
    "without": lambda p, y, c: p.without(y) * y,
    "parametrized": lambda p, y, c: p.linear(y),
    "twice": lambda p, y, c: F.linear(p.linear(y).tanh(), p.linear.weight.t()),
    "derived": lambda p, y, c: F.linear(y, p.linear.weight / p.linear.weight.norm(dim=1).add(1)),
    "branch": lambda p, y, c: p.mlp(y) if float(y.detach()[:1, :1, :3].sum()) > 0 else p.linear(y),
    "loop": lambda p, y, c: p.repeated(y, 1 + int(c["tokens"].sum()) % 3),
    "hooked": lambda p, y, c: p.hooked(y),
    "in fp32": lambda p, y, c: F.linear(y.float(), p.linear.weight.float()).to(y.dtype),
    "words": lambda p, y, c: p.linear(y) * p.words(c["tokens"]),
    "convolution": lambda p, y, c: p.convolution(y.transpose(1, 2)).transpose(1, 2),
    "called": lambda p, y, c: c["function"](p.linear(y)),
    "routed": lambda p, y, c: p.routed(y, c["tokens"] < 3),
}


# --- blocks ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Result:
    hidden: Tensor
    extra: Any = None


class _Named(NamedTuple):
    hidden: Tensor
    extra: Any


RETURNS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda o: o),
    "view": (lambda x: x.transpose(1, 2), lambda o: o.transpose(1, 2)),
    "tuple": (lambda x: (x, None), lambda o: o[0]),
    "list": (lambda x: [None, x, x[:, :1]], lambda o: o[1] + 0.1 * o[2]),
    "dict": (lambda x: {"x": x, "mean": x.mean()}, lambda o: o["x"] + 0.1 * o["mean"]),
    "dataclass": (_Result, lambda o: o.hidden),
    "named": (lambda x: _Named(x, (x.square().mean(), 3)), lambda o: o.hidden + 0.1 * o.extra[0]),
    "same twice": (lambda x: (x, x), lambda o: o[0] + 0.5 * o[1]),
    "halves": (lambda x: tuple(x.chunk(2, -1)), lambda o: torch.cat(o, -1)),
}


class _Block(nn.Module):
    def __init__(self, kinds: list[str], returns: str, passes: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(_Part, kinds))
        self.returns, self.passes = returns, passes

    def forward(self, given: Any, context: Context | None = None, **named: Any) -> Any:
        context = named if context is None else context
        x = given[0] if isinstance(given, list) else given
        skipped = self.passes and int(context["tokens"][:1].sum()) % 3 == 0
        for part in () if skipped else self.parts:
            x = part(x, context)
        return RETURNS[self.returns][0](x)


# --- models ---------------------------------------------------------------------------------------

# Which blocks, of an integer that the batch gives.
WAYS: dict[str, Callable[[list[Any], int], list[Any]]] = {
    "straight": lambda blocks, n: blocks,
    "beside": lambda blocks, n: blocks,
    "by sequence": lambda blocks, n: blocks,
    "repeated": lambda blocks, n: blocks * (1 + n % 2) + blocks[:1],
    "skipping": lambda blocks, n: [b for k, b in enumerate(blocks) if (n >> k) % 2],
    "early exit": lambda blocks, n: blocks[: 1 + n % len(blocks)],
    "permuted": lambda blocks, n: random.Random(n).sample(blocks, len(blocks)),
    "backwards": lambda blocks, n: blocks[::-1],
}
LOSSES = ["plain", "plain", "deep", "two passes", "teacher", "penalty", "stopped"]


class Drawn(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        r = random.Random(number)
        self.way, self.loss = r.choice([*WAYS, "straight"]), r.choice(LOSSES)
        self.given = r.choice(["context", "names", "list"])
        self.function = r.choice(["tanh", "closure", "module"])
        self.lengths, self.empty = r.random() < 0.5, r.random() < 0.2
        returns, passes, alike = (r.choice(list(RETURNS)), r.random() < 0.15, r.random() < 0.5)
        counts = [r.choice([1, 2, 3]) for _ in range(r.choice([2, 3, 4]))]
        known = list(KINDS)
        kinds = [[r.choice(known) for _ in range(count)] for count in counts]
        blocks = [_Block(kinds[0] if alike else own, returns, passes) for own in kinds]
        self.embedding, self.own = (nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        first, last = blocks[0].parts[0], blocks[-1].parts[0]
        if r.random() < 0.3:
            self.head.weight = self.embedding.weight
        if r.random() < 0.2:
            last.linear.bias = first.linear.bias
        if r.random() < 0.2:
            last.norm = first.norm
        if r.random() < 0.2:
            r.choice(blocks).requires_grad_(False)
        if r.random() < 0.2:
            self.embedding.requires_grad_(False)

    def take_over(self, other: nn.Module) -> None:
        """What no state dict has."""
        for part, before in zip(self.modules(), other.modules(), strict=True):
            if isinstance(part, _Part):
                part.calls, part.history = before.calls, list(before.history)
                part.passing.copy_(before.passing)
                part.sampler = copy.deepcopy(before.sampler)

    def call(self, block: Any, x: Tensor, context: Context) -> Tensor:
        if self.given == "names":
            output = block(x, **context)
        else:
            output = block([x, None] if self.given == "list" else x, context=context)
        return RETURNS[block.returns][1](output)

    def run(self, x: Tensor, given: Context) -> tuple[Tensor, list[Tensor], Context]:
        tokens, context = given["tokens"], {**given, "carried": _Result(x.new_zeros(()))}
        if self.given == "names":
            context["asides"] = []
        blocks, hidden = WAYS[self.way](list(self.blocks), int(tokens.sum())), [x]
        if self.way == "by sequence":  # each has a block of its own
            each = [{**context, "tokens": row.unsqueeze(0)} for row in tokens]
            found = [
                self.call(blocks[k % len(blocks)], x[k : k + 1], own) for k, own in enumerate(each)
            ]
            return torch.cat(found) if found else x, hidden, context
        for block in blocks:
            beside = self.way == "beside"
            x = x + self.call(block, hidden[0], context) if beside else self.call(block, x, context)
            hidden.append(x)
        return x, hidden, context

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        closure = lambda y: self.own(y).tanh()  # noqa: E731
        functions = {"tanh": torch.tanh, "closure": closure, "module": self.own}
        given: Context = {"tokens": input_ids, "function": functions[self.function]}
        first = self.embedding(input_ids) * 1.0
        if self.loss == "penalty" and not first.requires_grad:
            first.requires_grad_(torch.is_grad_enabled())
        with torch.no_grad():
            teacher = self.run(first.clone(), given)[0] if self.loss == "teacher" else None
        x, hidden, context = self.run(first, given)
        if self.loss == "stopped":
            x, hidden, context = self.run(x.detach(), given)
        x = self.norm(x)
        loss = cross_entropy(self.head(x), labels)
        if teacher is not None:
            loss = loss + 0.1 * (x - teacher).square().mean()
        if self.loss == "two passes":
            loss = loss + (x * self.run(self.embedding(input_ids.flip(1)), given)[0]).mean()
        for each in hidden[1:-1] if self.loss == "deep" else ():
            loss = loss + 0.1 * cross_entropy(self.head(self.norm(each)), labels)
        for part in context.get("asides", ()):
            loss, part.aside = loss + 0.1 * part.aside, torch.zeros(())
        loss = loss + 0.01 * context.get("sum", 0.0)
        if self.loss == "penalty" and torch.is_grad_enabled():
            gradient = torch.autograd.grad(loss, first, create_graph=True)[0]
            loss = loss + gradient.square().sum()
        return {"loss": loss, "hidden": hidden, "logits": None}


def drawn_model(number: int, seed: int = 0) -> tuple[Any, Callable[[int], Batch]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Drawn(number).train()

    def make_batch(seed: int) -> Batch:
        """Of any length, and of any number of sequences."""
        length = LENGTH - 3 * (seed % 2) if model.lengths else LENGTH
        rows = (2, 1, 3, 2, 0 if model.empty else 2)[seed % 5]
        chance = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, (rows, length + 1), generator=chance)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return model, make_batch


def model_of_kind(kind: str) -> tuple[nn.Module, Callable[[int], Batch]]:
    """Three blocks of one part of this kind, one after the other."""
    model, make_batch = drawn_model(0)
    model.way, model.loss, model.given, model.function = "straight", "plain", "context", "tanh"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.blocks = nn.ModuleList(_Block([kind], "tensor", passes=False) for _ in range(3))
    return model.requires_grad_(True), make_batch
