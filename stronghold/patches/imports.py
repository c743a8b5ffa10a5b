"""The hook in Python's imports by which `import stronghold` enables the plugin.

Owns one entry of `sys.meta_path`. Until the plugin is imported, it also owns the replacement of the
function by which Accelerate reads a config. Imports the standard library alone: torch and DeepSpeed
take seconds to import, and `import stronghold` must not. Any thread that imports may enter.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from stronghold.patches.replacements import Replacements

if TYPE_CHECKING:
    from importlib.abc import Loader
    from types import ModuleType

DEEPSPEED, ACCELERATE = "deepspeed", "accelerate.utils.deepspeed"


def call_when_imported(enable: Callable[[], None], is_enabled: Callable[[], bool]) -> None:
    """Call `enable` when DeepSpeed is imported, or when Accelerate reads a config.

    If one of the two is imported already, `enable` is called now. It is not called if the plugin
    is enabled (`is_enabled`) by then.
    """
    if not sys.modules.keys().isdisjoint((DEEPSPEED, ACCELERATE)):
        enable()
    else:
        sys.meta_path.insert(0, _Finder(enable, is_enabled))


class _Finder:
    """Finds these two modules as Python would, and acts when they have been executed.

    Frameworks probe with `importlib.util.find_spec("deepspeed")`, any number of times. Each spec
    has a loader of its own. Only the loader that executes the module acts.
    """

    def __init__(self, enable: Callable[[], None], is_enabled: Callable[[], bool]) -> None:
        self._enable = enable
        self._is_enabled = is_enabled
        self._replacements = Replacements()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the ordinary spec of one of the two modules. None for every other name."""
        if name not in (DEEPSPEED, ACCELERATE):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(self._execute, spec.loader)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(self, loader: Loader, module: Any) -> None:
        del loader.exec_module  # the instance's entry: the class's method is left
        loader.exec_module(module)
        if self._is_enabled():
            return
        if module.__name__ == DEEPSPEED:
            self._enable()
        else:
            # Accelerate reads a config before it imports DeepSpeed. The config decides how
            # Transformers builds a model.
            config_class = module.HfDeepSpeedConfig
            self._replacements.wrap(config_class, "set_stage_and_offload", self._read_config)

    def _read_config(self, original: Callable[[Any], None], config: Any) -> None:
        """Replace `HfDeepSpeedConfig.set_stage_and_offload`."""
        if self._is_enabled():
            original(config)
        else:
            self._enable()
            # the plugin's replacement now, which calls this one
            config.set_stage_and_offload()
