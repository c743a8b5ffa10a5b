"""Trains models that do not fit the GPU, exactly, at nearly the speed of a GPU that holds them.

`initialize` is `deepspeed.initialize` with one more choice: a "stronghold" section in the config
selects `StrongholdEngine`. `import stronghold.plugin` lets `deepspeed.initialize` obey the section
too, for programs that call that name. `CPUAdam` has the engine's kernels as an ordinary optimizer.
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
    from stronghold.devices.device import OutOfMemoryError
    from stronghold.engine import StrongholdEngine
    from stronghold.engine.dispatch import initialize
    from stronghold.model.loading import MappedConfig, NF4Config
    from stronghold.optim.cpu_adam import CPUAdam

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CPUAdam",
    "ConfigError",
    "LaneError",
    "MappedConfig",
    "NF4Config",
    "OutOfMemoryError",
    "RankError",
    "StateError",
    "StrongholdEngine",
    "StrongholdError",
    "initialize",
]

# Module of each name whose import takes seconds, because it imports DeepSpeed or Transformers. The
# first use of the name imports it: a command that only draws a trace should not wait for it.
_MODULE_OF_NAME = {
    "CPUAdam": "stronghold.optim.cpu_adam",
    "MappedConfig": "stronghold.model.loading",
    "NF4Config": "stronghold.model.loading",
    "OutOfMemoryError": "stronghold.devices.device",
    "StrongholdEngine": "stronghold.engine",
    "initialize": "stronghold.engine.dispatch",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF_NAME:
        import importlib

        return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
