"""Calls that the engine refuses, and what to do instead: DeepSpeed's methods, and losses.

Never changes a step. The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Callable
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
