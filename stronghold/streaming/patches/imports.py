"""The hook in Python's imports by which `import stronghold` enables the plugin.

Owns one entry of `sys.meta_path`, and the replacement of Accelerate's reading of a config until the
plugin is imported. Imports the standard library alone: torch and DeepSpeed take seconds to import,
which `import stronghold` must not take. Any thread that imports may enter.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
    from types import ModuleType

DEEPSPEED, ACCELERATE = "deepspeed", "accelerate.utils.deepspeed"


def call_when_imported(enable: Callable[[], None], is_enabled: Callable[[], bool]) -> None:
    """Call `enable` once DeepSpeed is imported, or once Accelerate reads a config; now if one of
    the two is imported already. Not if `is_enabled` by then."""
    if not sys.modules.keys().isdisjoint((DEEPSPEED, ACCELERATE)):
        enable()
    else:
        sys.meta_path.insert(0, _Finder(enable, is_enabled))


class _Finder:
    """Finds these two modules where Python would, and acts when they have been executed.

    Frameworks probe with `importlib.util.find_spec("deepspeed")`, as often as they like: each spec
    brings a loader of its own, and only the one that executes the module acts.
    """

    def __init__(self, enable: Callable[[], None], is_enabled: Callable[[], bool]) -> None:
        self._enable, self._is_enabled = enable, is_enabled

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec of one of the two modules; None for every other name."""
        if name not in (DEEPSPEED, ACCELERATE):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            act = functools.partial(self._execute, spec.loader)
            spec.loader.exec_module = act  # type: ignore[method-assign]
        return spec

    def _execute(self, loader: Loader, module: ModuleType) -> None:
        del loader.exec_module  # the one above: the class's own is left
        loader.exec_module(module)
        if self._is_enabled():
            return
        if module.__name__ == DEEPSPEED:
            self._enable()
        else:
            self._enable_at_a_config(module)

    def _enable_at_a_config(self, module: Any) -> None:
        """Accelerate reads a config before it imports DeepSpeed, which decides how Transformers
        builds a model."""
        original = module.HfDeepSpeedConfig.set_stage_and_offload

        @functools.wraps(original)
        def set_stage_and_offload(config: Any) -> None:
            if self._is_enabled():
                original(config)
            else:
                self._enable()
                config.set_stage_and_offload()  # the plugin's now, which calls this one

        module.HfDeepSpeedConfig.set_stage_and_offload = set_stage_and_offload
