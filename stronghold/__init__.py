"""Trains models that do not fit the GPU, exactly, at nearly the speed of one that holds them.

`initialize` is `deepspeed.initialize` with one more choice: a "stronghold" section in the config
selects `StrongholdEngine`. From this import on `deepspeed.initialize` obeys the section too
(`plugin`): nobody who asks for this engine gets another one, without a word, for calling it by
DeepSpeed's name. `CPUAdam`, `CPULion` and `CPUSGD` have the engine's kernels as
ordinary optimizers.
"""

from __future__ import annotations

import functools
import sys
from importlib.machinery import ModuleSpec, PathFinder
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
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from types import ModuleType

    from stronghold.device.base import OutOfMemoryError
    from stronghold.engine import StrongholdEngine
    from stronghold.engine.dispatch import initialize
    from stronghold.optim.adam import CPUAdam
    from stronghold.optim.lion import CPULion
    from stronghold.optim.sgd import CPUSGD
    from stronghold.pretrained import from_pretrained

__version__ = "0.1.0"

__all__ = [
    "CPUSGD",
    "BudgetError",
    "CPUAdam",
    "CPULion",
    "ConfigError",
    "LaneError",
    "OutOfMemoryError",
    "RankError",
    "StateError",
    "StrongholdEngine",
    "StrongholdError",
    "from_pretrained",
    "initialize",
]

# Importing DeepSpeed takes seconds: a command that only draws a trace should not wait for it.
_HOME = {
    "CPUAdam": "stronghold.optim.adam",
    "CPULion": "stronghold.optim.lion",
    "CPUSGD": "stronghold.optim.sgd",
    "OutOfMemoryError": "stronghold.device.base",
    "StrongholdEngine": "stronghold.engine",
    "from_pretrained": "stronghold.pretrained",
    "initialize": "stronghold.engine.dispatch",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _DeepSpeedFinder:
    """Finds modules of `_ACTIONS` where Python would, and acts when they have been executed: the
    plugin needs DeepSpeed, which whoever draws a trace should not wait for.

    Frameworks probe with `importlib.util.find_spec("deepspeed")`, as often as they like: each spec
    brings a loader of its own, and only the one that executes the module acts.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec of a module of `_ACTIONS`; None for every other name."""
        if name not in _ACTIONS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            act = functools.partial(_execute, spec.loader, _ACTIONS[name])
            spec.loader.exec_module = act  # type: ignore[method-assign]
        return spec


def _execute(loader: Loader, act: Callable[[Any], None], module: ModuleType) -> None:
    del loader.exec_module  # the one above: the class's own is left
    loader.exec_module(module)
    if "stronghold.plugin" not in sys.modules:  # else it imports this, and enables itself then
        act(module)


def _enable(_: Any) -> None:
    from stronghold import plugin

    plugin.enable()


def _enable_at_a_config(module: Any) -> None:
    """Accelerate reads a config before it imports DeepSpeed, which decides how Transformers builds
    a model."""
    original = module.HfDeepSpeedConfig.set_stage_and_offload

    @functools.wraps(original)
    def set_stage_and_offload(self: Any) -> None:
        if "stronghold.plugin" in sys.modules:
            original(self)
        else:
            _enable(module)
            self.set_stage_and_offload()  # the plugin's now, which calls this one

    module.HfDeepSpeedConfig.set_stage_and_offload = set_stage_and_offload


_ACTIONS = {"deepspeed": _enable, "accelerate.utils.deepspeed": _enable_at_a_config}

if not sys.modules.keys().isdisjoint(_ACTIONS):
    _enable(None)
else:
    sys.meta_path.insert(0, _DeepSpeedFinder)
