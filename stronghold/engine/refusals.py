"""Calls that the engine refuses, and what to do instead: DeepSpeed's methods, losses, clipping.

Never changes a step. The training thread alone enters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stronghold.errors import ConfigError

# DeepSpeed's methods that would work on buckets, partitions, experts or graphs that are not here.
_NAMES = """
    all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain
    buffered_allreduce_fallback clip_fp32_gradients coalesce_grad_reduction
    compile_zero_optimization_stage get_autosp_backend get_autotp_backend get_compile_time
    get_deepcompile_backend get_deepspeed_compile_backend get_model_parallel_rank
    get_optimizer_configuration get_sequence_parallel_group get_tensor_parallel_rank
    get_wall_clock_timers load_moe_state_dict print_forward_breakdown random_ltd_initialize
    register_compile_pass set_custom_curriculum_learning_schedule set_data_post_process_func
    sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain
    swap_tensor_config
"""
REFUSED = tuple(_NAMES.split())


def refused_method(name: str) -> Callable[..., None]:
    """Return a method of the engine that raises ConfigError at every call."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"engine.{name} is a part of DeepSpeed's own engine, which does not run here: leave "
            'the call out, or set "stronghold": {"enabled": false} for that engine'
        )

    method.__name__ = name
    return method


def check_loss(method: str, loss: Any) -> None:
    """Raise ConfigError unless `loss` is a tensor of one element that has an autograd graph.

    `method` is the name of the engine's method that got the loss.
    """
    is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not is_scalar or loss.grad_fn is None:
        raise ConfigError(
            f"engine.{method}: expected a scalar loss with a graph (a tensor of one element); for "
            "another tensor, output.backward(gradient)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualClipping:
    """Checks a program's own call of `torch.nn.utils.clip_grad_norm_`.

    Such a call clips no gradient, because gradients have left the model by then. Accelerate calls
    `step` before it, in backward. `configured` is `gradient_clipping` of the config.
    """

    configured: float

    def check(self, max_norm: float) -> None:
        """Warn about the call. Raise ConfigError if `max_norm` is finite and not the config's."""
        if math.isfinite(max_norm) and max_norm != self.configured:
            raise ConfigError(
                f"clip_grad_norm_ by hand to {max_norm}: gradients have left the model, and the "
                "engine clips them in step, to the config's gradient_clipping: got "
                f'{self.configured}. Set "gradient_clipping": {max_norm}, and leave the call out'
            )
        warnings.warn(
            "clip_grad_norm_ by hand finds no gradient, and returns 0: the engine clips in step; "
            "engine.get_global_grad_norm() is the norm afterwards",
            stacklevel=6,
        )
