"""Calls that the engine refuses, each with its reason and what to do instead.

Owns the table of DeepSpeed's methods that would run DeepSpeed's own core on state that this engine
does not have. Owns also the checks of a loss, and of gradient clipping by hand. Never changes a
step. The training thread alone enters.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from stronghold.errors import ConfigError

_PARALLEL = "stronghold runs data-parallel ranks only: shard the model with DeepSpeed itself"
_REDUCE = "gradients leave for the host layer by layer during backward: nothing is left to reduce"
_DATA = "build the data loader yourself and pass batches to the engine"
_COMPILE = "DeepCompile rewrites the graph of the whole model: engine.compile() compiles each block"
_ALIEN = "stronghold's optimizer runs: set its type in the config, or pass a torch optimizer"

# Reasons that several methods share.
_METHODS_BY_REASON = {
    _REDUCE: """allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain
        buffered_allreduce_fallback coalesce_grad_reduction sparse_allreduce
        sparse_allreduce_bucket sparse_allreduce_no_retain""",
    _PARALLEL: "all_gather_scalar load_moe_state_dict sparse_all_gather",
    _COMPILE: """get_autosp_backend get_autotp_backend get_compile_time
        get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass
        compile_zero_optimization_stage""",
    _DATA: "set_custom_curriculum_learning_schedule set_data_post_process_func",
    _ALIEN: "get_optimizer_configuration",
}
# Reason of each refused method, by the method's name.
REFUSED: dict[str, str] = {
    **{name: reason for reason, names in _METHODS_BY_REASON.items() for name in names.split()},
    "clip_fp32_gradients": "engine.step clips by the global norm: set gradient_clipping",
    "print_forward_breakdown": "set stronghold.trace to a file for a timeline of the step",
    "random_ltd_initialize": "random layer-token drop changes the model's layers while they stream",
    "swap_tensor_config": "set stronghold.nvme: its keys choose where state spills, and how",
}


class RefusedMethod:
    """Method of the engine that raises ConfigError at every call, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.__name__ = name
        self.__doc__ = f"Refused: {reason}."
        self._reason = reason

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"engine.{self.__name__} does not apply to stronghold: {self._reason}")


def refused_methods() -> dict[str, RefusedMethod]:
    """Return a method for each name of `REFUSED`."""
    return {name: RefusedMethod(name, reason) for name, reason in REFUSED.items()}


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
