"""What the processes of `test_ranks` run: each function is entered by every rank."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold import refine
from stronghold.checkpoint import shared_save
from stronghold.errors import BudgetError, ConfigError, LaneError, RankError
from stronghold.memory.spillfile import SpillFile
from stronghold.runtime.ranks.drains import SharedDrains
from stronghold.telemetry.trace import read
from tests.conftest import lane_threads
from tests.models import MODELS, loss_of
from tests.sleeping import SleepingModel
from tests.training import Run, config


def rank() -> int:
    return int(os.environ["RANK"])


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


class Choosy(nn.Module):
    """What a batch's number decides: which blocks run, and whether a parameter is used."""

    def __init__(self, width: int = 24, num_layers: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.sometimes = nn.Parameter(torch.ones(width))
        self.never = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
        y = self.first(x)
        for index, block in enumerate(self.blocks):
            if (number + index) % 3:
                y = block(y, number)
        if number % 2:
            y = y * self.sometimes
        return (y - x).square().mean()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.even = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        y = x + torch.tanh(self.linear(x))
        return y + self.even if number % 2 == 0 else y


def choosy(width: int = 24) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Choosy(width)

    def make_batch(seed: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(3, width, generator=random), "number": seed}

    return model.train(), make_batch


def train(
    name: str,
    settings: dict[str, Any],
    *,
    steps: int = 3,
    options: dict[str, Any] | None = None,
    batches_per_step: int = 2,
    each_step: Callable[[Any, int], None] | None = None,
) -> Run:
    """Train on the same `batches_per_step` micro-batches a step, whatever the number of ranks.
    Losses are this rank's.
    """
    factory = choosy if name == "choosy" else MODELS[name]
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
                index = step * batches_per_step + micro * num_ranks() + rank()
                with engine.no_sync():
                    loss = loss_of(engine(**make_batch(index)))
                    engine.backward(loss)
                engine.step()
                run.losses.append(loss.detach().clone())
            run.norms.append(engine.get_global_grad_norm())
            if each_step is not None:
                each_step(engine, step)
        run.weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
    finally:
        engine.destroy()
    return run


# Frozen and tied parameters, blocks called twice, unused ones, experts chosen by the data.
ZOO = "gpt gpt_tied frozen unused tied_blocks called_twice experts adapters uneven"
CASES: dict[str, Callable[[], Run]] = {
    **{name: partial(train, name, config(clipping=0.0)) for name in ZOO.split()},
    "choosy": partial(train, "choosy", config(clipping=0.0), steps=5),
    "choosy, one slot": partial(
        train, "choosy", config(clipping=0.0, section={"window": 1}), steps=5
    ),
    "weird sizes": partial(train, "weird_model", config(clipping=0.0)),
    "recomputed": partial(train, "gpt", config(clipping=0.0, section={"activations": "recompute"})),
    "hostile": partial(
        train, "gpt", config(clipping=0.0, section={"window": 2, "emulated": {"jitter_s": 2e-3}})
    ),
    # A norm above which nothing is clipped: gradients wait for the gate.
    **{
        f"{name}, held": partial(train, name, config(clipping=1e9))
        for name in ("gpt_tied", "called_twice", "experts", "choosy")
    },
    "deferred": partial(
        train,
        "choosy",
        config(clipping=0.0, section={"deferred_layers": 3, "emulated": {"jitter_s": 1e-3}}),
    ),
    "parts": lambda: in_parts(known=True),
    # One rank alone takes the same steps in memory.
    "files": lambda: on_files("experts", clipping=0.0, spill="moments"),
    "files, choosy": lambda: on_files("choosy", clipping=0.0, spill="moments"),
    "files, held": lambda: on_files("choosy", clipping=1e9),
    "files, parts": lambda: in_parts(known=True, section=files("masters")),
}


def files(spill: str | None = None, **more: Any) -> dict[str, Any]:
    """A section whose state lies in files of each rank, on one path."""
    nvme = {"path": tempfile.gettempdir()} | ({"spill": spill} if spill else {})
    return {"nvme": nvme, **more}


def on_files(
    name: str,
    *,
    clipping: float,
    spill: str | None = None,
    precision: str = "fp32",
    batches_per_step: int = 2,
    in_memory: bool = False,
) -> Run:
    """Several ranks spill, everything but weights if `spill` does not say what; one, and what is
    to stay `in_memory`, does not. Layers of choosy take several pieces."""
    more: dict[str, Any] = {"steps": 4, "batches_per_step": batches_per_step}
    if name == "choosy":
        more["options"] = {"width": 96}
    settings = config(clipping=clipping, precision=precision, section={"window": 2})
    if in_memory or num_ranks() == 1:
        return train(name, settings, **more)
    spilled: set[str] = set()
    section = files(spill, window=2, emulated={"jitter_s": 3e-4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stronghold.plan.spills.PIECE_BYTES", 1)  # so as few as hold a page
        settings["stronghold"] |= section
        if spill is None:
            settings["stronghold"]["host_memory"] = least_memory(name, settings, **more)
        run = train(
            name,
            settings,
            each_step=lambda engine, _: spilled.update(*engine.plan.spilled),
            **more,
        )
    assert spilled >= ({"exp_avg", "exp_avg_sq"} if spill else EVERYTHING[precision]), spilled
    return run


EVERYTHING = {
    "fp32": {"exp_avg", "exp_avg_sq", "gradients"},
    "bf16": {"exp_avg", "exp_avg_sq", "low"},
}


def least_memory(name: str, settings: dict[str, Any], **more: Any) -> int:
    """What the plan needs on the host when all that can spill does, as its error says."""
    section = {**settings["stronghold"], "host_memory": 4096}
    try:
        train(name, {**settings, "stronghold": section}, **more)
    except BudgetError as error:
        return int(re.findall(r"to at least (\d+) bytes", str(error))[0])
    raise AssertionError("a page of memory suffices")


# With files, beside the same in memory.
FILES: dict[str, Callable[..., Run]] = {
    "held": partial(on_files, "choosy", clipping=0.5, precision="bf16"),
    "accumulated": partial(on_files, "choosy", clipping=0.5, precision="bf16", batches_per_step=4),
    "ring": partial(on_files, "choosy", clipping=0.0, precision="bf16"),
}


CLOSE: dict[str, Callable[[], Run]] = {
    "clipped": partial(train, "gpt", config(clipping=0.1), batches_per_step=4),
    "bf16": partial(train, "gpt", config(precision="bf16"), batches_per_step=4),
}
TWICE = ("gpt", "experts", "choosy")


def two_ranks(folder: Path) -> dict[str, Any]:
    """Everything that needs two ranks and no failure."""
    return {
        "bits": {name: run() for name, run in CASES.items()},
        "again": {name: CASES[name]() for name in TWICE},
        "close": {name: run() for name, run in CLOSE.items()},
        "files": {name: (run(), run(in_memory=True)) for name, run in FILES.items()},
        "memory deferred": memory(clipping=0.0, deferred_layers=4),
        "memory on files": memory(clipping=1.0, **files("masters")),
        "memory": memory(clipping=1.0),
        "memory without gate": memory(clipping=0.0),
        "traffic": traffic(),
        **alone(),
        "surface": surface(),
        "overflow": overflow(),
        "refused": refused(),
        "checkpoint": checkpoint(folder),
        "life": life(),
        "model parallel": model_parallel(),
        "slices": slices(folder / "slices"),
        "model parallel on files": model_parallel(**files("masters")),
        "refined": refined(),
        "astray": astray("gather", clipping=1.0),
        "astray without gate": astray("reduce", clipping=0.0),
        "further": further(),
        "broken": broken(),
        "full disk": full_disk(folder),
    }


def engine_of(model: nn.Module, settings: dict[str, Any], **more: Any) -> Any:
    parameters = model.parameters()
    engine, *_ = stronghold.initialize(
        model=model, config=settings, model_parameters=parameters, **more
    )
    return engine


class Wide(nn.Module):
    """Some megabytes of weights."""

    def __init__(self, width: int = 512, num_layers: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def memory(*, clipping: float, **section: Any) -> dict[str, Any]:
    section |= {"layers": "blocks"}
    settings = config(clipping=clipping, precision="bf16", section=section)
    engine = engine_of(Wide(), settings)
    try:
        engine.backward(engine(torch.ones(2, 512, dtype=torch.bfloat16)).float().mean())
        engine.step()
        engine.synchronize()
        stack, report = engine._stack, engine.memory_report()
        padded_numel = sum(layer.numel for layer in stack.layout.layers)
        torch.distributed.barrier()
        found = {
            "host_peak": report.host_peak,
            "host_planned": report.host_planned,
            "gpu_peak": report.gpu_peak,
            "gpu_planned": report.gpu_planned,
            "padded_numel": padded_numel,
            "largest_numel": max(layer.numel for layer in stack.layout.layers),
            "plan": str(stack.plan),
            "nvme_peak": report.nvme_peak,
            "nvme_planned": report.nvme_planned,
            "staging": stack.plan.staging.nbytes,
            "traffic": (stack.plan.nvme_read_bytes, stack.plan.nvme_written_bytes),
            "moved": _moved(stack.host.tiers),
            "weights_bytes": padded_numel * 2,
            "weights_pss": _pss("stronghold weights"),
        }
        torch.distributed.barrier()
        return found
    finally:
        engine.destroy()


def _moved(tiers: Any) -> tuple[int, int]:
    store = tiers._store
    return (store.bytes_read, store.bytes_written) if store is not None else (0, 0)


def _pss(name: str) -> int:
    """Bytes of the mappings whose file has this name, shared pages counted in parts."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = name in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def traffic() -> dict[str, int]:
    """Bytes that a step receives, when the order of the layers is known, with one slot."""
    model, make_batch = MODELS["gpt"](num_layers=5)
    engine = engine_of(model, config(clipping=0.0, section={"window": 1}))
    try:
        before = flags = 0
        for step in range(3):
            before, flags = engine._ranks.received_bytes, engine._ranks.flags.numbers_bytes
            engine.backward(loss_of(engine(**make_batch(2 * step + rank()))))
            engine.step()
            engine._stack.device.gather.submit("wait", lambda: None).wait()
        received = engine._ranks.received_bytes - before
        layers = engine._stack.layout.layers
        twice = sum(layer.numel for layer in layers if layer.streamed)
        once = sum(layer.numel for layer in layers if not layer.streamed)
        # The layer at which backward turns is there still.
        at_the_turn = max(layer.index for layer in layers if layer.streamed)
        weights = 2 * twice - layers[at_the_turn].numel + once
        gradients = sum(layer.trainable_numel for layer in layers)
        return {
            "received": received,
            "expected": (weights + gradients) * 4 // 2,
            "flags": engine._ranks.flags.numbers_bytes - flags,
            "expected_flags": sum(8 * (1 + len(layer.slices)) for layer in layers),
        }
    finally:
        engine.destroy()


def alone() -> dict[str, Any]:
    """Rank 0 evaluates and reads weights between all steps; the other does after the last."""
    _, make_batch = MODELS["gpt"]()
    loss = torch.zeros(())

    def each_step(engine: Any, step: int) -> None:
        nonlocal loss
        if rank() == 0 or step == 2:
            engine.eval()
            with torch.no_grad():
                for seed in range(step + 2):
                    loss = loss_of(engine.module(**make_batch(1000 + seed)))
            engine.module.state_dict()
            engine.train()

    return {"alone": train("gpt", config(clipping=0.0), each_step=each_step), "alone loss": loss}


def surface() -> dict[str, Any]:
    model, _ = MODELS["gpt"]()
    args = argparse.Namespace(local_rank=-1)  # what torchrun leaves of the argument
    settings = config(accumulation=3)
    engine = engine_of(model, settings, args=args, training_data=list(range(8)))
    try:
        return {
            "local_rank": engine.local_rank,
            "global_rank": engine.global_rank,
            "world_size": engine.world_size,
            "dp_world_size": engine.dp_world_size,
            "train_batch_size": engine.train_batch_size(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "samples": torch.cat(list(engine.training_dataloader)).tolist(),
        }
    finally:
        engine.destroy()


def overflow() -> dict[str, Any]:
    """fp16: one rank's loss is infinite."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, {**config(precision="fp16"), "zero_optimization": {"stage": 0}})
    try:
        before = {k: v.clone() for k, v in engine.module_state_dict().items()}
        loss = loss_of(engine(**make_batch(rank())))
        engine.backward(loss * (float("inf") if rank() == 1 else 1.0))
        engine.step()
        after = engine.module_state_dict()
        return {
            "skipped": engine.skipped_steps,
            "scale": engine.optimizer.loss_scale,
            "unchanged": all(torch.equal(after[k], v) for k, v in before.items()),
        }
    finally:
        engine.destroy()


def refused() -> dict[str, str]:
    """What several ranks refuse before they run, and why."""
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "gpu": (Wide(8, 2), {"resident_updates": "gpu"}),
        "nvme": (Wide(8, 2), files("weights")),
        "model": (Wide(8 + rank(), 2), {}),
        "disk": (Wide(8, 2), files("masters")),
    }
    found = {}
    create = SpillFile._create
    for name, (model, section) in cases.items():
        if name == "disk" and rank() == 1:
            SpillFile._create = full
        try:
            engine_of(model, config(section={"layers": "blocks", **section})).destroy()
        except (ConfigError, RankError, OSError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        finally:
            SpillFile._create = create
    return found


# -- checkpoints -----------------------------------------------------------------------------------
def session(save: Path | None, load: Path | None, *, steps: int, **section: Any) -> dict[str, Any]:
    """Load, train on two micro-batches a step, and save; the state, whole on every rank."""
    model, make_batch = MODELS["gpt"]()
    settings = config(precision="bf16", section=section)
    settings["gradient_accumulation_steps"] = 2 // num_ranks() if num_ranks() < 3 else 1
    engine = engine_of(model, settings)
    try:
        if load is not None:
            engine.load_checkpoint(load)
        done = engine.global_steps
        losses = []
        for step in range(done, done + steps):
            for micro in range(engine.gradient_accumulation_steps()):
                index = 2 * step + (micro * num_ranks() + rank()) % 2
                loss = loss_of(engine(**make_batch(index)))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        if save is not None:
            engine.save_checkpoint(save)
        weights = {n: p.detach().clone() for n, p in engine.named_parameters()}
        return {"losses": losses, "weights": weights, "steps": engine.global_steps}
    finally:
        engine.destroy()


def checkpoint(folder: Path) -> dict[str, Any]:
    """Train, save, go on; and a save beside training."""
    return {
        "first": session(folder / "saved", None, steps=2),
        "on": session(None, folder / "saved", steps=2),
        "beside": session(folder / "beside", None, steps=2, async_checkpoint=True),
        "on files": session(folder / "from files", folder / "saved", steps=2, **files("masters")),
        "off files": session(None, folder / "from files", steps=1),
        "straight on": session(None, folder / "saved", steps=3),
        "straight": session(None, None, steps=4),
    } | {name: str(folder / name) for name in ("saved", "beside", "from files")}


def load_elsewhere(folder: Path) -> dict[str, Any]:
    """Load what other ranks saved, and save it again untrained."""
    source = Path(os.environ["CHECKPOINT"])
    return session(folder / "again", source, steps=0) | {"trained": session(None, source, steps=1)}


# -- failures --------------------------------------------------------------------------------------
def fail(folder: Path) -> None:
    """The last rank ends, in the way that HOW names, in its third step. A slow one comes back."""
    from stronghold.runtime.ranks import group

    group.SAY_EVERY_S = 1.0
    how = os.environ["HOW"]
    model, make_batch = MODELS["gpt"]()
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    section = {"rank_timeout_s": 3.0, "nvme": {"path": str(disk), "spill": "masters"}}
    engine = engine_of(model, config(clipping=0.0, section=section))
    for step in range(5):
        loss = loss_of(engine(**make_batch(step)))
        if step == 3 and rank() == num_ranks() - 1:
            (folder / "failing").write_text(str(time.time()))
            if how == "raise":
                raise ArithmeticError("a batch of nonsense")
            if how == "disk":
                engine._stack.host.tiers.spill = full
            elif how == "slow":
                time.sleep(2.5)
            else:
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        engine.backward(loss)
        engine.step()
    engine.synchronize()
    engine.destroy()


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/disk")


def four_ranks(folder: Path) -> dict[str, Run]:
    """Cases that are exact with four ranks too."""
    names = ("gpt", "experts", "choosy")
    cases = {name: partial(train, name, config(clipping=0.0), steps=2) for name in names}
    return {name: case(batches_per_step=4) for name, case in cases.items()}


# -- life ------------------------------------------------------------------------------------------
def life() -> dict[str, Any]:
    """What is left after engines that ended, and after one that could not be made."""
    refused()
    wide = Wide(16, 2)
    engine_of(wide, config(section={"layers": "blocks"})).destroy()
    torch.distributed.barrier()
    if rank() == 0:
        with torch.no_grad():
            for parameter in wide.parameters():
                parameter.fill_(7.0)
    torch.distributed.barrier()
    found = {
        "sevens": all(bool((p == 7.0).all()) for p in wide.parameters()),
        "threads": lane_threads(),
        "files": [name for name in os.listdir("/dev/shm") if "stronghold" in name],
    }
    torch.distributed.barrier()
    return found


def overlap(folder: Path) -> dict[str, float]:
    """Seconds of a step, and of what each lane was busy with in it."""
    trace, num_layers, steps = folder / f"trace-{rank()}.json", 12, 6
    model = SleepingModel([(1 << 18, 0.02, 0.04)] * num_layers)  # 1 MiB in fp32 each
    paces = {"poison": False, "link_gbps": 0.05, "wire_gbps": 0.05}  # 10 ms for half a layer
    section = {"trace": str(trace), "window": 4, "cpu_threads": 1, "emulated": paces}
    engine = engine_of(model, config(section=section))
    stamps = []
    for _ in range(steps):
        stamps.append(time.perf_counter())
        engine.backward(engine(torch.ones(1024)))
        engine.step()
    stamps.append(time.perf_counter())
    engine.destroy()
    lanes = ("compute", "fetch", "gather", "reduce", "drain", "update")
    spans = read(trace)
    busy = {
        lane: sum(span.duration_s for span in spans if span.lane == lane) / steps for lane in lanes
    }
    pairs = itertools.pairwise(stamps)
    return busy | {"step": statistics.median(end - begin for begin, end in pairs)}


class Units:
    """Two model-parallel ranks, neighbours in number, in each data-parallel place."""

    def __init__(self) -> None:
        world, new = range(num_ranks()), torch.distributed.new_group
        self._place, self._unit = divmod(rank(), 2)
        self._alike = [new([r for r in world if r % 2 == unit]) for unit in range(2)][self._unit]
        self._both = [new([r, r + 1]) for r in world[::2]][self._place]

    def get_data_parallel_world_size(self) -> int:
        return num_ranks() // 2

    def get_data_parallel_rank(self) -> int:
        return self._place

    def get_data_parallel_group(self) -> Any:
        return self._alike

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return self._unit

    def get_model_parallel_group(self) -> Any:
        return self._both


def model_parallel(**section: Any) -> dict[str, Any]:
    """Each rank has half of every weight, and the whole of every bias."""
    torch.manual_seed(rank())
    model = Wide(16, 2)
    for block in model.blocks:
        block.weight.tensor_model_parallel = True
    gradients = [torch.full_like(p, 1.0 + rank() * (p.dim() > 1)) for p in model.parameters()]
    engine = engine_of(model, config(section={"layers": "blocks", **section}), mpu=Units())
    try:
        parts = zip(model.parameters(), gradients, strict=True)
        engine.backward(sum((p * g).sum() for p, g in parts))
        engine.step()
        return {
            "weights": [p.detach().clone() for p in engine.parameters()],
            "files": engine.memory_report().nvme_peak,
            "norm": engine.get_global_grad_norm(),
            "expected": (2 * (16 * 16 * (1 + 4) + 16)) ** 0.5,
            "batch": engine.train_batch_size(),
            "ranks": (engine.world_size, engine.dp_world_size, engine.mp_world_size),
        }
    finally:
        engine.destroy()


def slices(folder: Path) -> dict[str, Any]:
    """Each of two model-parallel ranks has a model of its own: save, go on, load, go on again."""
    settings = config(precision="bf16", section={"layers": "blocks"})
    if not torch.distributed.is_initialized():  # the engine would do it, after the groups
        torch.distributed.init_process_group("gloo")

    def session(load: bool, steps: int) -> dict[str, Any]:
        units = Units()
        torch.manual_seed(units.get_model_parallel_rank() + 10 * load)
        engine = engine_of(Wide(16, 3), settings, mpu=units)
        try:
            path = engine.load_checkpoint(folder)[0] if load else None
            losses = []
            for step in range(engine.global_steps, engine.global_steps + steps):
                inputs = torch.full((2, 16), 1.0 + step, dtype=torch.bfloat16)
                loss = engine(inputs).float().square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if not load and step == 1:
                    engine.save_checkpoint(folder)
            found = {n: p.detach().clone() for n, p in engine.named_parameters()}
            return {"losses": losses, "weights": found, "path": path}
        finally:
            engine.destroy()

    found: dict[str, Any] = {} if folder.exists() else {"straight": session(False, 4)}
    found |= {"on": session(True, 2), "unit": rank() % 2}
    found["names"] = sorted(path.name for path in (folder / "global_step2").iterdir())
    whole = engine_of(Wide(16, 3), settings)
    try:
        whole.load_checkpoint(folder)
    except ConfigError as error:
        found["whole"] = str(error)
    whole.save_checkpoint(folder / "whole")
    whole.destroy()
    split = engine_of(Wide(16, 3), settings, mpu=Units())
    for what, attempt in (
        ("split", lambda: split.load_checkpoint(folder / "whole")),
        ("16 bit", lambda: split.save_16bit_model(folder)),
    ):
        try:
            attempt()
        except ConfigError as error:
            found[what] = str(error)
    split.destroy()
    return found


def refined() -> dict[str, Any]:
    """The plan changes while ranks train, each of which has measured something else."""
    worth, refine.WORTH = refine.WORTH, 1e9  # whatever is predicted
    plans: list[Any] = []

    def each_step(engine: Any, _: int) -> None:
        plans.append(engine._stack.plan)

    try:
        section = {"gpu_memory": 400 << 10}
        run = train("gpt", config(clipping=0.0, section=section), steps=6, each_step=each_step)
    finally:
        refine.WORTH = worth
    first, last = plans[0], plans[-1]
    return {
        "run": run,
        "changed": last is not first,
        "plan": (last.window, sorted(last.resident), sorted(last.deferred), last.activations),
    }


def slices_elsewhere(_: Path) -> dict[str, Any]:
    """What two model-parallel ranks saved, in two data-parallel places."""
    return slices(Path(os.environ["CHECKPOINT"]))


def astray(lane: str, *, clipping: float) -> str:
    """One rank is noted for a gather or a reduction that the other does not make."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, config(clipping=clipping))
    before = [p.detach().clone() for p in engine.parameters()]
    said = "nothing was raised"
    try:
        loss = loss_of(engine(**make_batch(rank())))
        if rank() == 1:
            engine._stack._sharing.gathers.note(lane, 0)
        engine.backward(loss)
        engine.step()
    except (RankError, LaneError) as error:
        said = str(error)
    torch.distributed.barrier()
    with contextlib.suppress(LaneError):
        engine.destroy()
    assert all(map(torch.equal, before, model.parameters())), "weights have changed"
    return said


# -- gradients in parts ----------------------------------------------------------------------------
HALVED = 2  # a block of the model


def in_parts(*, known: bool, section: dict[str, Any] | None = None) -> Run:
    """The gradients of a block come in halves, the second ones when backward ends; one of the ranks
    has `known` it, as of a layer that was called twice. One rank alone gets them whole."""
    if num_ranks() == 1:
        return CASES["gpt"]()
    kept: list[tuple[Any, ...]] = []
    whole = {name: getattr(SharedDrains, name) for name in ("prepare", "arrived", "flush")}

    def prepare(self: Any, calls: list[int]) -> None:
        twice = known and rank() == 1
        whole["prepare"](self, [2 if twice and i == HALVED else n for i, n in enumerate(calls)])

    def arrived(
        self: Any, layer: int, position: int, part: Any, parameter: Any, calls: list[int]
    ) -> None:
        if layer == HALVED:
            parameter.grad = parameter.grad / 2
            kept.append((layer, position, part, parameter, parameter.grad.clone()))
        whole["arrived"](self, layer, position, part, parameter, calls)

    def flush(self: Any, calls: list[int]) -> None:
        for layer, position, part, parameter, half in kept:
            parameter.grad = half
            whole["arrived"](self, layer, position, part, parameter, calls)
        assert kept
        kept.clear()
        whole["flush"](self, calls)

    with pytest.MonkeyPatch.context() as patch:
        for change in (prepare, arrived, flush):
            patch.setattr(SharedDrains, change.__name__, change)
        patch.setattr(refine, "UNTOLD_STEPS", 99)  # a simulation has no halves
        return train("gpt", config(clipping=0.0, section=section))


def further() -> str:
    """Nobody knew that more would come."""
    try:
        in_parts(known=False)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def broken() -> str:
    """Backward raises on one rank, when some layers were updated."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, config(clipping=0.0))
    said = ""
    if rank() == 1:
        first = next(model.parameters())
        first.register_hook(lambda gradient: 1 / 0)
    try:
        engine.backward(loss_of(engine(**make_batch(rank()))))
        engine.step()
    except (RankError, LaneError, ZeroDivisionError) as error:
        said = str(error)
    torch.distributed.barrier()
    try:
        engine.backward(loss_of(engine(**make_batch(rank()))))
    except (ConfigError, LaneError) as error:
        said += " | " + str(error)
    with contextlib.suppress(LaneError):
        engine.destroy()
    return said


def full_disk(folder: Path) -> dict[str, Any]:
    """A save that fails on one rank, and the next one."""
    model, _ = MODELS["gpt"]()
    engine = engine_of(model, config())
    target, found = folder / "full", {}
    write = shared_save.write_parts

    def fails(path: Path, entries: Any, *, first: bool) -> Any:
        if rank() == 1 and path.name == "weights-00003.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, entries, first=first)

    try:
        shared_save.write_parts = fails
        engine.save_checkpoint(target, tag="one")
    except OSError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        shared_save.write_parts = write
    torch.distributed.barrier()
    found["left"] = sorted(path.name for path in target.iterdir())
    torch.distributed.barrier()
    engine.save_checkpoint(target, tag="two")
    found["then"] = sorted(path.name for path in target.iterdir())
    torch.distributed.barrier()
    engine.destroy()
    return found
