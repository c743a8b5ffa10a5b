"""Where layers may stay and be updated, as sections of the config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import assert_same, make_model, resume, session, snapshot, train

ON_GPU: dict[str, dict[str, Any]] = {
    "embedding and head": {"window": 1, "resident_layers": 0},
    "half": {"window": 2, "resident_layers": 2},
    "every layer": {"resident_layers": "all", "activations": "recompute"},
    "whole": {"resident_layers": "all"},
}


CHECKPOINTED: list[dict[str, Any]] = [
    {"precision": "bf16", "clipping": 0.5},
    {"precision": "bf16", "clipping": 0.0},
    {"precision": "fp32", "clipping": 0.5, "accumulation": 2},
    {"precision": "fp16", "clipping": 0.5},
]


def on_gpu(place: str, **section: Any) -> dict[str, Any]:
    return {**ON_GPU[place], "resident_updates": "gpu", "cpu_threads": 1, **section}


def assert_resumed_through(
    places: Sequence[dict[str, Any]], folder: Path, section: dict[str, Any], **options: Any
) -> None:
    """A training that stops after each step, and goes on in the next of `places`, is the one that
    goes straight on in `section`."""
    with session(section=section, **options) as engine:
        losses = train(engine, len(places))
        expected = snapshot(engine)
    resumed: list[torch.Tensor] = []
    # each goes on from what the one before has saved
    for turn, place in enumerate(places):
        with session(make_model(seed=turn), section=place, **options) as engine:
            if turn > 0:
                resume(engine, folder)
            resumed += train(engine, 1)
            engine.save_checkpoint(folder)
            found = snapshot(engine)
    assert len(resumed) == len(losses)
    assert all(map(torch.equal, resumed, losses))
    assert_same(found, expected)
