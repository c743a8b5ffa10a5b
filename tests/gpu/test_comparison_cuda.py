"""The comparison's own row on a GPU: the engine has all of the cap that the others have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stronghold.devices import cuda

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from methods.ours import Stronghold
from methods.task import Data, Task

# it changes what this process may have
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GIB = 1 << 30
TASK = Task(
    layers=16,
    hidden=512,
    heads=8,
    vocab=512,
    seq=32,
    batch=2,
    steps=4,
    warmup=0,
    precision="bf16",
    activations="recompute",
    machine="cuda",
    gpu_memory=GIB,
    threads=1,
)


@pytest.fixture(autouse=True)
def whole_device_again() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_our_row_plans_with_the_whole_cap() -> None:
    """Once the first steps are measured: a model whose state takes two thirds of the cap stays
    on the GPU."""
    method = Stronghold(TASK)
    try:
        data = Data(TASK)
        assert cuda.reachable_bytes(0) <= GIB
        before = method.report()["device_planned_bytes"]
        for index in range(TASK.num_steps):
            method.step(data.step(index))
        after = method.report()
        assert before <= GIB // 2 < after["device_planned_bytes"] <= GIB, (before, after["plan"])
    finally:
        method.close()
