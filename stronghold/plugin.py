"""Import this module, and `deepspeed.initialize` obeys a "stronghold" section in the config.

Owns the replacement of five names, in this process alone: nothing installed is changed on disk.
One is `deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint`, which reads this
engine's checkpoints, too. Two are those through which a config with ZeRO stage 3 would have a model
partitioned before an engine sees it: `deepspeed.zero.Init`, which does nothing where it is given a
config with the section, and Accelerate's reading of the config, in which (in its own copy) such a
stage 3 becomes 2; so Transformers, PEFT and TRL neither partition nor gather. The fifth is the
state that Accelerate makes of such a config's process, which on CPUs would take each of several
ranks for a run of its own.
For programs whose framework calls `deepspeed.initialize` itself (Transformers' Trainer, Accelerate,
Lightning, TRL). A config without the section reaches DeepSpeed as if this module were not there.
Importing it twice is importing it once; `disable` undoes it. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import functools
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
from stronghold.process import Replacements

_replaced = Replacements()
_active = False


def enable() -> None:
    """Replace `deepspeed.initialize`; without effect while it is replaced already."""
    global _active
    if _active:
        return
    _active = True
    _replaced.put(deepspeed, "initialize", _choosing)
    _replaced.put(deepspeed.zero.Init, "__init__", _partitioning_nothing)
    _replaced.put(zero_to_fp32, "get_fp32_state_dict_from_zero_checkpoint", _of_both_layouts)
    with contextlib.suppress(ImportError):
        from accelerate.utils.deepspeed import HfDeepSpeedConfig

        _replaced.put(HfDeepSpeedConfig, "set_stage_and_offload", _without_stage_3)


def disable() -> None:
    """Give `deepspeed.initialize` back; engines that exist go on."""
    global _active
    _active = False
    _replaced.undo()


def enabled() -> bool:
    """Whether a config with a "stronghold" section gets stronghold's engine now."""
    return _active


def _asks_for_us(source: Any, args: Any = None) -> bool:
    """Whether it is a config that asks for this engine, now that this is on. One that cannot be
    read does not: DeepSpeed then says in its own words what is wrong."""
    if not _active:
        return False
    try:
        read = configs.read_config(source, args)
    except (TypeError, ConfigError):
        return False
    return configs.section_enabled(read)


def _partitioning_nothing(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        source = given.get("config_dict_or_path")
        if _asks_for_us(given.get("config") if source is None else source):
            self.enabled = False
        else:
            original(self, *args, **kwargs)

    return init


def _of_both_layouts(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_fp32_state_dict(*args: Any, **kwargs: Any) -> Any:
        from stronghold.checkpoint.manifest import MANIFEST
        from stronghold.checkpoint.weights import fp32_state, locate

        given = signature.bind(*args, **kwargs).arguments
        path = Path(given["checkpoint_dir"])
        with contextlib.suppress(ValueError, OSError):  # DeepSpeed says what is wrong
            path = locate(path, given.get("tag"))
        if not (_active and (path / MANIFEST).exists()):
            return original(*args, **kwargs)
        return fp32_state(path, exclude_frozen=bool(given.get("exclude_frozen_parameters")))

    return get_fp32_state_dict


def _without_stage_3(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def set_stage_and_offload(self: Any) -> None:
        zero = self.config.get("zero_optimization")
        if _asks_for_us(self.config):
            from accelerate.state import PartialState

            _replaced.put(PartialState, "__init__", _over_gloo)
            if isinstance(zero, dict) and zero.get("stage") == 3:
                zero["stage"] = 2
                if isinstance(optimizer := zero.get("offload_optimizer"), dict):
                    optimizer.pop("ratio", None)  # of stage 3 alone, and without effect here
        original(self)

    return set_stage_and_offload


def _over_gloo(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        # Accelerate knows backends of GPUs alone where DeepSpeed trains.
        num_ranks = int(os.environ.get("WORLD_SIZE", 1))
        if num_ranks > 1 and not cpu and get_accelerator().device_name() == "cpu":
            kwargs.setdefault("backend", "gloo")
        original(self, cpu, **kwargs)

    return init


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {}
        with contextlib.suppress(TypeError):  # the original's to refuse
            given = signature.bind(*args, **kwargs).arguments
        source = given.get("config")
        source = given.get("config_params") if source is None else source
        if _asks_for_us(source, given.get("args")):
            # Not before: `import stronghold` enables the plugin where deepspeed is imported, which
            # may be halfway through stronghold's own modules.
            from stronghold.engine import dispatch

            return dispatch.initialize(*args, **kwargs)
        return original(*args, **kwargs)

    return initialize


enable()
