"""DeepSpeed's config keys: what becomes of each, and which values can be read.

Owns the tables; the checks, the warning and docs/config.md are made from them. A row covers its key
and, unless a longer key has one of its own, everything below it. Pure data and pure functions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stronghold.config.source import SECTION, warn_once
from stronghold.errors import BOOLEAN, Expected, did_you_mean, is_number, value_problem
from stronghold.optim import OPTIMIZERS


class Effect(enum.Enum):
    """What a key does here."""

    HONOURED = "honoured"
    IGNORED = "without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One row: `note` says what it does, or why not and what to do instead. Values in `harmless`
    ask for nothing of a refused key."""

    name: str
    effect: Effect
    note: str
    harmless: tuple[Any, ...] = ()


OFF = (None, False, "auto")
FP32 = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's spellings
_PARALLEL = "Only data parallelism is supported"
_REMOVED = "DeepSpeed removed this feature: delete the key."
_REMOVED_NAMES = """compression_training curriculum_learning eigenvalue elasticity graph_harvesting
    nebula progressive_layer_drop quantize_training sparse_attention sparse_gradients"""
_WRITER = "DeepSpeed's writer: train_loss, lr and loss_scale of each step, over samples."

HONOURED = {
    "train_batch_size": "Micro-batch size x accumulation steps x ranks.",
    "train_micro_batch_size_per_gpu": "Samples in one forward on one rank.",
    "gradient_accumulation_steps": "Micro-batches per step, accumulated in fp32.",
    "managed_gradient_accumulation": "false: every engine.step() ends a step, of as many backwards "
    "as came before it; their gradients are added up in fp32.",
    "gradient_clipping": "Largest global L2 norm. 1.0 when absent, as in DeepSpeed; 0 is off.",
    "optimizer.type": " ".join(cls.note for cls in OPTIMIZERS),
    "optimizer.params": " ".join(f"{cls.name}: {cls.params_note}." for cls in OPTIMIZERS),
    "scheduler.type": "DeepSpeed's LR schedules and those of torch.optim.lr_scheduler.",
    "scheduler.params": "Arguments of the schedule.",
    "bf16.enabled": "bf16 weights and gradients; exact fp32 masters and moments on the host.",
    "bf16.bf16_master_weights_and_grads": "DeepSpeed's take 2 bytes beside the weight, and so do "
    "the exact fp32 masters here; lean ones take 1 (stronghold.states). Gradients are bf16 anyway. "
    "The log says which.",
    "bf16.bf16_optimizer_states": "DeepSpeed's take 4 bytes for both moments; exact ones here are "
    "fp32 and take 8, lean ones take 2.1 (stronghold.states). The log says which.",
    "bf16.check_grad_overflow": "Skips a step with NaN or infinite gradients. True when absent; "
    "false applies it, as a plain loop does. fp16 always skips; fp32 does where gradients are "
    "clipped or added up, as DeepSpeed's ZeRO does.",
    "fp16": "fp16 weights and gradients, fp32 masters and moments on the host, and DeepSpeed's "
    "loss scale: loss_scale (0: dynamic), initial_scale_power, loss_scale_window, min_loss_scale. "
    "hysteresis and consecutive_hysteresis count under ZeRO stage 1 to 3 alone, as in DeepSpeed.",
    "zero_optimization.offload_optimizer.device": '"nvme" lets moments and masters spill: '
    '"stronghold": {"nvme": {"spill": "masters"}}.',
    "zero_optimization.offload_optimizer.nvme_path": "The nvme.path of the section.",
    "zero_optimization.offload_param.device": '"nvme" lets weights spill, too: '
    '"stronghold": {"nvme": {"spill": "weights"}}.',
    "zero_optimization.offload_param.nvme_path": "The nvme.path of the section; where it differs "
    "from offload_optimizer.nvme_path, state is striped over both.",
    "aio.queue_depth": "The nvme.depth of the section.",
    "aio.block_size": "The nvme.block of the section.",
    "data_types.param_dtype": "Must agree with bf16 or fp16.",
    "wall_clock_breakdown": "Milliseconds of fwd, bwd and step by DeepSpeed's timers, which wait "
    "for the GPU.",
    "flops_profiler": "DeepSpeed's profiler at profile_step. Latencies include waits for weights.",
    "zero_allow_untested_optimizer": "Accelerate insists on it where a script brings an optimizer. "
    "The types of optimizer.type are right here; others are refused.",
    "zero_force_ds_cpu_optimizer": "False keeps Accelerate from replacing a script's optimizer.",
    "log_level": "The level of DeepSpeed's own logger.",
    "dump_state": "Logs DeepSpeed's reading of the config at start.",
    "steps_per_print": "Steps between log lines. Absent or infinite: never.",
    "dataloader_drop_last": "For the loader made from training_data.",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), _WRITER),
}

