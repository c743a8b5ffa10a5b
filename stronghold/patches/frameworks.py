"""Replacements in DeepSpeed and Accelerate through which `stronghold.plugin` gets its configs.

Owns the five replacements. `stronghold.plugin` owns when they are active, and decides which config
asks for the engine. A config without the section reaches the original. Each method with the
argument `original` is called instead of it. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import zero_to_fp32

from stronghold.patches.replacements import Replacements


class PluginDecisions(Protocol):
    """The plugin's decisions."""

    def asks_for_us(self, source: Any, args: Any = None) -> bool:
        """True if a config asks for this engine. `source` and `args` are as DeepSpeed takes
        them."""

    def initialize(self, *args: Any, **kwargs: Any) -> Any:
        """Call `stronghold.initialize`."""

    def fp32_state(self, path: Path, tag: Any, *, exclude_frozen: bool) -> dict[str, Any] | None:
        """Return the weights of a checkpoint in fp32. None if another engine wrote it."""

    def live_state(self, model: Any) -> dict[str, Any] | None:
        """Return the state dict of this engine without a copy. None if `model` is another one."""


class FrameworkCalls:
    """The six replacements. `decisions` are the plugin's."""

    def __init__(self, decisions: PluginDecisions) -> None:
        self._decisions = decisions
        self._replacements = Replacements()

    def enable(self) -> None:
        """Replace the names. Safe to call twice."""
        wrap = self._replacements.wrap
        wrap(deepspeed, "initialize", self._initialize)
        wrap(deepspeed.zero.Init, "__init__", self._init_zero)
        wrap(zero_to_fp32, "get_fp32_state_dict_from_zero_checkpoint", self._fp32_state_dict)
        with contextlib.suppress(ImportError):
            from accelerate.utils.deepspeed import HfDeepSpeedConfig

            wrap(HfDeepSpeedConfig, "set_stage_and_offload", self._set_stage_and_offload)

    def disable(self) -> None:
        """Give the names back."""
        self._replacements.undo()

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace `deepspeed.initialize`."""
        arguments: dict[str, Any] = {}
        with contextlib.suppress(TypeError):  # the original refuses wrong arguments
            arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        source = arguments.get("config")
        if source is None:
            source = arguments.get("config_params")
        if self._decisions.asks_for_us(source, arguments.get("args")):
            return self._decisions.initialize(*args, **kwargs)
        return original(*args, **kwargs)

    def _init_zero(
        self, original: Callable[..., None], zero_init: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Replace `deepspeed.zero.Init.__init__`: a model for this engine is not partitioned."""
        arguments = inspect.signature(original).bind(zero_init, *args, **kwargs).arguments
        source = arguments.get("config_dict_or_path")
        if source is None:
            source = arguments.get("config")
        if self._decisions.asks_for_us(source):
            zero_init.enabled = False
        else:
            original(zero_init, *args, **kwargs)

    def _fp32_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace DeepSpeed's reader of ZeRO checkpoints: it reads this engine's, too."""
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        state = self._decisions.fp32_state(
            Path(arguments["checkpoint_dir"]),
            arguments.get("tag"),
            exclude_frozen=bool(arguments.get("exclude_frozen_parameters")),
        )
        return original(*args, **kwargs) if state is None else state

    def _set_stage_and_offload(self, original: Callable[[Any], None], config: Any) -> None:
        """Replace the reader of Accelerate's configs: stage 3 becomes 2 in its copy."""
        if self._decisions.asks_for_us(config.config):
            from accelerate.accelerator import Accelerator
            from accelerate.state import PartialState

            self._replacements.wrap(PartialState, "__init__", _init_partial_state)
            self._replacements.wrap(Accelerator, "get_state_dict", self._state_dict)
            zero = config.config.get("zero_optimization")
            if isinstance(zero, dict) and zero.get("stage") == 3:
                zero["stage"] = 2
                optimizer = zero.get("offload_optimizer")
                if isinstance(optimizer, dict):
                    # A key of stage 3 alone. This engine does not read it.
                    optimizer.pop("ratio", None)
        original(config)

    def _state_dict(
        self, original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replace `Accelerator.get_state_dict`: a Trainer calls it for each save."""
        state = self._decisions.live_state(model)
        return original(accelerator, model, *args, **kwargs) if state is None else state


def _init_partial_state(
    original: Callable[..., None], state: Any, cpu: bool = False, **kwargs: Any
) -> None:
    """Replace `PartialState.__init__`: several ranks on CPUs use the backend gloo."""
    # If DeepSpeed trains, Accelerate knows backends of GPUs alone.
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes > 1 and not cpu and get_accelerator().device_name() == "cpu":
        kwargs.setdefault("backend", "gloo")
    original(state, cpu, **kwargs)
