"""Trainings on `stronghold.train` by several ranks, which own layers; every rank enters them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from stronghold.devices.device import Device
from stronghold.devices.emulated import EmulatedDevice
from stronghold.train.ranks import Ranks
from tests.models import MODELS, loss_of
from tests.support.core import Core, opened
from tests.support.training import Run, dense_copies

TIMEOUT_S = 30.0


@contextlib.contextmanager
def joined(timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """The ranks of this launch."""
    if not distributed.is_initialized():
        # Programs that import side by side on a busy machine meet seconds apart.
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60.0))
    ranks = Ranks(device=None, timeout=timedelta(seconds=timeout_s))
    try:
        yield ranks
    finally:
        ranks.close()


def asked() -> list[str]:
    """The names of the cases that the test wants."""
    names: list[str] = json.loads(os.environ["NAMES"])
    return names


# -- batches that differ ---------------------------------------------------------------------------
@dataclass
class Step:
    """What this forward is of, for models that look: its rank and its number."""

    rank: int = 0
    number: int = 0


NOW = Step()


class Chosen(nn.Module):
    """Calls its block where `is_used(number of the block, rank, step)`."""

    def __init__(self, block: nn.Module, number: int, is_used: Callable[..., bool]) -> None:
        super().__init__()
        self.block, self.number, self.is_used = block, number, is_used

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_used(self.number, NOW.rank, NOW.number):
            return self.block(hidden, *args, **kwargs)
        return hidden


class Towers(nn.Module):
    """Two towers of blocks. Rank 0 calls the left one first, and rank 1 the right one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(8)]
        self.towers = nn.ModuleList([nn.ModuleList(blocks[:4]), nn.ModuleList(blocks[4:])])
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: dict[int, torch.Tensor] = {}
        for side in (NOW.rank, 1 - NOW.rank):
            outputs[side] = x
            for block in self.towers[side]:
                outputs[side] = outputs[side] + block(outputs[side])
        return self.head(outputs[0] + outputs[1]).square().mean()


