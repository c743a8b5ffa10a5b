"""DeepSpeed's own engine, beside which ours is looked at."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.models import without_caches

ADAM = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1}
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "steps_per_print": 10**9,
    "zero_force_ds_cpu_optimizer": False,
}


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """DeepSpeed's engine needs a process group; its shared-memory kernel, which one rank has no use
    for, would be compiled for half a minute."""
    backend = importlib.import_module("deepspeed.comm.torch")
    patched = pytest.MonkeyPatch()
    patched.setattr(backend, "build_shm_op", lambda: None)
    mine = not torch.distributed.is_initialized()
    if mine:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1
        )
    deepspeed.init_distributed()
    yield
    patched.undo()
    if mine:
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None


@contextmanager
def deepspeeds_engine(
    model: nn.Module, *, stage: int, bf16: bool = False, groups: Any = None, **extra: Any
) -> Iterator[Any]:
    """It trains `model` with torch's AdamW, without a cache, as ours does."""
    without_caches(model)
    settings = SETTINGS | {
        "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        **extra,
    }
    parameters = list(model.parameters()) if groups is None else groups
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=parameters)
    yield engine
    engine.destroy()