IGNORED = {
    "optimizer.legacy_fusion": "Chooses among DeepSpeed's own fp16 kernels.",
    "bf16.immediate_grad_update": "Gradients always leave as backward produces them.",
    "fp16.auto_cast": "Inputs are passed to the model as they are.",
    "data_types": "Set bf16 or fp16 instead.",
    "torch_autocast": "While it is off.",
    "memory_breakdown": "The plan names every tier's bytes.",
    "zero_optimization": "Weights are streamed layer by layer, not partitioned in buckets.",
    "zero_optimization.offload_optimizer": "The optimizer is on the host; buffers are the plan's.",
    "zero_optimization.offload_param": "Weights are on the host; buffers are the plan's.",
    "hybrid_engine": "While it is off.",
    "tensor_parallel": "While its size is 1.",
    "data_parallel_size": "The number of ranks is the launcher's.",
    "expert_parallel": "While it is off.",
    "use_data_before_expert_parallelism": "There is no expert parallelism.",
    "data_efficiency": "While it is off.",
    "compile": "There is no graph of the whole model to rewrite.",
    "autotuning": "Belongs to the deepspeed launcher.",
    "communication_data_type": "Gradients are reduced in the dtype in which they are drained.",
    "seq_parallel_communication_data_type": "There is no sequence parallelism.",
    "prescale_gradients": "Ranks' gradients are added in fp32, and divided before rounding.",
    "gradient_predivide_factor": "Ranks' gradients are added in fp32, and divided before rounding.",
    "disable_allgather": "There is no such collective here.",
    "activation_checkpointing": 'Set "stronghold": {"activations": ...} instead.',
    "comms_logger": 'Set "stronghold": {"trace": FILE} to see every transfer.',
    "timers": "Every logged step says its tokens per second, without waiting for the GPU.",
    "checkpoint": "Settings of DeepSpeed's checkpoint writers.",
    "datastates_ckpt": "A checkpoint writer of DeepSpeed's.",
    "aio": "Each disk has a queue for each direction, and bytes pass through RAM.",
    "disable_python_gc": "Python's garbage collector is left as it is.",
    "vocabulary_size": "Only a hint about alignment.",
}

# KeyRow: the values that ask for nothing, and what to do about all others.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.stage": (
        (None, "auto", 0, 1, 2, 3),
        "0 to 3 are accepted and without effect: every stage is a model that streams. Remove it.",
    ),
    "zero_optimization.zenflow": ((None,), "No update is stale here. Remove the section."),
    "fp16.fp16_master_weights_and_grads": (OFF, "Masters are fp32. Set it to false or remove it."),
    "data_types.grad_accum_dtype": (
        (None, "auto", *FP32),
        'Micro-batches are added up in fp32: set it to "fp32" or remove it.',
    ),
    "data_types.buffer_dtype": ((None,), "Buffers keep their dtype. Cast them before initialize."),
    "torch_autocast.enabled": (OFF, 'Streamed weights have one dtype. Use "bf16" instead.'),
    "gradient_allreduce_op": (
        (None, "auto", "mean"),
        'Gradients are averaged over ranks. Set it to "mean" or remove it.',
    ),
    "hybrid_engine.enabled": (OFF, "Another engine of DeepSpeed's. Remove the section."),
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

