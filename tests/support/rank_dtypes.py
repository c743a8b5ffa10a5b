"""Trainings of several ranks with parameters of several dtypes; every rank enters them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad

from stronghold.optim.states import PAGE_BYTES
from tests.models import loss_of
from tests.support import packed
from tests.support.mixed import MIXED, OWN
from tests.support.quantised import quantised, raw
from tests.support.rank_models import engine_of, num_ranks, rank, train
from tests.support.training import Factory, Run, config

BF16 = torch.bfloat16
MODELS: dict[str, Factory] = {
    **{name: MIXED[name](BF16) for name in ("lora", "t5", "odd")},
    "int8": quantised(torch.int8),
    "float8": quantised(torch.float8_e4m3fn),
    "packed": packed.mixed,
}


def settings_of(precision: str = "bf16", clipping: float = 0.0, **section: Any) -> dict[str, Any]:
    return config(clipping=clipping, precision=precision, section={**OWN, **section})


def files(spill: str, **more: Any) -> dict[str, Any]:
    return {"nvme": {"path": tempfile.gettempdir(), "spill": spill}, **more}


def trained(name: str, settings: dict[str, Any], **more: Any) -> Run:
    run = train(MODELS[name], settings, **more)
    for parameter, weight in run.weights.items():
        if weight.itemsize == 1:  # float8 tensors cannot be pickled
            run.weights[parameter] = raw(weight)
    return run


# What trains of LoRA is fp32: halves of gradients are exact. Of the others all batches of a step
# are the same one, whose mean is exact in 16 bits.
lora = partial(trained, "lora")
CASES: dict[str, Callable[[], Run]] = {
    "lora, one slot": partial(lora, settings_of(window=1)),
    "lora, clipped at a large norm": partial(lora, settings_of(clipping=1e9, window=2)),
    "lora, recomputed": partial(lora, settings_of(window=2, activations="recompute")),
    "lora, one resident": partial(lora, settings_of(window=1, resident_layers=1)),
    "lora, lean": partial(lora, settings_of("lean", window=1)),
    "lora, in chunks": partial(lora, settings_of(window=1, chunk=1)),
    "lora, hostile": partial(lora, settings_of(window=2, emulated={"jitter_s": 2e-3})),
    "packed in nf4": partial(trained, "packed", settings_of(window=1, frozen="nf4"), same=True),
    "packed, all resident": partial(
        trained, "packed", settings_of(resident_layers="all", frozen="nf4"), same=True
    ),
    **{
        f"{name}, {precision}": partial(trained, name, settings_of(precision, window=1), same=True)
        for name in ("t5", "odd", "int8", "float8")
        for precision in ("bf16", "lean")
    },
}


def on_files(name: str, spill: str, precision: str = "bf16", *, in_memory: bool = False) -> Run:
    """Pieces of few pages, so that layers take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stronghold.plan.memory.PIECE_BYTES", 1)
        section = {} if in_memory else files(spill)
        settings = settings_of(precision, clipping=0.5, window=2, **section)
        return trained(name, settings, batches_per_step=4)


FILES: dict[str, Callable[..., Run]] = {
    f"{name}, {spill}, {precision}": partial(on_files, name, spill, precision)
    for name, spill, precision in (
        ("lora", "moments", "bf16"),
        ("odd", "masters", "bf16"),
        ("odd", "masters", "lean"),
        ("t5", "moments", "lean"),
        ("int8", "masters", "bf16"),
    )
}


