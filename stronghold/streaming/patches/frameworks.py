"""Replacements in DeepSpeed and Accelerate through which `stronghold.plugin` gets its configs.

Owns the five replacements; `stronghold.plugin` owns when they are active, and decides which config
asks for the engine. A config without the section reaches the original. Each function makes, of the
original, what replaces it. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import zero_to_fp32

from stronghold.streaming.patches.replacements import Replacements


class Choice(Protocol):
    """The plugin's decisions."""

    def asks_for_us(self, source: Any, args: Any = None) -> bool:
        """Whether a config, given as DeepSpeed takes it, asks for this engine."""

    def initialize(self, *args: Any, **kwargs: Any) -> Any:
        """`stronghold.initialize`."""

    def fp32_state(self, path: Path, tag: Any, *, exclude_frozen: bool) -> dict[str, Any] | None:
        """The weights of a checkpoint in fp32; None if this engine did not write it."""


class FrameworkCalls:
    """The five replacements, for one `choice`."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._replaced = Replacements()

    def enable(self) -> None:
        """Replace the names. Safe to call twice."""
        self._replaced.put(deepspeed, "initialize", self._choosing)
        self._replaced.put(deepspeed.zero.Init, "__init__", self._partitioning_nothing)
        name = "get_fp32_state_dict_from_zero_checkpoint"
        self._replaced.put(zero_to_fp32, name, self._of_both_layouts)
        with contextlib.suppress(ImportError):
            from accelerate.utils.deepspeed import HfDeepSpeedConfig

            self._replaced.put(HfDeepSpeedConfig, "set_stage_and_offload", self._without_stage_3)

    def disable(self) -> None:
        """Give the names back."""
        self._replaced.undo()

    def _choosing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            given: dict[str, Any] = {}
            with contextlib.suppress(TypeError):  # the original's to refuse
                given = signature.bind(*args, **kwargs).arguments
            source = given.get("config")
            source = given.get("config_params") if source is None else source
            if self._choice.asks_for_us(source, given.get("args")):
                return self._choice.initialize(*args, **kwargs)
            return original(*args, **kwargs)

        return initialize

    def _partitioning_nothing(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(zero_init: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(zero_init, *args, **kwargs).arguments
            source = given.get("config_dict_or_path")
            if self._choice.asks_for_us(given.get("config") if source is None else source):
                zero_init.enabled = False
            else:
                original(zero_init, *args, **kwargs)

        return init

    def _of_both_layouts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def get_fp32_state_dict(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            state = self._choice.fp32_state(
                Path(given["checkpoint_dir"]),
                given.get("tag"),
                exclude_frozen=bool(given.get("exclude_frozen_parameters")),
            )
            return original(*args, **kwargs) if state is None else state

        return get_fp32_state_dict

    def _without_stage_3(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def set_stage_and_offload(config: Any) -> None:
            zero = config.config.get("zero_optimization")
            if self._choice.asks_for_us(config.config):
                from accelerate.state import PartialState

                self._replaced.put(PartialState, "__init__", _over_gloo)
                if isinstance(zero, dict) and zero.get("stage") == 3:
                    zero["stage"] = 2
                    if isinstance(optimizer := zero.get("offload_optimizer"), dict):
                        optimizer.pop("ratio", None)  # of stage 3 alone, and without effect here
            original(config)

        return set_stage_and_offload


def _over_gloo(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(state: Any, cpu: bool = False, **kwargs: Any) -> None:
        # Accelerate knows backends of GPUs alone where DeepSpeed trains.
        num_ranks = int(os.environ.get("WORLD_SIZE", 1))
        if num_ranks > 1 and not cpu and get_accelerator().device_name() == "cpu":
            kwargs.setdefault("backend", "gloo")
        original(state, cpu, **kwargs)

    return init