KEYS: tuple[KeyRow, ...] = (
    *(KeyRow(name, Effect.HONOURED, note) for name, note in HONOURED.items()),
    *(KeyRow(name, Effect.IGNORED, note) for name, note in IGNORED.items()),
    *(KeyRow(name, Effect.REFUSED, note, harmless) for name, (harmless, note) in REFUSED.items()),
)
ROWS: dict[str, KeyRow] = {row.name: row for row in KEYS}
SECTIONS = frozenset(name.partition(".")[0] for name in ROWS if "." in name)
ALIASES = {"bfloat16": "bf16"}
KNOWN = frozenset({name.partition(".")[0] for name in ROWS} | {SECTION, *ALIASES})
BF16_STATES = {  # by the kind of states, what meets DeepSpeed's words for small ones
    "bf16_master_weights_and_grads": {
        "exact": "exact fp32 masters in as many bytes, 2 beside the weight",
        "lean": "masters of 24 bits, 1 byte beside the weight",
    },
    "bf16_optimizer_states": {
        "exact": 'fp32 moments, 8 bytes instead of 4; "lean" takes 2.1',
        "lean": "8-bit moments, 2.1 bytes instead of 4",
    },
}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


OBJECT = Expected(lambda value: isinstance(value, Mapping), "an object {...}")
STEPS = Expected(
    lambda value: value == math.inf or (isinstance(value, int) and is_number(value)),
    "a number of steps, or no such key",
)
VALUES: dict[str, Expected] = {
    **dict.fromkeys(BATCH_KEYS, Expected(_is_count, "an integer >= 1")),
    # DeepSpeed unpacks sections unseen: a number there is a TypeError far from its key.
    **dict.fromkeys(sorted({*SECTIONS, *ALIASES} - {"zero_optimization"}), OBJECT),
    "gradient_clipping": Expected(is_number, "a number >= 0 (0 turns clipping off)"),
    "steps_per_print": STEPS,
    "bf16.enabled": BOOLEAN,
    **{f"bf16.{key}": BOOLEAN for key in BF16_STATES},
    "fp16.enabled": BOOLEAN,
    "scheduler.params": OBJECT,
}


def row_for(dotted: str) -> KeyRow | None:
    """The row of the longest prefix of `dotted` that has one, or None."""
    parts = _canonical(dotted).split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ROWS[prefix] for prefix in prefixes if prefix in ROWS), None)


def _canonical(dotted: str) -> str:
    section, dot, rest = dotted.partition(".")
    return f"{ALIASES.get(section, section)}{dot}{rest}"


def refusals(config: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value asks for what stronghold does not do, or cannot be read."""
    lines = []
    for dotted, value in _walk(config):
        row, kind = row_for(dotted), VALUES.get(_canonical(dotted))
        exact = row is not None and row.name.count(".") == dotted.count(".")
        if row is not None and exact and row.effect is Effect.REFUSED:
            if value not in row.harmless:
                lines.append(f"{dotted}: got {value!r}. {row.note}")
        elif kind is OBJECT or (kind is not None and value not in (None, "auto")):
            lines += filter(None, [value_problem(dotted, value, kind)])
    return lines


def unfilled_lines(config: Mapping[str, Any]) -> list[str]:
    """One line for each honoured key that is still "auto"; frameworks replace them earlier."""
    return [
        f'{dotted}: got "auto", which nothing filled in. Write a value or remove it.'
        for dotted, value in _walk(config)
        if value == "auto" and (row := row_for(dotted)) and row.effect is Effect.HONOURED
    ]


def ignored_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that are without effect, in the order of the alphabet."""
    found = []
    for dotted, value in _walk(config):
        row = row_for(dotted)
        if row is not None and row.effect is Effect.IGNORED and not isinstance(value, Mapping):
            found.append(dotted)
    return tuple(sorted(found))


def warn_of_misspelt(config: Mapping[str, Any]) -> None:
    """Log, once, unknown keys that look like a known one."""
    for key in config:
        foreign = key not in KNOWN and not key.startswith("_")
        if foreign and (hint := did_you_mean(key, KNOWN)):
            warn_once(f'config key "{key}" is unknown and ignored.{hint}')


def _walk(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key but our section's, dotted, sections before what is in them."""
    for key, value in config.items():
        if not prefix and key == SECTION:
            continue
        dotted = f"{prefix}{key}"
        yield dotted, value
        if isinstance(value, Mapping):
            yield from _walk(value, f"{dotted}.")