class Images(nn.Module):
    """A tower that only batches with images call, before blocks that all batches call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(3))
        self.merger = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if NOW.rank == 0 or NOW.number == 2:
            image = x.flip(0)
            for block in self.tower:
                image = image + block(image)
            x = x + self.merger(image)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


class Slow(EmulatedDevice):
    """One of its lanes is late."""

    def __init__(self, lane: str, seconds: float) -> None:
        super().__init__()
        self._slow, self._seconds = lane, seconds

    def delay(self) -> None:
        if threading.current_thread().name.endswith(self._slow):
            time.sleep(self._seconds)


def rows(number: int) -> dict[str, Any]:
    return {"x": torch.randn(8, 24, generator=torch.Generator().manual_seed(number))}


def with_chosen(name: str, is_used: Callable[..., bool]) -> Callable[[], Any]:
    """A model of `MODELS` whose blocks are `Chosen`."""

    def factory() -> Any:
        model, make_batch = MODELS[name]()
        inner = model if hasattr(model, "blocks") else model.model
        key = "blocks" if hasattr(model, "blocks") else "layers"
        blocks = [Chosen(block, k, is_used) for k, block in enumerate(getattr(inner, key))]
        setattr(inner, key, nn.ModuleList(blocks))
        return model, make_batch

    return factory


def always(*_: int) -> bool:
    return True


@dataclass(frozen=True)
class Unlike:
    """Two ranks with different batches, or one that accumulates both.

    has_backward  whether a rank has one in a step. `num_backwards`: how many of each loss
    """

    factory: Callable[[], Any]
    has_backward: Callable[[int, int], bool] = always
    num_backwards: Callable[[int, int], int] = lambda rank, step: 1
    device: Callable[[], Device] = EmulatedDevice
    layers: Any = None
    micro_batches: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    def train(self, ranks: Ranks | None, steps: int = 4) -> Run:
        torch.manual_seed(0)
        model, make_batch = self.factory()
        run, num = Run(), self.micro_batches
        accumulation = num if ranks else 2 * num
        more = {"accumulate": accumulation > 1, "micro_batches": accumulation} | self.settings
        with opened(model, layers=self.layers, device=self.device, ranks=ranks, **more) as core:
            for step in range(steps):
                mine = [ranks.rank] if ranks else [0, 1]
                for k, rank in enumerate(rank for _ in range(num) for rank in mine):
                    self._micro_batch(core, run, make_batch, (rank, step, k), accumulation)
                result = core.trainer.step(clipping=1.0)
                norm = result.grad_norm
                run.norms.append(norm if isinstance(norm, float) else norm())
            run.moments = core.moments()
        run.weights = dense_copies(model.state_dict())
        return run

    def _micro_batch(
        self, core: Core, run: Run, make_batch: Any, place: tuple[int, int, int], of: int
    ) -> None:
        rank, step, k = place
        NOW.rank, NOW.number = rank, step
        micro = step * self.micro_batches + (k if of == self.micro_batches else k // 2)
        loss = loss_of(core.trainer.forward(**make_batch(2 * micro + rank)))
        run.losses.append(loss.detach().clone())
        is_last, count = k == of - 1, self.num_backwards(rank, step)
        for number in range(count if self.has_backward(rank, step) else 0):
            part = loss / (of * count)
            core.trainer.backward(part, ends_step=is_last, retain_graph=number < count - 1)
        if not is_last:
            core.trainer.end_micro_batch()


def drop(block: int, rank: int, step: int) -> bool:
    """LayerDrop with a seed for each rank."""
    return random.Random(f"{block} {rank} {step}").random() < 0.6


def _unlike() -> dict[str, Unlike]:
    uses: dict[str, dict[str, Any]] = {
        "other batches": {"is_used": always},
        "layer drop": {"is_used": drop},
        "rank 1 never uses block 1": {"is_used": lambda k, r, n: (k, r) != (1, 1)},
        "rank 1 alone uses block 1": {"is_used": lambda k, r, n: k != 1 or r == 1},
        "block 2 first in step 2 of rank 1": {"is_used": lambda k, r, n: k != 2 or n * r > 1},
        "rank 0 has no backward": {
            "is_used": always,
            "has_backward": lambda r, n: (r, n) != (0, 1),
        },
        "no backward": {"is_used": always, "has_backward": lambda r, n: n != 1},
        "several backwards": {"is_used": always, "num_backwards": lambda r, n: 1 + (r + n) % 3},
    }
    cases: dict[str, Unlike] = {}
    for title, more in uses.items():
        for name in ("gpt", "mixtral"):
            settings: dict[str, Any] = {"window": 3}
            if name == "gpt":
                settings = {"window": 1, "gradient_slots": 1}
            if "num_backwards" in more:
                settings["optimizer"] = "sgd"
            if title == "layer drop":
                settings["resident_layers"] = 1
            more_of = {key: value for key, value in more.items() if key != "is_used"}
            factory = with_chosen(name, more["is_used"])
            cases[f"{title}, {name}"] = Unlike(factory, settings=settings, **more_of)
    for num in (2, 3):
        cases[f"{num} micro-batches, layer drop"] = Unlike(
            with_chosen("gpt", drop), micro_batches=num, settings={"optimizer": "sgd"}
        )
    cases["images on one rank"] = Unlike(lambda: (Images(), rows), layers=["tower", "blocks"])
    cases["images on one rank, twice"] = Unlike(
        lambda: (Images(), rows),
        layers=["tower", "blocks"],
        micro_batches=2,
        settings={"optimizer": "sgd"},
    )
    for name in ("experts", "layer_drop", "skip_inside"):  # batches choose what is used
        cases[f"other batches, {name}"] = Unlike(MODELS[name], settings={"window": 1})
    cases["towers, slow copies"] = Unlike(
        lambda: (Towers(), rows),
        layers=["towers.0", "towers.1"],
        device=partial(Slow, "offload", 0.02),
        settings={"window": 9, "gradient_slots": 9},  # compute waits for no slot
    )
    for seed in range(20):
        late = {"jitter_s": 3e-3, "seed": seed}
        cases[f"towers {seed}"] = Unlike(
            lambda: (Towers(), rows),
            layers=["towers.0", "towers.1"],
            device=lambda late=late: EmulatedDevice(**late),  # type: ignore[misc]
            settings={"window": 1 + seed % 3, "gradient_slots": 1},
        )
    return cases


UNLIKE = _unlike()


def two_unlike(folder: Path) -> dict[str, Run]:
    found = {}
    for name in asked():
        with joined() as ranks:
            found[name] = UNLIKE[name].train(ranks)
    return found


# -- the end, and what is copied -------------------------------------------------------------------
def ended(folder: Path) -> list[Any]:
    """Weights after a close that came behind a step, and after rank 0 has written its own."""
    found: list[Any] = []
    with joined() as ranks:
        device = partial(Slow, "update", 0.05 * ranks.rank)
        torch.manual_seed(0)
        model, make_batch = MODELS["gpt"]()
        with opened(model, ranks=ranks, device=device) as core:
            core.trainer.backward(loss_of(core.trainer.forward(**make_batch(0))))
            core.trainer.step(clipping=1.0)
        found.append(dense_copies(model.state_dict()))
        if ranks.rank == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        distributed.barrier()
        found.append(dense_copies(model.state_dict()))
    return found


class Reversed(nn.Module):
    """Calls its blocks from the last one on, without one of them: nobody could guess it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(6))
        self.head = nn.Linear(24, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for k in range(5, -1, -1):
            if self.calls == 1 or k != 1 + self.calls % 3:
                x = x + self.blocks[k](x)
        return self.head(x).square().mean()


def masters(folder: Path) -> bool:
    """Whether the masters of fp16 have the bits of their weights, with the sign of -0.0."""
    model, _ = MODELS["gpt"]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.flatten()[::2] = -0.0
    with joined() as ranks, opened(model, precision="fp16", ranks=ranks) as core:
        of, own = core.trainer.arrays.of, [x for x in core.layers if ranks.owns(x)]
        pairs = [(of(x, "low"), of(x, "weights").float()) for x in own]
        return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def copied(folder: Path) -> list[tuple[int, int]]:
    """Bytes of gradients that a rank copies to the host in each step, and those that it owns."""
    found = []
    with (
        joined() as ranks,
        opened(Reversed(), layers=["blocks"], gradient_slots=2, ranks=ranks) as core,
    ):
        own = sum(x.trained_bytes for x in core.layers if ranks.owns(x))
        for step in range(4):
            before = core.trainer.gradients.offloaded_bytes
            core.trainer.backward(core.trainer.forward(**rows(step)))
            core.trainer.step()
            found.append((core.trainer.gradients.offloaded_bytes - before, own))
    return found


# -- programs that fail ----------------------------------------------------------------------------
def refused(folder: Path) -> dict[str, str]:
    """What is refused by name, on every rank."""
    found = {}
    with joined() as ranks:
        model, make_batch = MODELS["gpt"]()
        with opened(model, ranks=ranks) as core:
            with torch.no_grad():
                next(iter(model.parameters())).mul_(2)
            with pytest.raises(Exception) as caught:
                core.trainer.forward(**make_batch(0))
            found["written"] = str(caught.value)
    with joined() as ranks:
        model, _ = MODELS["gpt" if ranks.rank else "gpt_tied"]()
        with pytest.raises(Exception) as caught:
            Core(model, ranks=ranks)
        found["another model"] = str(caught.value)
    return found


HOWS = ["raises", "dies", "hangs", "raises in its update", "dies in its update", "raises at start"]
HOWS += ["raises in its step"]
FAILS_IN, LIMIT_S = 2, 5.0  # the step; the time-out


def failing(folder: Path) -> tuple[str, str, float]:
    """Rank 1 fails in a step. What the others get: the type of the error, its words, and the
    seconds since."""
    how, began = os.environ["HOW"], time.monotonic()

    def fail(*_: Any, **__: Any) -> Any:
        if "dies" in how:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * LIMIT_S if how == "hangs" else 0.0)
        raise ArithmeticError("the program's own error")

    with joined(LIMIT_S) as ranks:
        model, make_batch = MODELS["gpt"]()
        core = Core(model, ranks=ranks)
        try:
            for step in range(5):
                if step == FAILS_IN:
                    ranks.barrier()
                    began = time.monotonic()
                    if ranks.rank == 1 and "start" in how:
                        core.device.fetch.submit("fetch 3", fail)
                    elif ranks.rank == 1 and "step" in how:
                        core.trainer.updates._outdate = fail  # type: ignore[method-assign]
                    elif ranks.rank == 1 and "update" in how:
                        core.trainer.updates._run = fail  # type: ignore[method-assign]
                    elif ranks.rank == 1:
                        first: Any = next(iter(model.blocks[1].parameters()))
                        first.register_hook(fail)
                core.trainer.backward(loss_of(core.trainer.forward(**make_batch(step))))
                core.trainer.step()
            core.trainer.synchronize()
            found = ("", "", 0.0)
        except Exception as error:
            found = (type(error).__name__, str(error), time.monotonic() - began)
        with contextlib.suppress(Exception):
            core.close()
    (folder / f"seconds-{ranks.rank}").write_text(f"{time.monotonic() - began}")
    distributed.destroy_process_group()
    return found


def of_two(folder: Path) -> dict[str, Any]:
    """What needs two ranks, and little time: a launch takes seconds."""
    works = (ended, copied, masters, refused)
    return {work.__name__: work(folder) for work in works}
