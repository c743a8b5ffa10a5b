"""Which of DeepSpeed's unit tests are run, and why some of them cannot apply to this engine.

Names of files and tests are those under tests/unit.
"""

from __future__ import annotations

from conformance_suite.explanations import Row

# Under tests/unit of a DeepSpeed checkout. Left out: ZeRO++, MiCS, pipelines, experts, tensor and
# sequence parallelism, inference, hybrid engine, compression, torch.compile, and operators that
# need a GPU.
FILES = (
    "runtime/test_lr_schedulers.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_config_model.py",
    "runtime/test_precision_config_dynamic_scale.py",
    "runtime/test_precision_config_loss_scale.py",
    "runtime/test_data.py",
    "runtime/test_multi_output_model.py",
    "runtime/test_multiple_models.py",
    "runtime/test_no_sync_ctxt.py",
    "runtime/test_runtime_utils.py",
    "runtime/half_precision/test_dynamic_loss_scale.py",
    "runtime/half_precision/test_fp16.py",
    "runtime/half_precision/test_zero_optim_overflow.py",
    "runtime/zero/test_ignore_unused_parameters.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_grad_clip.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_leaf_module.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "ulysses_alst/test_tiled_compute.py",
    "v1/test_engine_log_level.py",
    "v1/half_precision/test_bf16.py",
    "v1/half_precision/test_gradient_clipping_default.py",
    "v1/half_precision/test_mixed_precision_dtype.py",
    "v1/zero/test_offload_states.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    "v1/zero/test_zero2_offload_multi_backward.py",
    "v1/zero/test_zero_user_backward.py",
    "checkpoint/test_convert_checkpoint.py",
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_reshape_checkpoint.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_universal_checkpoint.py",
    "checkpoint/test_zero_optimizer.py",
    "launcher/test_ds_arguments.py",
    "launcher/test_run.py",
    "launcher/test_user_args.py",
    "monitor/test_monitor.py",
    "ops/adam/test_adamw.py",
    "ops/adam/test_cpu_adam.py",
)

# They skip tests on a CPU that pass on the pretended GPU.
GPU_FILES = frozenset(
    {
        "checkpoint/test_lr_scheduler.py",
        "checkpoint/test_zero_optimizer.py",
        "runtime/zero/test_zero_tensor_fragment.py",
    }
)

REASONS = {
    "ranks": "needs several ranks; these runs have one",
    "internals": "reads the insides of a DeepSpeed optimizer, which this engine does not have",
    "class": "asserts the class of the optimizer; ours is stronghold's, over the same groups",
    "partitions": "reads which parameters stage 3 has partitioned, or a partition; here none is",
    "leaves": "asserts that a config marks leaf modules of stage 3; here blocks are fetched whole",
    "tiled loss": "runs backward inside forward: refused; loss_chunk computes a loss in parts",
    "grad by hand": "writes or reads .grad by hand: refused in favour of a hook of the parameter",
    "writes": "writes masters, moments or gradients by safe_set_full_*, which is refused",
    "timers": "reads DeepSpeed's timers or FLOPS profiler, which this engine does not have",
    "buffers": "data_types.buffer_dtype is refused: buffers keep their dtype",
    "dtype": "a half-precision model under a config that asks for fp32 is refused, with the edit",
    "removed": "the installed DeepSpeed has removed the feature and refuses it itself",
    "optimizer": "an optimizer other than Adam, AdamW, Lion and SGD is refused by name",
    "raw read": "reads raw parameters right after step; engine.synchronize() comes first",
    "no sync": "asserts that ZeRO refuses no_sync, or a step inside it; here it has no effect",
    "accepted": "asserts a refusal of what DeepSpeed cannot do, or does not want; here it works",
    "sums": "compares with a reference that adds micro-batches up in bf16; here they are fp32 sums",
    "unused": "asserts that ZeRO 2 refuses unused parameters; here they get no update",
    "error type": "asserts another class of the error; ours is ConfigError, with the edit",
    "zero files": "reads files of DeepSpeed's own checkpoint layout; stronghold export writes them",
    "package": "needs a package that is not installed",
    "gpu": "DeepSpeed skips it, or its own reference fails, without a GPU",
    "operator": "needs an operator that DeepSpeed builds for a GPU alone",
    "experts": "expert parallelism is refused",
    "superoffload": "an interface of SuperOffload's: subgroups and arithmetic rollback",
    "half masters": "half-precision masters or moments are refused: they are fp32 here",
    "switched off": "DeepSpeed has switched the test off",
    "combination": "DeepSpeed skips this combination of parameters",
    "one process": "asserts that there is no process group yet; a file's tests share one process",
}

