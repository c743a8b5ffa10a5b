"""Attributes of DeepSpeed's engine that programs may read, and that this engine never reads.

Owns their names and their values. A value is the one that DeepSpeed gives while the feature is not
enabled. `engine.engine` has the attributes that this engine works with. The training thread alone
enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import EngineTimers
from torch import nn

from stronghold.distributed.process_groups import Ranks
from stronghold.streaming.patches.tensors import flatten_dense_tensors, unflatten_dense_tensors

# Methods that return whether a feature is on. DeepSpeed had them up to 0.19.6, and has neither the
# features nor the methods now.
REMOVED_SWITCHES = (
    "amp_enabled",
    "curriculum_enabled_legacy",
    "eigenvalue_enabled",
    "elasticity_enabled",
    "graph_harvesting",
    "pld_enabled",
    "sparse_gradients_enabled",
)


def _removed_switch(engine: Any) -> bool:
    """Return False: DeepSpeed has removed the feature, and the config refuses its key."""
    return False


def removed_switches() -> dict[str, Callable[[Any], bool]]:
    """Return a method that answers False for each name of `REMOVED_SWITCHES`."""
    return dict.fromkeys(REMOVED_SWITCHES, _removed_switch)


def unused_attributes(
    *, module: nn.Module, config: DeepSpeedConfig, ranks: Ranks, training_data: Any
) -> dict[str, Any]:
    """Return the values of DeepSpeed's attributes, by name.

    They are the values for ranks that are data-parallel alone, with every feature disabled.
    `module` is the user's model, and `training_data` the argument of `initialize`.
    """
    breakdown = bool(config.wall_clock_breakdown)
    profiles = bool(config.flops_profiler_config.enabled)
    return {
        # the model and its data
        "param_names": {parameter: name for name, parameter in module.named_parameters()},
        "training_data": training_data,
        "dont_change_device": False,
        "losses": None,
        "gradient_average": True,
        "scale_wrt_gas": None,
        "warn_unscaled_loss": True,
        "torch_autocast_z0_gradscaler": None,
        "flatten": flatten_dense_tensors,
        "unflatten": unflatten_dense_tensors,
        # ranks
        "dist_backend": get_accelerator().communication_backend_name(),
        "use_ds_comm": False,
        "mesh_device": None,
        "seq_dp_world_size": ranks.num_ranks,
        "sequence_parallel_size": 1,
        "pipeline_parallelism": False,
        "all_to_all_group": None,
        "local_all_to_all_group": None,
        # experts
        "expert_parallel_group": {},
        "expert_data_parallel_group": {},
        "num_experts": [],
        "gate_modules": [],
        "moe_layers": [],
        # checkpoints, which this engine writes without one of DeepSpeed's writers
        "checkpoint_engine": None,
        "checkpoint_mp_rank": 0,
        "mpu": None,
        "save_non_zero_checkpoint": ranks.control.rank == 0,
        "save_zero_checkpoint": False,
        # timers
        "engine_timers": EngineTimers(
            enable_micro_timers=breakdown, enable_global_timers=breakdown or profiles
        ),
        # optimized linear layers
        "optimized_linear_lora_enabled": False,
        "optimized_linear_base_weight_sharding": False,
        # features that DeepSpeed has removed since
        "eigenvalue": None,
        "progressive_layer_drop": None,
        "quantizer": None,
    }
