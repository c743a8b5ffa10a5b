"""The public names of DeepSpeedEngine that cannot apply here, each with its reason.

Owns the table alone. A test walks the installed DeepSpeedEngine: every public name must be
implemented by StrongholdEngine, listed in `REFUSED`, or listed in `INHERITED` and then called.
"""

from __future__ import annotations

from typing import Any, TypeVar

from stronghold.errors import ConfigError

_PARALLEL = "stronghold runs data-parallel ranks only: shard the model with DeepSpeed itself"
_REDUCE = "gradients leave for the host layer by layer during backward: nothing is left to reduce"
_DATA = "build the data loader yourself and pass batches to the engine"
_COMPILE = "torch.compile around streamed layers is not part of this release"
_ALIEN = "the optimizer is stronghold's own Adam: set it in the config, or pass torch's"
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
    "compile_zero_optimization_stage": _COMPILE,
    "get_optimizer_configuration": _ALIEN,
    "load_moe_state_dict": _PARALLEL,
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
    "swap_tensor_config": "set stronghold.nvme: it says where state spills, and how",
}

# One-line accessors of DeepSpeed's that read `_config`, `optimizer` or a batch size, and set none.
_ACCESSORS = """
    aio_config autotp_size autotuning_enabled autotuning_end_profile_step autotuning_metric
    autotuning_metric_path autotuning_model_info_path autotuning_profile_model_info
    autotuning_start_profile_step bf16_master_weights_and_gradients bf16_optimizer_states
    bfloat16_enabled checkpoint_serialization_enabled checkpoint_tag_validation_enabled
    checkpoint_tag_validation_fail checkpoint_writer_enabled collect_python_gc
    communication_data_type compile_autosp compile_autotp cpuadam_cores_perc
    curriculum_learning_config curriculum_learning_enabled data_efficiency_config
    data_efficiency_enabled data_sampling_config data_sampling_enabled dataloader_drop_last
    dump_state dynamic_loss_scale dynamic_loss_scale_args flops_profiler_detailed
    flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file
    flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules
    fp16_auto_cast fp16_enabled fp16_master_weights_and_gradients get_batch_info get_data_types
    get_lr get_mom get_type gradient_accumulation_steps gradient_clipping
    gradient_predivide_factor initial_dynamic_scale is_deepcompile_active is_deepcompile_enabled
    is_first_weights_partition_group is_iterable_style_dataset is_map_style_dataset
    is_sanity_checks_enabled load_universal_checkpoint log_level loss_scale
    managed_gradient_accumulation memory_breakdown optimizer_legacy_fusion optimizer_name
    optimizer_params postscale_gradients random_ltd_config random_ltd_enabled scheduler_name
    scheduler_params set_train_micro_batch_size steps_per_print super_offload
    tensor_parallel_config torch_autocast_dtype torch_autocast_enabled
    torch_autocast_lower_precision_safe_modules train_batch_size train_micro_batch_size_per_gpu
    use_node_local_storage uses_parallelization_pass_only wall_clock_breakdown zenflow_config
    zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential
    zero_allow_untested_optimizer zero_compute_grad_norm zero_contiguous_gradients
    zero_cpu_offload zero_elastic_checkpoint zero_force_ds_cpu_optimizer
    zero_gather_16bit_weights_on_model_save zero_hpz_partition_size zero_ignore_unused_parameters
    zero_legacy_stage1 zero_load_from_fp32_weights zero_log_trace_cache_warnings
    zero_max_live_parameters zero_max_reuse_distance zero_model_persistence_threshold
    zero_module_granularity_threshold zero_multi_rank_bucket_allreduce
    zero_nvme_offload_optimizer zero_offload_optimizer zero_offload_param zero_optimization
    zero_optimization_partition_gradients zero_optimization_partition_weights
    zero_optimization_stage zero_overlap_comm zero_param_persistence_threshold
    zero_parameter_alignment zero_partial_offload zero_prefetch_bucket_size
    zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
    zero_reduce_bucket_size zero_reduce_scatter zero_round_robin_gradients
    zero_save_muon_momentum_buffer_in_memory zero_sub_group_size zero_use_cpu_optimizer
"""
INHERITED: frozenset[str] = frozenset(_ACCESSORS.split())

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