ROWS = (
    # What is not run: it would wait for ranks that are not there.
    Row("runtime/half_precision/test_fp16.py::TestFP16OptimizerForMoE::*", None, "experts"),
    Row("launcher/test_user_args.py::*pdsh*", None, "package"),
    # What is not run: each of its tests reads the same attributes of ZeRO's optimizers, or converts
    # ZeRO's files.
    Row("v1/zero/test_offload_states.py::*", None, "internals"),
    Row("checkpoint/test_universal_checkpoint.py::*", None, "zero files"),
    # What this engine refuses, in its own words.
    Row(
        "v1/zero/test_zero_user_backward.py::*without_scale_fp16*",
        r"loss\.backward\(\) of a loss that was not scaled, in fp16",
        "error type",
    ),
    Row("*", r"safe_set_full_\* is not supported", "writes"),
    Row("*", r"data_types\.buffer_dtype: got", "buffers"),
    Row("*", r"but the config asks for fp32", "dtype"),
    Row("*", r"amp: got .* DeepSpeed removed Apex", "removed"),
    Row("*", r"DeepSpeedConfigError: .*has been removed", "removed"),
    Row("*", r"cannot run on the CPU here", "optimizer"),
    Row("*", r"batch sizes do not multiply out", "ranks"),
    # What a test takes for granted.
    Row("*", r"assumes a world size of 2|is not divisible by 2|num_stages \(2\)", "ranks"),
    Row("ops/adam/test_adamw.py::*", r"object has no attribute 'optimizer'", "class"),
    Row("*", r"'EngineOptimizer' object has no attribute", "internals"),
    Row("*", r"Optimizer should be ZeROOptimizer", "internals"),
    Row("runtime/zero/test_unwrap_model.py::*", r"assert hooks_exist\(engine\)", "internals"),
    Row("runtime/test_ds_initialize.py::Test*Optimizer::*", r"EngineOptimizer", "class"),
    Row("runtime/test_ds_config_dict.py::TestNoModel::*", r"model is missing", "error type"),
    Row("runtime/test_no_sync_ctxt.py::*", r"DID NOT RAISE.*AssertionError", "no sync"),
    Row(
        "runtime/test_no_sync_ctxt.py::*",
        r"'NoneType' object has no attribute 'norm'",
        "grad by hand",
    ),
    Row(
        "runtime/half_precision/test_zero_optim_overflow.py::*",
        r"^E +(Assertion|assert)",
        "grad by hand",
    ),
    Row("v1/zero/test_zero_user_backward.py::*accumulation*", r"Gradients differ for", "sums"),
    Row("v1/zero/test_zero_user_backward.py::*overlap_comm*", r"DID NOT RAISE", "accepted"),
    Row("v1/half_precision/test_bf16.py::*must_enable_bf16_states*", r"DID NOT RAISE", "accepted"),
    Row(
        "v1/zero/test_zero_user_backward.py::*",
        r"managed_gradient_accumulation is false|engine\.coalesce_grad_reduction is a part"
        r"|model: a PipelineModule",
        "error type",
    ),
    Row("runtime/zero/test_ignore_unused*", r"DID NOT RAISE.*AssertionError", "unused"),
    Row("runtime/zero/test_zero_grad_clip.py::*", r"isinstance\(EngineOptimizer", "class"),
    Row("v1/zero/test_zero2_offload_multi_backward.py::*", r"differs by", "raw read"),
    Row("*", r"DistributedDataParallel device_ids|Invalid device string: '0'", "gpu"),
    Row("v1/zero/test_zero_user_backward.py::*", r"has no attribute 'ds_persist'", "partitions"),
    Row("*", r"has no attribute '(ds_status|ds_tensor)'", "partitions"),
    Row("*", r"only defined for ZeRO-3 partitioned parameters", "partitions"),
    Row("runtime/zero/test_zero_context.py::*throughput*", r"tput_timer", "timers"),
    Row(
        "runtime/zero/test_zero_context_return.py::*ext_param_return",
        r"hasattr\(.*'ds_status'\)",
        "partitions",
    ),
    Row("runtime/zero/test_zero_context.py::*", r"no attribute 'MiCS_Init'", "removed"),
    Row("runtime/zero/test_zero_context.py::*", r"invalid root rank: 1", "ranks"),
    Row(
        "runtime/zero/test_zero_context.py::*scattered_init_dist",
        r"function is_initialized",
        "one process",
    ),
    Row(
        "runtime/zero/test_zero_leaf_module.py::*no_grad_input_error",
        r"Expected RuntimeError: inputs with requires_grad=False",
        "accepted",
    ),
    Row(
        "runtime/zero/test_zero_leaf_module.py::*enabled_via_config",
        r"False = z3_leaf_module\(",
        "leaves",
    ),
    Row(
        "ulysses_alst/test_tiled_compute.py::TestTiledFusedLogitsLoss::*",
        r"a gradient of .* came while the model's forward runs",
        "tiled loss",
    ),
    Row(
        "v1/zero/test_zero_user_backward.py::*validates_scalar_loss*",
        r"engine\.scale: expected a scalar loss",
        "error type",
    ),
    Row(
        "checkpoint/test_tag_validation.py::*unique_tag*", r"DID NOT RAISE.*AssertionError", "ranks"
    ),
    Row("checkpoint/*", r"is not a model state checkpoint", "zero files"),
    Row(
        "checkpoint/test_zero_optimizer.py::*frozen_weights*",
        r"'NoneType' object has no attribute 'keys'",
        "zero files",
    ),
    Row("monitor/*", r"No module named '(comet_ml|tensorboard|wandb)'", "package"),
    Row("ops/adam/test_cpu_adam.py::*", r"no attribute '(step|rollback)_subgroup'", "superoffload"),
    # What DeepSpeed itself skips.
    Row(
        "*",
        r"Skipped: (Local APIs only|Nvme offload not supported) for zero stage"
        r"|Skipped: TODO: Frozen weights not currently supported by BF16 Optimizer",
        "combination",
    ),
    Row("*", r"Skipped: .*(has not been implemented on this system|is not compatible)", "operator"),
    Row("*", r"Skipped: .*(CPU [aA]ccelerator|NCCL|not supported)", "gpu"),
    Row("*", r"Skipped: .*half precision inf/nan output", "gpu"),
    Row("ops/adam/test_cpu_adam.py::TestCPUAdamGPUError::*", r"DID NOT RAISE", "gpu"),
    Row("ops/adam/test_cpu_adam.py::*", r"argument 'fp32_optimizer_states'", "half masters"),
    Row("*", r"Skipped: .*(skip for now|timesout|WIP|run manually)", "switched off"),
    Row("*", r"Skipped: .*Amp is not installed", "removed"),
)
