"""The public names of DeepSpeedEngine that cannot apply here, each with its reason.

Owns the table alone. A test walks the installed DeepSpeedEngine: every public name must be
implemented by StrongholdEngine, listed here, or known to the test as an accessor that answers.
"""

from __future__ import annotations

from typing import Any, TypeVar

from stronghold.errors import ConfigError

_PARALLEL = "stronghold runs data-parallel ranks only: shard the model with DeepSpeed itself"
_REDUCE = "gradients leave for the host layer by layer during backward: nothing is left to reduce"
_DATA = "build the data loader yourself and pass batches to the engine"
_COMPILE = "DeepCompile rewrites the graph of the whole model: engine.compile() compiles each block"
_ALIEN = "the optimizer is stronghold's own Adam: set it in the config, or pass torch's"

# Names that would run DeepSpeed's own core on state that this engine does not have: by reason, then
# one by one.
_BY_REASON = {
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
REFUSED: dict[str, str] = {
    **{name: reason for reason, names in _BY_REASON.items() for name in names.split()},
    "clip_fp32_gradients": "engine.step clips by the global norm: set gradient_clipping",
    "print_forward_breakdown": "set stronghold.trace to a file for a timeline of the step",
    "random_ltd_initialize": "random layer-token drop changes the model's layers while they stream",
    "swap_tensor_config": "set stronghold.nvme: it says where state spills, and how",
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
