"""What tests of Accelerate and the Trainer share: their process-wide state, and arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from transformers import TrainingArguments

import stronghold.plugin as switch

# Of a few steps in fp32 beside torch's own optimizer: what the mean weight differs by, of what it
# could have moved (steps times the learning rate), and what losses differ by.
BOUND = 2.0**-16
LOSS_BOUND = 2e-5

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state in the process and in the environment: neither outlives a test."""
    before = dict(os.environ)
    reset_accelerate()
    yield
    reset_accelerate()
    os.environ.clear()
    os.environ.update(before)


def reset_accelerate(*, ranked: bool = True) -> None:
    """As in a new process, started by a launcher (`ranked`) or not.

    Accelerate would wrap a plain model of a ranked process for data parallelism.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    for name in RANK:
        os.environ.pop(name, None)
    if ranked:
        os.environ.update(RANK)


def weights_for_accelerate(engine: Any, *, tensor_parallel: bool = False) -> dict[str, Any]:
    """The state dict that Accelerate asks an engine for, of stage 3 or with tensor parallelism."""
    settings = {
        "zero_optimization": {"stage": 0 if tensor_parallel else 3},
        "tensor_parallel": {"autotp_size": 2 if tensor_parallel else 0},
    }
    asking: Any = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, deepspeed_config=settings
    )
    with patch.object(engine, "zero_gather_16bit_weights_on_model_save", lambda: True):
        state: dict[str, Any] = Accelerator.get_state_dict(asking, engine)
    return state


@pytest.fixture
def plugin() -> Iterator[None]:
    """`import stronghold.plugin`, undone after the test."""
    switch.enable()
    yield
    switch.disable()


def trainer_arguments(
    folder: Path, deepspeed_config: dict[str, Any] | None, **changed: Any
) -> TrainingArguments:
    """Arguments of a short run that uses much: accumulation with a shorter last window, clipping,
    a schedule with warmup, decay, evaluation between."""
    reset_accelerate(ranked=deepspeed_config is not None)
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "adam_beta2": 0.99,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
        "use_cpu": deepspeed_config is None,
        "deepspeed": deepspeed_config,
        **changed,
    }
    return TrainingArguments(str(folder), **given)
