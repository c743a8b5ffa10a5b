"""The laws of checkpoints on a real GPU: the emulated tests' bodies with another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import assert_same, make_model, resume, session, snapshot, train

pytestmark = pytest.mark.gpu

LAYOUTS: list[dict[str, Any]] = [
    {"window": 1, "resident_layers": 0, "activations": "recompute"},
    {"window": 2, "resident_layers": 0, "activations": "offload"},
    {"resident_layers": "all"},
    {"resident_layers": "all", "resident_updates": "gpu"},
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one_on_a_gpu(
    accumulation: int, asynchronous: bool, tmp_path: Path
) -> None:
    """Dropout included: the GPU's generator is saved and restored."""
    options = {"precision": "bf16", "accumulation": accumulation}
    section = {"device": "cuda", "window": 2, "async_checkpoint": asynchronous}
    with session(section=section, **options) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        losses, expected = train(engine, 10), snapshot(engine)
    for layout in LAYOUTS:
        section = {"device": "cuda", **layout}
        with session(make_model(seed=9), section=section, **options) as engine:
            resume(engine, tmp_path)
            assert all(map(torch.equal, train(engine, 10), losses)), layout
            assert_same(snapshot(engine), expected)
