"""Makes `deepspeed.initialize` obey a "stronghold" section in the config, from its import on.

Owns whether the plugin is enabled in this process, the choice of the configs that ask for the
engine, and the replacements in DeepSpeed and Accelerate, in memory alone. A config without the
section reaches the original. The training thread alone enters.

It serves programs whose framework calls `deepspeed.initialize` itself (Transformers' Trainer,
Accelerate, Lightning, TRL). A config with the section and ZeRO stage 3 partitions nothing: the
engine gets a whole model. A second import has no effect, and `disable` undoes the first.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import zero_to_fp32

from stronghold import config as configs
from stronghold.errors import ConfigError
from stronghold.private import Replacements

_active = False
_replacements = Replacements()


def enable() -> None:
    """Replace `deepspeed.initialize`. Without effect while it is replaced."""
    global _active
    if _active:
        return
    _active = True
    wrap = _replacements.wrap
    wrap(deepspeed, "initialize", _initialize)
    wrap(deepspeed.zero.Init, "__init__", _init_zero)
    wrap(zero_to_fp32, "get_fp32_state_dict_from_zero_checkpoint", _fp32_state_dict)
    with contextlib.suppress(ImportError):
        from accelerate.utils.deepspeed import HfDeepSpeedConfig

        wrap(HfDeepSpeedConfig, "set_stage_and_offload", _set_stage_and_offload)


def disable() -> None:
    """Give `deepspeed.initialize` back. Engines that exist go on."""
    global _active
    _active = False
    _replacements.undo()


def enabled() -> bool:
    """Return True if a config with a "stronghold" section gets stronghold's engine now."""
    return _active


def _asks_for_us(source: Any, args: Any = None) -> bool:
    """True if a config asks for this engine, and the plugin is enabled. `source` and `args` are as
    DeepSpeed takes them. False for a config that cannot be read: DeepSpeed raises its own error."""
    if not _active:
        return False
    try:
        config = configs.read_config(source, args)
    except (TypeError, ConfigError):
        return False
    return configs.section_enabled(config)


# -- replacements: each is called with the original, and then as the original is ------------------
def _initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace `deepspeed.initialize`."""
    arguments: dict[str, Any] = {}
    with contextlib.suppress(TypeError):  # the original refuses wrong arguments
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    source = arguments.get("config")
    if source is None:
        source = arguments.get("config_params")
    if not _asks_for_us(source, arguments.get("args")):
        return original(*args, **kwargs)
    from stronghold.engine import dispatch  # takes seconds

    return dispatch.initialize(*args, **kwargs)


def _init_zero(original: Callable[..., None], zero_init: Any, *args: Any, **kwargs: Any) -> None:
    """Replace `deepspeed.zero.Init.__init__`: a model for this engine is not partitioned."""
    arguments = inspect.signature(original).bind(zero_init, *args, **kwargs).arguments
    source = arguments.get("config_dict_or_path")
    if source is None:
        source = arguments.get("config")
    if _asks_for_us(source):
        zero_init.enabled = False  # it leaves the context early then
    else:
        original(zero_init, *args, **kwargs)


def _fp32_state_dict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace DeepSpeed's reader of ZeRO checkpoints: it reads this engine's, too."""
    from stronghold.checkpoint import export
    from stronghold.checkpoint.format import MANIFEST

    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    path = Path(arguments["checkpoint_dir"])
    with contextlib.suppress(ValueError, OSError):  # DeepSpeed raises its own error for it
        path = export.locate(path, arguments.get("tag"))
    if not (_active and (path / MANIFEST).exists()):
        return original(*args, **kwargs)
    without_frozen = bool(arguments.get("exclude_frozen_parameters"))
    return export.fp32_state(path, exclude_frozen=without_frozen)


def _set_stage_and_offload(original: Callable[[Any], None], config: Any) -> None:
    """Replace the reader of Accelerate's configs. Stage 3 becomes 2 in its copy, so that
    Transformers, PEFT and TRL gather nothing."""
    if _asks_for_us(config.config):
        from accelerate.accelerator import Accelerator
        from accelerate.state import PartialState

        _replacements.wrap(PartialState, "__init__", _init_partial_state)
        _replacements.wrap(Accelerator, "get_state_dict", _state_dict)
        zero = config.config.get("zero_optimization")
        if isinstance(zero, dict) and zero.get("stage") == 3:
            zero["stage"] = 2
            optimizer = zero.get("offload_optimizer")
            if isinstance(optimizer, dict):
                # A key of stage 3 alone. This engine does not read it.
                optimizer.pop("ratio", None)
    original(config)


def _state_dict(
    original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace `Accelerator.get_state_dict`, which copies the whole model in RAM for each save, and
    decodes a packed base. Of this engine it gives the weights where they are."""
    from stronghold.engine import StrongholdEngine

    if isinstance(model, StrongholdEngine):
        return model._consolidated_16bit_state_dict()
    return original(accelerator, model, *args, **kwargs)


def _init_partial_state(
    original: Callable[..., None], state: Any, cpu: bool = False, **kwargs: Any
) -> None:
    """Replace `PartialState.__init__`: several ranks on CPUs use the backend gloo."""
    # If DeepSpeed trains, Accelerate knows backends of GPUs alone.
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes > 1 and not cpu and get_accelerator().device_name() == "cpu":
        kwargs.setdefault("backend", "gloo")
    original(state, cpu, **kwargs)


enable()
