"""Trains models that do not fit the GPU, exactly, at nearly the speed of one that holds them.

`initialize` is `deepspeed.initialize` with one more choice: a "stronghold" section in the config
selects `StrongholdEngine`. `CPUAdam` is the same Adam kernel as an ordinary optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stronghold.errors import (
    BudgetError,
    ConfigError,
    LaneError,
    RankError,
    StateError,
    StrongholdError,
)

if TYPE_CHECKING:
    from stronghold.cpu_adam import CPUAdam
    from stronghold.engine import StrongholdEngine
    from stronghold.engine.dispatch import initialize
    from stronghold.pretrained import from_pretrained

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CPUAdam",
    "ConfigError",
    "LaneError",
    "RankError",
    "StateError",
    "StrongholdEngine",
    "StrongholdError",
    "from_pretrained",
    "initialize",
]

# Importing DeepSpeed takes seconds: a command that only draws a trace should not wait for it.
_HOME = {
    "CPUAdam": "stronghold.cpu_adam",
    "StrongholdEngine": "stronghold.engine",
    "from_pretrained": "stronghold.pretrained",
    "initialize": "stronghold.engine.dispatch",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
