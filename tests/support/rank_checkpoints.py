"""Checkpoints of several ranks, also of model-parallel ones; every rank enters them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import directory, save
from stronghold.errors import ConfigError
from tests.models import MODELS, loss_of
from tests.support.rank_cases import files
from tests.support.rank_models import Wide, choosy, engine_of, num_ranks, rank
from tests.support.training import config


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


def within_step(
    save: Path | None, load: Path | None, *, last: int, **section: Any
) -> dict[str, Any]:
    """Load, train up to micro-batch `last` of two a step, and save; the state, whole on every rank.

    Every micro-batch uses other blocks, and every rank other parameters of them.
    """
    model, make_batch = choosy()
    settings = config(precision="bf16", accumulation=2, section=section)
    engine = engine_of(model, settings)
    try:
        if load is not None:
            engine.load_checkpoint(load)
        losses, norms = [], []
        while engine.micro_steps < last:
            batch = make_batch(2 * engine.micro_steps + rank())
            loss = loss_of(engine(**batch))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        if save is not None:
            engine.save_checkpoint(save)
        weights = {n: p.detach().clone() for n, p in engine.named_parameters()}
        counts = [layer.counts for layer in engine.inspect().layers]
        return {"losses": losses, "norms": norms, "weights": weights, "counts": counts}
    finally:
        engine.destroy()


def resumed_within_step(folder: Path, last: int = 3, **section: Any) -> dict[str, Any]:
    """Stop after micro-batch `last` of two a step, and go on."""
    return {
        "straight": within_step(None, None, last=4),
        "saved": within_step(folder / "within", None, last=last, **section),
        "on": within_step(None, folder / "within", last=4),
        "folder": str(folder / "within"),
    }


def resumed_within_steps(folder: Path) -> dict[str, Any]:
    """Stop within the first step and within the second, in memory and in files."""
    found = {}
    for name, section in (("memory", {}), ("files", files("masters"))):
        for last in (1, 3):
            name_of_run = f"{name} {last}"
            found[name_of_run] = resumed_within_step(folder / name_of_run, last, **section)
    return found


def within_step_elsewhere(folder: Path) -> dict[str, Any]:
    """Load within a step, save again untrained, and go on."""
    source = Path(os.environ["CHECKPOINT"])
    found = within_step(folder / "again", source, last=0)
    return found | {"on": within_step(None, source, last=4)}


def load_elsewhere(folder: Path) -> dict[str, Any]:
    """Load what other ranks saved, and save it again untrained."""
    source = Path(os.environ["CHECKPOINT"])
    return session(folder / "again", source, steps=0) | {"trained": session(None, source, steps=1)}


def different_tags(folder: Path) -> dict[str, str]:
    """The error of a save under a tag for each rank, by the config's `tag_validation`."""
    errors = {}
    for mode in ("Fail", "Warn", "Ignore"):
        model, _ = MODELS["gpt"]()
        engine = engine_of(model, config() | {"checkpoint": {"tag_validation": mode}})
        try:
            engine.save_checkpoint(folder / mode, tag=f"tag-{rank()}")
            errors[mode] = ""
        except ConfigError as error:
            errors[mode] = str(error)
        engine.destroy()
    return errors


def full_disk(folder: Path) -> dict[str, Any]:
    """A save that fails on one rank, and the next one."""
    model, _ = MODELS["gpt"]()
    engine = engine_of(model, config())
    target, found = folder / "full", {}
    write = save.write_tensors

    def fails(path: Path, entries: Any) -> Any:
        if path.name == "weights-00003-00001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, entries)

    try:
        save.write_tensors = fails
        engine.save_checkpoint(target, tag="one")
    except OSError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        save.write_tensors = write
    torch.distributed.barrier()
    found["left"] = sorted(path.name for path in target.iterdir())
    torch.distributed.barrier()
    engine.save_checkpoint(target, tag="two")
    found["then"] = sorted(path.name for path in target.iterdir())
    torch.distributed.barrier()
    engine.destroy()
    return found


def replaced(folder: Path) -> str:
    """What a load says when the tag is replaced between one rank's opening and the other's."""
    model, _ = MODELS["gpt"]()
    engine = engine_of(model, config())
    resolve = directory.resolve
    try:
        engine.save_checkpoint(folder / "replaced", tag="old")
        engine.global_steps += 1  # another save: its manifest says so
        engine.save_checkpoint(folder / "replaced", tag="new")
        other = ("old", "new")[rank()]
        directory.resolve = lambda load_dir, tag: resolve(load_dir, other)
        engine.load_checkpoint(folder / "replaced", tag="old")
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        directory.resolve = resolve
        engine.destroy()
    return "loaded"


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
    # the engine would do it, after the groups
    if not torch.distributed.is_initialized():
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


def slices_elsewhere(_: Path) -> dict[str, Any]:
    """What two model-parallel ranks saved, in two data-parallel places."""
    return slices(Path(os.environ["CHECKPOINT"]))
