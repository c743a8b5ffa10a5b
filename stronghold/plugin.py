"""Makes `deepspeed.initialize` obey a "stronghold" section in the config, from its import on.

Owns whether the plugin is enabled in this process, and the choice of the configs that ask for the
engine. It replaces five names of DeepSpeed and Accelerate (`patches.frameworks`), in memory alone.
The training thread alone enters.

It serves programs whose framework calls `deepspeed.initialize` itself (Transformers' Trainer,
Accelerate, Lightning, TRL). A config with the section and ZeRO stage 3 partitions nothing: the
engine gets a whole model. A config without the section reaches DeepSpeed unchanged. A second import
has no effect, and `disable` undoes the first.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from stronghold import config as configs
from stronghold.errors import ConfigError
from stronghold.patches.frameworks import FrameworkCalls

_active = False


class _Decisions:
    """The decisions of `patches.frameworks.PluginDecisions`, while the plugin is enabled."""

    def asks_for_us(self, source: Any, args: Any = None) -> bool:
        """Return True if a config asks for this engine, and the plugin is enabled.

        False for a config that cannot be read: DeepSpeed raises its own error for it.
        """
        if not _active:
            return False
        try:
            config = configs.read_config(source, args)
        except (TypeError, ConfigError):
            return False
        return configs.section_enabled(config)

    def initialize(self, *args: Any, **kwargs: Any) -> Any:
        """Call `stronghold.initialize`."""
        # Not imported before: `import stronghold` enables the plugin as soon as deepspeed is
        # imported. Then stronghold's own modules may be imported by half.
        from stronghold.engine import dispatch

        return dispatch.initialize(*args, **kwargs)

    def fp32_state(self, path: Path, tag: Any, *, exclude_frozen: bool) -> dict[str, Any] | None:
        """Return the weights of a checkpoint in fp32.

        None if this engine did not write the checkpoint, or if the plugin is disabled.
        """
        from stronghold.checkpoint import export
        from stronghold.checkpoint.format import MANIFEST

        # DeepSpeed raises its own error for it
        with contextlib.suppress(ValueError, OSError):
            path = export.locate(path, tag)
        if not (_active and (path / MANIFEST).exists()):
            return None
        return export.fp32_state(path, exclude_frozen=exclude_frozen)

    def live_state(self, model: Any) -> dict[str, Any] | None:
        """Return the state dict of an engine of this package without a copy, else None."""
        from stronghold.engine import StrongholdEngine

        if not isinstance(model, StrongholdEngine):
            return None
        return model._consolidated_16bit_state_dict()


_calls = FrameworkCalls(_Decisions())


def enable() -> None:
    """Replace `deepspeed.initialize`. Without effect while it is replaced."""
    global _active
    if _active:
        return
    _active = True
    _calls.enable()


def disable() -> None:
    """Give `deepspeed.initialize` back. Engines that exist go on."""
    global _active
    _active = False
    _calls.disable()


def enabled() -> bool:
    """Return True if a config with a "stronghold" section gets stronghold's engine now."""
    return _active


enable()
