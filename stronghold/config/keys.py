"""The table of DeepSpeed's config keys: honoured, without effect, or refused, and their values.

Owns the table. Checks, warnings and docs/config.md are made from it. A row covers its key, and all
keys below it that have no row of their own. Pure data and pure functions. Any thread may enter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stronghold.config.source import SECTION, warn_once
from stronghold.errors import BOOLEAN, Expected, did_you_mean, is_number, value_problem
from stronghold.optim import OPTIMIZERS

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
OFF = (None, False, "auto")
FP32 = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's spellings
BF16 = ("bf16", "bfloat16", "torch.bfloat16")
FP16 = ("fp16", "float16", "half", "torch.float16")
HALF = (*BF16, *FP16)
_PARALLEL = "Only data parallelism is supported"
_REMOVED = "DeepSpeed removed this feature: delete the key."
_REMOVED_NAMES = """compression_training curriculum_learning eigenvalue elasticity graph_harvesting
    nebula progressive_layer_drop quantize_training sparse_attention sparse_gradients"""
_WRITER = "DeepSpeed's writer: train_loss, lr and loss_scale of each step, over samples."

HONOURED = {
    "train_batch_size": "Micro-batch size x accumulation steps x ranks.",
    "train_micro_batch_size_per_gpu": "Samples in one forward on one rank.",
    "gradient_accumulation_steps": "Micro-batches per step, accumulated in fp32.",
    "managed_gradient_accumulation": "false: every engine.step() ends a step. The gradients of all "
    "backwards before it are added up in fp32.",
    "gradient_clipping": "Largest global L2 norm. Absent: 1.0, as in DeepSpeed. 0 is off.",
    "optimizer.type": " ".join(cls.note for cls in OPTIMIZERS),
    "optimizer.params": " ".join(f"{cls.name}: {cls.params_note}." for cls in OPTIMIZERS),
    "scheduler.type": "DeepSpeed's LR schedules and those of torch.optim.lr_scheduler.",
    "scheduler.params": "Arguments of the schedule.",
    "bf16.enabled": "bf16 weights and gradients; exact fp32 masters and moments on the host.",
    "bf16.bf16_master_weights_and_grads": "DeepSpeed's masters take 2 bytes beside the weight. So "
    "do the exact fp32 masters of stronghold. Lean ones take 1 (stronghold.states). Gradients are "
    "bf16 in any case.",
    "bf16.bf16_optimizer_states": "DeepSpeed's moments take 4 bytes for both. Exact ones are fp32 "
    "and take 8, lean ones take 2.1 (stronghold.states).",
    "bf16.check_grad_overflow": "Skip a step with NaN or infinite gradients. Absent: true. With "
    "false the step is applied, as in a plain loop. fp16 and fp32 always skip, "
    "as in DeepSpeed's ZeRO.",
    "fp16": "fp16 weights and gradients, fp32 masters and moments on the host, and DeepSpeed's "
    "loss scale: loss_scale (0: dynamic), initial_scale_power, loss_scale_window, min_loss_scale. "
    "hysteresis and consecutive_hysteresis have an effect under ZeRO stages 1 to 3 alone, as in "
    "DeepSpeed.",
    "zero_optimization.offload_optimizer.device": '"nvme": moments and masters may spill, as by '
    '"stronghold": {"nvme": {"spill": "masters"}}.',
    "zero_optimization.offload_optimizer.nvme_path": "The nvme.path of the section.",
    "zero_optimization.offload_param.device": '"nvme": weights may spill, too, as by '
    '"stronghold": {"nvme": {"spill": "weights"}}.',
    "zero_optimization.offload_param.nvme_path": "The nvme.path of the section. If it differs from "
    "offload_optimizer.nvme_path, state is striped over both.",
    "data_types.param_dtype": "Must agree with bf16 or fp16.",
    "zero_allow_untested_optimizer": "Accelerate requires it if a script brings an optimizer. "
    "Types that optimizer.type accepts are accepted. Others are refused.",
    "zero_force_ds_cpu_optimizer": "With false, Accelerate does not replace a script's optimizer.",
    "log_level": "The level of DeepSpeed's own logger.",
    "dump_state": "Log DeepSpeed's reading of the config at start.",
    "steps_per_print": "Steps between log lines. Absent or infinite: never.",
    "dataloader_drop_last": "For the loader made from training_data.",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), _WRITER),
}

IGNORED = {
    "optimizer.legacy_fusion": "It chooses among DeepSpeed's fp16 kernels.",
    "bf16.immediate_grad_update": "Gradients are always offloaded as backward produces them.",
    "fp16.auto_cast": "Inputs are passed to the model as they are.",
    "data_types": "Set bf16 or fp16 instead.",
    "torch_autocast": "Accepted while it is off.",
    "wall_clock_breakdown": 'Set "stronghold": {"trace": FILE} for a timeline of each step.',
    "flops_profiler": "The log has the TFLOPS of a step; `stronghold plan` has what bounds it.",
    "memory_breakdown": "The plan in the log has every tier's bytes.",
    "zero_optimization": "Weights are streamed layer by layer, not partitioned in buckets.",
    "zero_optimization.offload_optimizer": "The optimizer is on the host. The plan sizes buffers.",
    "zero_optimization.offload_param": "Weights are on the host. The plan sizes buffers.",
    "hybrid_engine": "Accepted while it is off.",
    "tensor_parallel": "Accepted while its size is 1.",
    "data_parallel_size": "The launcher sets the number of ranks.",
    "expert_parallel": "Accepted while it is off.",
    "use_data_before_expert_parallelism": "There is no expert parallelism.",
    "data_efficiency": "Accepted while it is off.",
    "compile": "There is no graph of the whole model to rewrite.",
    "autotuning": "It belongs to the deepspeed launcher.",
    "communication_data_type": "Gradients are reduced in the dtype in which they are offloaded.",
    "seq_parallel_communication_data_type": "There is no sequence parallelism.",
    "prescale_gradients": "Ranks' gradients are added in fp32, and divided before rounding.",
    "gradient_predivide_factor": "Ranks' gradients are added in fp32, and divided before rounding.",
    "disable_allgather": "It chooses a collective for DeepSpeed's buckets. Stronghold has none.",
    "activation_checkpointing": 'Set "stronghold": {"activations": ...} instead.',
    "comms_logger": 'Set "stronghold": {"trace": FILE} to see every transfer.',
    "timers": "Every logged step has its tokens per second, without a wait for the GPU.",
    "checkpoint": "tag_validation is obeyed. Other keys are of DeepSpeed's checkpoint writers.",
    "datastates_ckpt": "It is a checkpoint writer of DeepSpeed's.",
    "aio": "Threads read and write whole blocks, past the page cache.",
    "disable_python_gc": "Python's garbage collector is left as it is.",
    "vocabulary_size": "It is a hint about alignment alone.",
}

# By key: the values that ask for nothing, and what to do about all others.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.stage": (
        (None, "auto", 0, 1, 2, 3),
        "Stages 0 to 3 have no effect: the model streams at each. Set one, or remove the key.",
    ),
    "zero_optimization.zenflow": ((None,), "No update of stronghold is stale. Remove the section."),
    "fp16.fp16_master_weights_and_grads": (OFF, "Masters are fp32. Set it to false or remove it."),
    "data_types.grad_accum_dtype": (
        (None, "auto", *FP32, *HALF),
        "Micro-batches are added up in fp32. Remove the key.",
    ),
    "data_types.buffer_dtype": ((None,), "Buffers keep their dtype. Cast them before initialize."),
    "torch_autocast.enabled": (OFF, 'Streamed weights have one dtype. Use "bf16" instead.'),
    "gradient_allreduce_op": (
        (None, "auto", "mean"),
        'Gradients are averaged over ranks. Set it to "mean" or remove it.',
    ),
    "hybrid_engine.enabled": (OFF, "It selects another engine of DeepSpeed's. Remove the section."),
    "pipeline": ((None, {}), f"{_PARALLEL}. Remove the section and pass a plain module."),
    "tensor_parallel.autotp_size": ((*OFF, 0, 1), f"{_PARALLEL}: set it to 0."),
    "tensor_parallel.tp.tp_size": ((*OFF, 1), f"{_PARALLEL}: set it to 1."),
    "tensor_parallel.tensor_parallel.tp_size": ((*OFF, 1), f"{_PARALLEL}: set it to 1."),
    "sequence_parallel_size": ((None, "auto", 1), f"{_PARALLEL}: set it to 1."),
    "expert_parallel.enabled": (OFF, f"{_PARALLEL}: remove the section."),
    "data_efficiency.enabled": (OFF, "It changes batches behind the engine. Remove the section."),
    "weight_quantization": ((None, {}), "Training is in full precision. Remove the section."),
    "compile.deepcompile": (OFF, "It rewrites the graph around ZeRO. Set it to false."),
    "amp": ((), 'DeepSpeed removed Apex. Delete the key and use "bf16": {"enabled": true}.'),
    **dict.fromkeys(_REMOVED_NAMES.split(), ((), _REMOVED)),
}

ROWS = {**HONOURED, **IGNORED, **REFUSED}
SECTIONS = frozenset(name.partition(".")[0] for name in ROWS if "." in name)
KNOWN = frozenset({*(name.partition(".")[0] for name in ROWS), SECTION, "bfloat16"})
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # DeepSpeed takes 8.0 for 8: programs compute batch sizes by division.
    return value >= 1 and float(value).is_integer()


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_log_level(value: object) -> bool:
    return isinstance(value, str) and value.lower() in LOG_LEVELS


def _is_step_count(value: object) -> bool:
    return value == math.inf or (isinstance(value, int) and is_number(value))


OBJECT = Expected(_is_object, "an object {...}")
STEPS = Expected(_is_step_count, "a number of steps, or no such key")
VALUES: dict[str, Expected] = {
    **dict.fromkeys(BATCH_KEYS, Expected(_is_count, "an integer >= 1")),
    # DeepSpeed unpacks sections unchecked: a number raises a TypeError far from its key.
    **dict.fromkeys(sorted(SECTIONS - {"zero_optimization"}), OBJECT),
    "gradient_clipping": Expected(is_number, "a number >= 0 (0 turns clipping off)"),
    "steps_per_print": STEPS,
    "bf16.enabled": BOOLEAN,
    "bf16.bf16_master_weights_and_grads": BOOLEAN,
    "bf16.bf16_optimizer_states": BOOLEAN,
    "fp16.enabled": BOOLEAN,
    "scheduler.params": OBJECT,
    "log_level": Expected(_is_log_level, f"one of {', '.join(LOG_LEVELS)}"),
}


def row_of(dotted: str) -> str:
    """The longest beginning of `dotted` that has a row, or ""."""
    while dotted and dotted not in ROWS:
        dotted = dotted.rpartition(".")[0]
    return dotted


def refusals(config: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value stronghold does not support, or cannot read."""
    lines: list[str | None] = []
    for dotted, value in _walk(config):
        expected = VALUES.get(dotted)
        if dotted in REFUSED:
            harmless, note = REFUSED[dotted]
            lines.append(None if value in harmless else f"{dotted}: got {value!r}. {note}")
        elif expected is OBJECT or (expected and value not in (None, "auto")):
            lines.append(value_problem(dotted, value, expected))
    return [line for line in lines if line is not None]


def unfilled_lines(config: Mapping[str, Any]) -> list[str]:
    """One line for each honoured key that is still "auto": frameworks replace these earlier."""
    return [
        f'{dotted}: got "auto", which no framework filled in. Write a value or remove it.'
        for dotted, value in _walk(config)
        if value == "auto" and row_of(dotted) in HONOURED
    ]


def ignored_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of the config that are without effect, sorted."""
    keys = (key for key, value in _walk(config) if not isinstance(value, Mapping))
    return tuple(sorted(key for key in keys if row_of(key) in IGNORED))


def warn_of_misspelt(config: Mapping[str, Any]) -> None:
    """Log unknown keys that look like a known one, each once."""
    for key in map(str, config):
        if key in KNOWN or key.startswith("_"):
            continue
        hint = did_you_mean(key, KNOWN)
        if hint:
            warn_once(f'config key "{key}" is unknown and ignored.{hint}')


def _walk(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every key outside of our section, a section before its keys."""
    for key, value in config.items():
        if not prefix and key == SECTION:
            continue
        dotted = f"{prefix}{key}"
        yield dotted, value
        if isinstance(value, Mapping):
            yield from _walk(value, f"{dotted}.")
