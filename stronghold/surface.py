"""The public names of DeepSpeedEngine that cannot apply here, each with its reason.

Owns the table alone. A test walks the installed DeepSpeedEngine: every public name must be
implemented by StrongholdEngine, listed here as refused, or listed here as safe to inherit.
"""

from __future__ import annotations

from typing import Any, TypeVar

from stronghold.errors import ConfigError

_PARALLEL = "stronghold runs data-parallel replicas only: shard the model with DeepSpeed itself"
_CHECKPOINT = (
    "checkpoints of masters and moments are not part of this release: save weights with "
    "torch.save(engine.module_state_dict(), path)"
)
_REDUCE = "gradients leave for the host layer by layer during backward: nothing is left to reduce"
_DATA = "build the data loader yourself and pass batches to the engine"
_COMPILE = "torch.compile around streamed layers is not part of this release"
_STATES = (
    "layers move by the plan: set stronghold.window, stronghold.gpu_memory or "
    "stronghold.resident_layers instead"
)

# Names that would run DeepSpeed's own core on state that this engine does not have.
REFUSED: dict[str, str] = {
    "allreduce_and_copy": _REDUCE,
    "allreduce_bucket": _REDUCE,
    "allreduce_gradients": _REDUCE,
    "allreduce_no_retain": _REDUCE,
    "all_gather_scalar": _PARALLEL,
    "buffered_allreduce_fallback": _REDUCE,
    "clip_fp32_gradients": "engine.step clips by the global norm: set gradient_clipping",
    "coalesce_grad_reduction": _REDUCE,
    "compile": _COMPILE,
    "get_autosp_backend": _COMPILE,
    "get_autotp_backend": _COMPILE,
    "get_compile_time": _COMPILE,
    "get_deepcompile_backend": _COMPILE,
    "get_deepspeed_compile_backend": _COMPILE,
    "register_compile_pass": _COMPILE,
    "empty_partition_cache": "there is no ZeRO-3 partition here",
    "load_checkpoint": _CHECKPOINT,
    "load_moe_state_dict": _PARALLEL,
    "save_checkpoint": _CHECKPOINT,
    "save_16bit_model": _CHECKPOINT,
    "save_fp16_model": _CHECKPOINT,
    "offload_states": _STATES,
    "reload_states": _STATES,
    "print_forward_breakdown": "set stronghold.trace to a file for a timeline of the step",
    "random_ltd_initialize": "random layer-token drop changes the model's layers while they stream",
    "scale": "call engine.backward(loss): it scales and streams",
    "set_custom_curriculum_learning_schedule": _DATA,
    "set_data_post_process_func": _DATA,
    "sparse_all_gather": _PARALLEL,
    "sparse_allreduce": _REDUCE,
    "sparse_allreduce_bucket": _REDUCE,
    "sparse_allreduce_no_retain": _REDUCE,
}

EngineClass = TypeVar("EngineClass", bound=type)


def refuse(engine_class: EngineClass) -> EngineClass:
    """Class decorator: every name in `REFUSED` raises ConfigError with its reason."""
    for name, reason in REFUSED.items():
        setattr(engine_class, name, _refusal(name, reason))
    return engine_class


def _refusal(name: str, reason: str) -> Any:
    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"engine.{name} does not apply to stronghold: {reason}")

    refused.__name__ = name
    refused.__doc__ = f"Refused: {reason}."
    return refused
