"""Checkpoints of several ranks; every rank enters them."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import directory, saving
from stronghold.errors import ConfigError
from tests.models import MODELS, loss_of
from tests.support.rank_cases import files
from tests.support.rank_models import engine_of, num_ranks, rank, train
from tests.support.training import Run, config


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


def thrown_away(folder: Path) -> dict[str, Run]:
    """Gradients of one rank alone wait when all ranks load, or drop what waits, or when none do.
    The model has one layer: with more, backward may wait for the other rank's turns."""

    def each_step(engine: Any, step: int, how: str = "") -> None:
        engine.save_checkpoint(folder / f"thrown away {how}")
        if rank() == 0 and how:
            engine.backward(loss_of(engine(**MODELS["one_linear"]()[1](100 + step))))
        if how == "load":
            engine.load_checkpoint(folder / "thrown away load")
        elif how == "drop":
            engine.zero_grad()

    return {
        how: train("one_linear", config(clipping=0.0), each_step=partial(each_step, how=how))
        for how in ("", "load", "drop")
    }


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
    write = saving.write_tensors

    def fails(path: Path, *tensors: Any) -> Any:
        if rank() == 1 and path.name.startswith("layer-"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *tensors)

    try:
        saving.write_tensors = fails
        engine.save_checkpoint(target, tag="one")
    except OSError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        saving.write_tensors = write
    torch.distributed.barrier()
    found["left"] = sorted(path.name for path in target.glob("*"))
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
