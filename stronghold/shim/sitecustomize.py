"""Enables `stronghold.plugin` in every Python below `stronghold launch`, when deepspeed is
imported, or when Accelerate reads a config for it, which decides how Transformers builds a model.

Python imports a module of this name at start, from the first directory of PYTHONPATH that has one.
Owns one entry of `sys.meta_path`; costs a process that never imports deepspeed nothing. A
sitecustomize that was there before runs as if this one were not.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class DeepSpeedFinder:
    """Finds modules of `ACTIONS` where Python would, and acts when they have been executed.

    Frameworks probe with `importlib.util.find_spec("deepspeed")`, as often as they like: each spec
    brings a loader of its own, and only the one that executes the module acts.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec of a module of `ACTIONS`; None for every other name."""
        if name not in ACTIONS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            act = functools.partial(_execute, spec.loader, ACTIONS[name])
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
    original = module.HfDeepSpeedConfig.set_stage_and_offload

    @functools.wraps(original)
    def set_stage_and_offload(self: Any) -> None:
        if "stronghold.plugin" in sys.modules:
            original(self)
        else:
            _enable(module)
            self.set_stage_and_offload()  # the plugin's now, which calls this one

    module.HfDeepSpeedConfig.set_stage_and_offload = set_stage_and_offload


ACTIONS = {"deepspeed": _enable, "accelerate.utils.deepspeed": _enable_at_a_config}


def _run_the_next_sitecustomize() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, DeepSpeedFinder)
_run_the_next_sitecustomize()
