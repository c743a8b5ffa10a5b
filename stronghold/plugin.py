"""Import this module, and `deepspeed.initialize` obeys a "stronghold" section in the config.

Owns whether that is so in this process, and which config asks for the engine. Five names of
DeepSpeed and Accelerate are replaced (`patches.frameworks`), in memory alone.

For programs whose framework calls `deepspeed.initialize` itself (Transformers' Trainer, Accelerate,
Lightning, TRL). Such a config with ZeRO stage 3 partitions nothing: the model that the engine gets
is whole. A config without the section reaches DeepSpeed as if this module were not there.
Importing it twice is importing it once; `disable` undoes it. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from stronghold import config as configs
from stronghold.errors import ConfigError
from stronghold.streaming.patches.frameworks import FrameworkCalls

_active = False


class _Decisions:
    """The decisions of `patches.frameworks.PluginDecisions`, while the plugin is enabled."""

    def asks_for_us(self, source: Any, args: Any = None) -> bool:
        """Whether a config asks for this engine, and the plugin is enabled. False for a config that
        cannot be read: DeepSpeed's own error is about that."""
        if not _active:
            return False
        try:
            read = configs.read_config(source, args)
        except (TypeError, ConfigError):
            return False
        return configs.section_enabled(read)

    def initialize(self, *args: Any, **kwargs: Any) -> Any:
        """`stronghold.initialize`."""
        # Not before: `import stronghold` enables the plugin where deepspeed is imported, which
        # may be halfway through stronghold's own modules.
        from stronghold.engine import dispatch

        return dispatch.initialize(*args, **kwargs)

    def fp32_state(self, path: Path, tag: Any, *, exclude_frozen: bool) -> dict[str, Any] | None:
        """The weights of a checkpoint in fp32; None if this engine did not write it, or if the
        plugin is disabled."""
        from stronghold.checkpoint.manifest import MANIFEST
        from stronghold.checkpoint.weights import fp32_state, locate

        with contextlib.suppress(ValueError, OSError):  # DeepSpeed's own error is about that
            path = locate(path, tag)
        if not (_active and (path / MANIFEST).exists()):
            return None
        return fp32_state(path, exclude_frozen=exclude_frozen)


_calls = FrameworkCalls(_Decisions())


def enable() -> None:
    """Replace `deepspeed.initialize`; without effect while it is replaced already."""
    global _active
    if _active:
        return
    _active = True
    _calls.enable()


def disable() -> None:
    """Give `deepspeed.initialize` back; engines that exist go on."""
    global _active
    _active = False
    _calls.disable()


def enabled() -> bool:
    """Whether a config with a "stronghold" section gets stronghold's engine now."""
    return _active


enable()
