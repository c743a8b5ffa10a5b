"""Import this module, and `deepspeed.initialize` obeys a "stronghold" section in the config.

Owns the replacement of that one name, in this process alone: nothing installed is changed on disk.
For programs whose framework calls `deepspeed.initialize` itself (Transformers' Trainer, Accelerate,
Lightning, TRL). A config without the section reaches DeepSpeed as if this module were not there.
Importing it twice is importing it once; `disable` undoes it. The training thread alone enters.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import deepspeed

from stronghold import config as configs
from stronghold.errors import ConfigError
from stronghold.telemetry import show_log

logger = logging.getLogger("stronghold")

Initialize = Callable[..., Any]


class _Switch:
    """What stands at `deepspeed.initialize`, and what stood there before."""

    active = False
    original: Initialize | None = None
    installed: Initialize | None = None


_switch = _Switch()


def enable() -> None:
    """Replace `deepspeed.initialize`; without effect while it is replaced already."""
    if _switch.active:
        return
    _switch.active = True
    if _switch.installed is None:  # else: another wrapper kept ours inside, see `disable`
        _switch.original = deepspeed.initialize
        _switch.installed = deepspeed.initialize = _choosing(deepspeed.initialize)
    show_log()
    logger.info('deepspeed.initialize obeys the config\'s "stronghold" section from now on')


def disable() -> None:
    """Give `deepspeed.initialize` back; engines that exist go on.

    Where another package has wrapped it since, its wrapper stays and ours inside it passes every
    call on.
    """
    _switch.active = False
    if _switch.installed is not None and deepspeed.initialize is _switch.installed:
        deepspeed.initialize = _switch.original
        _switch.original = _switch.installed = None


def enabled() -> bool:
    """Whether a config with a "stronghold" section gets stronghold's engine now."""
    return _switch.active


def _choosing(original: Initialize) -> Initialize:
    signature = inspect.signature(original)

    def asks_for_stronghold(*args: Any, **kwargs: Any) -> bool:
        # What cannot be read or bound does not: DeepSpeed then says in its own words what is wrong.
        try:
            call = signature.bind(*args, **kwargs).arguments
            source = call.get("config")
            source = call.get("config_params") if source is None else source
            read = configs.read_config(source, call.get("args"))
        except (TypeError, ConfigError):
            return False
        return configs.section_enabled(read)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if _switch.active and asks_for_stronghold(*args, **kwargs):
            # Not before: `stronghold launch` enables the plugin where deepspeed is imported, which
            # may be halfway through stronghold's own modules.
            from stronghold.engine import dispatch

            return dispatch.initialize(*args, **kwargs)
        return original(*args, **kwargs)

    return initialize


enable()
