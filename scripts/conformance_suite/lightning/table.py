"""Which of Lightning's tests are run, and why some of them cannot apply to this engine."""

from __future__ import annotations

from conformance_suite.explanations import Row

FILES = (
    "tests_pytorch/strategies/test_deepspeed.py",
    "tests_fabric/strategies/test_deepspeed.py",
    "tests_fabric/strategies/test_deepspeed_integration.py",
    "tests_pytorch/plugins/precision/test_deepspeed_precision.py",
    "tests_pytorch/utilities/test_deepspeed_collate_checkpoint.py",
    "tests_pytorch/utilities/test_deepspeed_model_summary.py",
    "tests_fabric/plugins/precision/test_deepspeed.py",
    "tests_fabric/plugins/precision/test_deepspeed_integration.py",
)

REASONS = {
    "class": "asserts the class of the optimizer; ours is stronghold's, over the same groups",
    "internals": "reads the state dict of a DeepSpeed optimizer from inside",
    "ranks": "needs several ranks; these runs have one",
    "partitions": "asserts that stage 3 partitions parameters; here they are whole",
    "summary": "Lightning's summary of a stage 3 model counts partitions, which do not exist here; "
    "stage 2 has the same effect, or enable_model_summary=False",
    "evaluation": "evaluates with stage 3 before training. Lightning's config for evaluation has "
    "no section, so DeepSpeed's own engine runs, and its hooks stay on the model",
    "moved": "reads parameters on the CPU after model.cpu(), while the engine lives: each stays "
    "where the engine has it (docs/programs.md)",
    "zero files": "reads or lists files of DeepSpeed's own checkpoint layout",
    "deepspeed": "the installed DeepSpeed refuses it itself, before any engine is made",
    "expected": "Lightning expects the test to fail under DeepSpeed",
}

ROWS = (
    Row("*", r"isinstance\(EngineOptimizer.*DeepSpeedZeroOptimizer", "class"),
    Row("*::test_deepspeed_multigpu_stage_3_resume_training", r"'fp32_flat_groups'", "internals"),
    Row("*::test_deepspeed_stage_3_save_warning", r"DID NOT WARN", "ranks"),
    Row("*::test_deepspeed_multiple_models", r"w\.nelement\(\) == 0", "partitions"),
    Row("*", r"has no attribute 'partition_numel'|hasattr\(p, .ds_numel.\)", "summary"),
    Row("*", r"'Parameter' object has no attribute 'ds_status'", "evaluation"),
    Row(
        "*::test_deepspeed_multigpu_no_schedulers",
        r"Expected all tensors to be on the same device",
        "moved",
    ),
    Row("*::test_deepspeed_multi_save_same_filepath", r"zero_to_fp32\.py", "zero files"),
    Row(
        "*::test_deepspeed_save_load_checkpoint_zero_3*",
        r"'NoneType' object has no attribute 'values'",
        "zero files",
    ),
    Row("*::test_deepspeed_collate_checkpoint", r"can't find \*_optim_states", "zero files"),
    Row("*", r"Must specify the number of layers with contiguous memory", "deepspeed"),
    Row("*::test_deepspeed_multigpu_stage_3_checkpointing*", r".", "expected"),
)
