"""What each rank of a launch runs over quantised bases, and the same training on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models import loss_of
from tests.support.quantised_bases import BASES, Batches, fp8_on_cpus, token_batch
from tests.support.rank_models import num_ranks, rank
from tests.support.training import Run, config, initialized, moments_of

KINDS = ("nf4 double", "int8", "torchao int8", "FP8Linear")
SECTION: dict[str, Any] = {"window": 1, "activations": "keep", "dtypes": "own"}
STEPS = 3


def fp32_adapters(kind: str) -> tuple[nn.Module, Batches]:
    """Adapters in fp32: half of a gradient is exact there, so that one rank's bits are two's."""
    torch.manual_seed(0)
    model, _ = BASES[kind]()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model, token_batch


def trained(kind: str, folder: Path | None = None) -> Run:
    """The losses of this rank, and the adapters, after three steps over two batches each. With a
    `folder` weights are in files."""
    section = SECTION if folder is None else {**SECTION, "nvme": {"path": str(folder)}}
    accumulation = 2 // num_ranks()
    settings = config(precision="bf16", clipping=0.0, accumulation=accumulation, section=section)
    run = Run()
    with fp8_on_cpus():
        model, make_batch = fp32_adapters(kind)
        engine = initialized(model, settings)
        for step in range(STEPS):
            for micro in range(accumulation):
                loss = loss_of(engine(**make_batch(2 * step + micro * num_ranks() + rank())))
                engine.backward(loss)
                engine.step()
                run.losses.append(loss.detach().clone())
        run.weights = {
            name: parameter.detach().clone()
            for name, parameter in engine.named_parameters()
            if parameter.requires_grad
        }
        if num_ranks() == 1:
            run.moments = moments_of(engine)
        engine.destroy()
    return run


def two_ranks(folder: Path) -> dict[str, Run]:
    """Each kind in memory, and one in files."""
    runs = {kind: trained(kind) for kind in KINDS}
    return {**runs, "in files": trained(KINDS[0], folder / f"files-{rank()}")}
