"""Where layers may stay and be updated, as sections of the config."""

from __future__ import annotations

from typing import Any

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