def session(
    name: str, save: Path | None, load: Path | None, *, steps: int, **section: Any
) -> dict[str, Any]:
    """Load, train on two equal micro-batches a step, and save; the state, whole on every rank."""
    model, make_batch = MODELS[name](seed=int(load is not None))
    settings = settings_of(**section)
    settings["gradient_accumulation_steps"] = 2 // num_ranks()
    engine = engine_of(model, settings)
    try:
        if load is not None:
            engine.load_checkpoint(load)
        done, losses = engine.global_steps, []
        for step in range(done, done + steps):
            for _ in range(engine.gradient_accumulation_steps()):
                loss = loss_of(engine(**make_batch(step)))
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach().clone())
        if save is not None:
            engine.save_checkpoint(save)
        weights = {n: p.detach().clone() for n, p in engine.named_parameters()}
        return {"losses": losses[:: engine.gradient_accumulation_steps()], "weights": weights}
    finally:
        engine.destroy()


def checkpoints(name: str, folder: Path) -> dict[str, Any]:
    return {
        "first": session(name, folder / name, None, steps=2),
        "on": session(name, None, folder / name, steps=2),
        "on files": session(name, None, folder / name, steps=2, **files("masters")),
        "straight": session(name, None, None, steps=4),
        "saved": str(folder / name),
    }


def memory(name: str, precision: str, **section: Any) -> dict[str, Any]:
    """Bytes after a step, as measured, as planned, and by the formats of what this rank owns."""
    model, make_batch = MODELS[name]()
    engine = engine_of(model, settings_of(precision, clipping=0.5, window=1, **section))
    try:
        for step in range(2):
            engine.backward(loss_of(engine(**make_batch(step))))
            engine.step()
        engine.synchronize()
        now, report = engine.inspect(), engine.memory_report()
        buffers = engine._job.trainer.gradients._buffers
        owned, of_node = 0.0, PAGE_BYTES  # with the counters of the node's weights
        for layer, own in zip(now.layout.layers, engine._job.layers, strict=True):
            of_node += -(-own.num_bytes // PAGE_BYTES) * PAGE_BYTES
            states = layer.states
            if states is not None and engine._job.ranks.owns(own):
                # what an update changes, and the gradients that wait for it
                kept = states.low_bytes + states.moment_bytes + states.dtype.itemsize
                owned += layer.trained_numel * kept
        return {
            "host": (report.host_peak, report.host_planned),
            "gpu": (report.gpu_peak, report.gpu_planned),
            "nvme": (report.nvme_peak, report.nvme_planned),
            "formula": owned + of_node // num_ranks(),
            "early": sum(buffer.nbytes for buffer, _ in buffers.values()),
        }
    finally:
        engine.destroy()


def gradients(name: str, section: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of a batch of each rank's, as they wait for the step: whole on every rank."""
    model, make_batch = MODELS[name]()
    engine = engine_of(model, settings_of(clipping=0.5, window=1, **section))
    try:
        engine.backward(loss_of(engine(**make_batch(rank()))))
        found = {
            parameter: safe_get_full_grad(p)
            for parameter, p in model.named_parameters()
            if p.requires_grad
        }
        engine.step()
        return found
    finally:
        engine.destroy()


GRADIENTS = {
    f"{name}, {place}": (name, section)
    for name in ("lora", "t5", "odd", "int8")
    for place, section in (("in memory", {}), ("on files", files("masters")))
}
MEASURED = ("lora", "odd", "int8")


def two_ranks(folder: Path) -> dict[str, Any]:
    return {
        "bits": {name: run() for name, run in CASES.items()},
        "gradients": {case: gradients(*of) for case, of in GRADIENTS.items()},
        "files": {name: (run(), run(in_memory=True)) for name, run in FILES.items()},
        "checkpoints": {name: checkpoints(name, folder) for name in MEASURED},
        "memory": {
            f"{name}, {precision}": memory(name, precision)
            for name in MEASURED
            for precision in ("bf16", "lean")
        },
        "memory on files": {name: memory(name, "bf16", **files("masters")) for name in MEASURED},
    }


NODES = ("lora, one slot", "odd, bf16", "odd, lean", "t5, bf16", "int8, lean")


def two_nodes(_: Path) -> dict[str, Run]:
    """One rank on each: every node has its weights, and exchanges what the other updates."""
    return {name: CASES[name]() for name in NODES}
