"""What every process of a launch builds and trains, on its own part of the batches."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import stronghold
from tests.models import MODELS, loss_of
from tests.support.training import Factory, Run, on


def rank() -> int:
    return int(os.environ["RANK"])


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


class Choosy(nn.Module):
    """A batch's number decides which parameters are used, and which blocks run: the same ones for
    `alike` batches, so on all ranks."""

    def __init__(self, width: int = 24, num_layers: int = 5, *, alike: int = 2) -> None:
        super().__init__()
        self.alike = alike
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.sometimes = nn.Parameter(torch.ones(width))
        self.never = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
        y = self.first(x)
        for index, block in enumerate(self.blocks):
            if (number // self.alike + index) % 3:
                y = block(y, number)
        if number % 2:
            y = y * self.sometimes
        return (y - x).square().mean()


class Straying(Choosy):
    """Steps stop at different blocks, skip some or take them in another order and some twice, call
    a layer outside of them, in `ways`; a held tensor is returned inside another object."""

    def __init__(self, *ways: str, width: int = 24, alike: int = 2) -> None:
        super().__init__(width, alike=alike)
        self.ways = ways
        for block in self.blocks:
            block.held = "held" in ways

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        y = first = self.first(x)
        loss = y.new_zeros(())
        blocks, step = [*self.blocks], number // self.alike
        if "exit" in self.ways:
            blocks = blocks[: (1, 4, 2, 5, 3)[step % 5]]
        if "skips" in self.ways:
            blocks = [b for k, b in enumerate(blocks) if step < 1 or (step + k) % 3]
        if "order" in self.ways and step % 2:
            blocks = blocks[::-1] + blocks[:2]
        for block in blocks:
            y = block(y, number)
            y = y.tensor if isinstance(y, Held) else y
            if "deep" in self.ways:
                loss = loss + (self.first(y) - x).square().mean()
        loss = loss + (y - x).square().mean()
        if "penalty" in self.ways:
            (slope,) = torch.autograd.grad(loss, first, create_graph=True)
            loss = loss + slope.square().sum()
        return loss


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Block(nn.Module):
    held = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.even = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor, number: int) -> Any:
        y = x + torch.tanh(self.linear(x))
        y = y + self.even if number % 2 == 0 else y
        return Held(y) if self.held else y


def choosy(
    width: int = 24, *, ways: str = "", alike: int = 2
) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if ways:
            model: nn.Module = Straying(*ways.split(), width=width, alike=alike)
        else:
            model = Choosy(width, alike=alike)

    def make_batch(seed: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(3, width, generator=random), "number": seed}

    return model.train(), make_batch


class Wide(nn.Module):
    """Some megabytes of weights."""

    def __init__(self, width: int = 512, num_layers: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def engine_of(model: nn.Module, settings: dict[str, Any], **more: Any) -> Any:
    parameters = model.parameters()
    engine, *_ = stronghold.initialize(
        model=model, config=settings, model_parameters=parameters, **more
    )
    return engine


def train(
    name: str | Factory,
    settings: dict[str, Any],
    *,
    steps: int = 3,
    options: dict[str, Any] | None = None,
    batches_per_step: int = 2,
    same: bool = False,
    each_step: Callable[[Any, int], None] | None = None,
    by_user: bool = False,
    backward: Callable[[Any, Callable[[], torch.Tensor]], torch.Tensor] | None = None,
) -> Run:
    """Train on the same `batches_per_step` micro-batches a step, whatever the number of ranks; all
    of a step's are the `same` one, for gradients whose mean is exact in 16 bits. Losses are this
    rank's. `name`: of a model, or how it is made.
    """
    if isinstance(name, str):
        factory: Callable[..., Any] = choosy if name == "choosy" else MODELS[name]
    else:
        factory = name
    model, make_batch = factory(**(options or {}))
    accumulation = batches_per_step // num_ranks()
    settings = {**settings, "gradient_accumulation_steps": accumulation}
    engine, *_ = stronghold.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    run = Run()
    try:
        for step in range(steps):
            for micro in range(accumulation):
                index = step if same else step * batches_per_step + micro * num_ranks() + rank()
                batch = on(engine.device, make_batch(index))
                with engine.no_sync():
                    if backward is not None:
                        loss = backward(engine, lambda batch=batch: loss_of(engine(**batch)))
                    else:
                        loss = loss_of(engine(**batch))
                        loss.backward() if by_user else engine.backward(loss)
                engine.step()
                run.losses.append(loss.detach().to("cpu", copy=True))
            run.norms.append(engine.get_global_grad_norm())
            if each_step is not None:
                each_step(engine, step)
        run.weights = {n: p.detach().to("cpu", copy=True) for n, p in engine.named_parameters()}
    finally:
        engine.destroy()
    return run


def full(*_: Any) -> None:
    """Stands for a write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/disk")
