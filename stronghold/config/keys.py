"""DeepSpeed's config keys and what becomes of each: honoured, accepted without effect, or refused with the reason.

Owns the one table; the checks, the warning and docs/config.md are made from it. A row covers its key and, unless a longer
key has a row of its own, everything below it. Pure data and pure functions.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stronghold.config.source import SECTION
from stronghold.errors import did_you_mean

logger = logging.getLogger("stronghold")


class Effect(enum.Enum):
    """What a key does here."""

    HONOURED = "honoured"
    IGNORED = "without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """One row. `note` says what it does, or why not and what to do instead; for a refused key, values in `harmless` ask for nothing."""

    name: str
    effect: Effect
    note: str
    harmless: tuple[Any, ...] = ()


OFF = (None, False, "auto")
_REMOVED = "DeepSpeed removed this feature. Delete the key."
_MONITOR = "Not connected yet: stronghold logs its own line per step."
_PARALLEL = "Only data parallelism is supported."

KEYS: tuple[Key, ...] = (
    Key("train_batch_size", Effect.HONOURED, "Micro-batch size x accumulation steps x ranks."),
    Key("train_micro_batch_size_per_gpu", Effect.HONOURED, "Samples in one forward on one rank."),
    Key("gradient_accumulation_steps", Effect.HONOURED, "Micro-batches per step, accumulated in fp32."),
    Key(
        "gradient_clipping",
        Effect.HONOURED,
        "Largest global L2 norm; 1.0 when absent, as in DeepSpeed; 0 turns it off.",
    ),
    Key("optimizer.type", Effect.HONOURED, "Adam or AdamW, in any case. Adam means AdamW unless adam_w_mode is false."),
    Key("optimizer.params", Effect.HONOURED, "lr, betas, eps, weight_decay, bias_correction, adam_w_mode, torch_adam."),
    Key("optimizer.legacy_fusion", Effect.IGNORED, "Chooses among DeepSpeed's own fp16 kernels."),
    Key("scheduler.type", Effect.HONOURED, "DeepSpeed's LR schedules and those of torch.optim.lr_scheduler."),
    Key("scheduler.params", Effect.HONOURED, "Arguments of the schedule."),
    Key("bf16.enabled", Effect.HONOURED, "bf16 weights and gradients, exact fp32 masters and moments on the host."),
    Key(
        "bf16.check_grad_overflow",
        Effect.HONOURED,
        "A step with NaN or infinite gradients is skipped; true when absent.",
    ),
    Key(
        "bf16.bf16_master_weights_and_grads",
        Effect.REFUSED,
        "Masters are exact fp32, at no more memory: the weight is its upper half. Set it to false or remove it.",
        OFF,
    ),
    Key("bf16.bf16_optimizer_states", Effect.REFUSED, "Moments are fp32. Set it to false or remove it.", OFF),
    Key("bf16.immediate_grad_update", Effect.IGNORED, "Gradients always leave as backward produces them."),
    Key("fp16", Effect.HONOURED, "enabled, loss_scale and the settings of dynamic loss scaling."),
    Key("fp16.auto_cast", Effect.IGNORED, "Inputs are passed to the model as they are."),
    Key("fp16.fp16_master_weights_and_grads", Effect.REFUSED, "Masters are fp32. Set it to false or remove it.", OFF),
    Key("data_types", Effect.IGNORED, "Accumulation is always in fp32; buffers keep their dtype."),
    Key("data_types.param_dtype", Effect.HONOURED, "Must agree with bf16 or fp16."),
    Key("torch_autocast", Effect.IGNORED, "Without effect while it is off."),
    Key(
        "torch_autocast.enabled",
        Effect.REFUSED,
        'Streamed weights have one dtype. Use "bf16": {"enabled": true}.',
        OFF,
    ),
    Key("steps_per_print", Effect.HONOURED, "Steps between log lines; absent or infinite: never."),
    Key("wall_clock_breakdown", Effect.HONOURED, "Logs where each step's time went."),
    Key("dump_state", Effect.HONOURED, "Logs the config at start."),
    Key("dataloader_drop_last", Effect.HONOURED, "For the loader made from training_data."),
    Key(
        "zero_optimization", Effect.IGNORED, "ZeRO's buckets and switches: weights are streamed layer by layer instead."
    ),
    Key(
        "zero_optimization.stage",
        Effect.REFUSED,
        'Set "zero_optimization": {"stage": 0}; 0, 1 and 2 are accepted, and without effect. Stage 3 partitions '
        "parameters before stronghold sees them.",
        (None, "auto", 0, 1, 2),
    ),
    Key("zero_optimization.offload_optimizer", Effect.IGNORED, "The optimizer is always on the host."),
    Key(
        "zero_optimization.offload_optimizer.device",
        Effect.REFUSED,
        'NVMe is not available yet. Set "device": "cpu" or remove offload_optimizer.',
        (None, "auto", "none", "cpu"),
    ),
    Key(
        "zero_optimization.offload_param",
        Effect.IGNORED,
        "Weights are always on the host, a window of them on the GPU.",
    ),
    Key(
        "zero_optimization.offload_param.device",
        Effect.REFUSED,
        'NVMe is not available yet. Set "device": "cpu" or remove offload_param.',
        (None, "auto", "none", "cpu"),
    ),
    Key("zero_optimization.zenflow", Effect.REFUSED, "No step is stale here. Remove the section.", OFF),
    Key("zero_allow_untested_optimizer", Effect.IGNORED, "Adam and AdamW are tested; others are refused."),
    Key("zero_force_ds_cpu_optimizer", Effect.IGNORED, "The optimizer is always stronghold's own."),
    Key(
        "managed_gradient_accumulation",
        Effect.REFUSED,
        "step() applies an update at the boundary alone. Set it to true or remove it.",
        (None, True, "auto"),
    ),
    Key("hybrid_engine", Effect.IGNORED, "Without effect while it is off."),
    Key("hybrid_engine.enabled", Effect.REFUSED, "Another engine of DeepSpeed's. Set it to false or remove it.", OFF),
    Key("pipeline", Effect.REFUSED, f"{_PARALLEL} Remove the section and pass a plain module.", (None, {})),
    Key("tensor_parallel", Effect.IGNORED, "Without effect while its size is 1."),
    Key("tensor_parallel.autotp_size", Effect.REFUSED, f"{_PARALLEL} Set it to 0.", (*OFF, 0, 1)),
    Key("tensor_parallel.tp.tp_size", Effect.REFUSED, f"{_PARALLEL} Set it to 1.", (*OFF, 1)),
    Key("tensor_parallel.tensor_parallel.tp_size", Effect.REFUSED, f"{_PARALLEL} Set it to 1.", (*OFF, 1)),
    Key("sequence_parallel_size", Effect.REFUSED, f"{_PARALLEL} Set it to 1.", (None, 1, "auto")),
    Key("data_parallel_size", Effect.IGNORED, "The number of ranks is the launcher's."),
    Key("expert_parallel", Effect.IGNORED, "Without effect while it is off."),
    Key("expert_parallel.enabled", Effect.REFUSED, f"{_PARALLEL} Set it to false or remove the section.", OFF),
    Key("use_data_before_expert_parallelism", Effect.IGNORED, "There is no expert parallelism."),
    Key("data_efficiency", Effect.IGNORED, "Without effect while it is off."),
    Key("data_efficiency.enabled", Effect.REFUSED, "Not supported. Set it to false or remove the section.", OFF),
    Key("weight_quantization", Effect.REFUSED, "Training is in full precision. Remove the section.", (None, {})),
    Key("compile", Effect.IGNORED, "Compile single layers of the model with torch.compile instead."),
    Key("compile.deepcompile", Effect.REFUSED, "It rewrites the graph around ZeRO. Set it to false.", OFF),
    Key("autotuning", Effect.IGNORED, "Belongs to the deepspeed launcher."),
    Key(
        "gradient_allreduce_op",
        Effect.REFUSED,
        'Gradients are averaged over ranks. Set it to "mean" or remove it.',
        (None, "auto", "mean"),
    ),
    Key("communication_data_type", Effect.IGNORED, "Gradients are reduced as they are drained."),
    Key("seq_parallel_communication_data_type", Effect.IGNORED, "There is no sequence parallelism."),
    Key("prescale_gradients", Effect.IGNORED, "The division by the number of ranks is part of Adam's pass."),
    Key("gradient_predivide_factor", Effect.IGNORED, "The division by the number of ranks is part of Adam's pass."),
    Key("disable_allgather", Effect.IGNORED, "There is no such collective here."),
    Key("activation_checkpointing", Effect.IGNORED, 'Set "stronghold": {"activations": ...} instead.'),
    Key("tensorboard", Effect.IGNORED, _MONITOR),
    Key("wandb", Effect.IGNORED, _MONITOR),
    Key("csv_monitor", Effect.IGNORED, _MONITOR),
    Key("comet", Effect.IGNORED, _MONITOR),
    Key("flops_profiler", Effect.IGNORED, "Every logged step says its TFLOPS."),
    Key("comms_logger", Effect.IGNORED, 'Set "stronghold": {"trace": FILE} to see every transfer.'),
    Key("timers", Effect.IGNORED, "Settings of DeepSpeed's throughput timer."),
    Key("memory_breakdown", Effect.IGNORED, "The plan names every tier's bytes."),
    Key("checkpoint", Effect.IGNORED, "Settings of DeepSpeed's checkpoint writers."),
    Key("datastates_ckpt", Effect.IGNORED, "Another checkpoint writer of DeepSpeed's."),
    Key("aio", Effect.IGNORED, "Settings of DeepSpeed's asynchronous I/O."),
    Key("disable_python_gc", Effect.IGNORED, "Python's garbage collector is left as it is."),
    Key("log_level", Effect.IGNORED, "The level of DeepSpeed's logger; stronghold's is logging's."),
    Key("vocabulary_size", Effect.IGNORED, "Only a hint about alignment."),
    Key("nebula", Effect.REFUSED, _REMOVED),
    Key("compression_training", Effect.REFUSED, _REMOVED),
    Key("amp", Effect.REFUSED, 'DeepSpeed removed Apex. Delete the key and use "bf16": {"enabled": true}.'),
    Key("quantize_training", Effect.REFUSED, _REMOVED),
    Key("sparse_gradients", Effect.REFUSED, _REMOVED),
    Key("eigenvalue", Effect.REFUSED, _REMOVED),
    Key("sparse_attention", Effect.REFUSED, _REMOVED),
    Key("elasticity", Effect.REFUSED, _REMOVED),
    Key("graph_harvesting", Effect.REFUSED, _REMOVED),
    Key("curriculum_learning", Effect.REFUSED, _REMOVED),
    Key("progressive_layer_drop", Effect.REFUSED, _REMOVED),
)

ROWS: dict[str, Key] = {row.name: row for row in KEYS}
SECTIONS = frozenset(name.partition(".")[0] for name in ROWS if "." in name)
ALIASES = {"bfloat16": "bf16"}
KNOWN = frozenset({name.partition(".")[0] for name in ROWS} | {SECTION, *ALIASES})


def row_for(dotted: str) -> Key | None:
    """The row of the longest prefix of `dotted`, or None where DeepSpeed does not know its top-level key."""
    parts = dotted.split(".")
    parts[0] = ALIASES.get(parts[0], parts[0])
    for length in range(len(parts), 0, -1):
        row = ROWS.get(".".join(parts[:length]))
        if row is not None:
            return row
    return None


def refusals(config: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value asks for what stronghold does not do."""
    lines = []
    for dotted, value in _walk(config):
        row = row_for(dotted)
        if row is None or row.effect is not Effect.REFUSED or row.name.count(".") != dotted.count("."):
            continue
        if not any(value is harmless or _same(value, harmless) for harmless in row.harmless):
            lines.append(f"{dotted}: got {value!r}. {row.note}")
    return lines


def unfilled(config: Mapping[str, Any]) -> list[str]:
    """One line for each honoured key that is still "auto": frameworks fill them in before they call initialize."""
    lines = []
    for dotted, value in _walk(config):
        row = row_for(dotted)
        if value == "auto" and row is not None and row.effect is Effect.HONOURED:
            lines.append(f'{dotted}: got "auto", which nothing has filled in. Write a value, or remove the key.')
    return lines


def warn_of_ignored(config: Mapping[str, Any]) -> None:
    """Logs, once per set of keys, those that are accepted without effect; and a likely misspelling of each unknown one."""
    ignored = []
    for dotted, value in _walk(config):
        row = row_for(dotted)
        if "." not in dotted and dotted not in KNOWN and (hint := did_you_mean(dotted, KNOWN)):
            _warn_once(f'config key "{dotted}" is unknown and ignored.{hint}')
        elif row is not None and row.effect is Effect.IGNORED and not isinstance(value, Mapping):
            ignored.append(dotted)
    if ignored:
        _warn_once(f"config keys without effect under stronghold: {', '.join(sorted(ignored))}")


@functools.lru_cache(maxsize=1024)  # the cache is what makes it once
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _same(value: object, harmless: object) -> bool:
    # True == 1 in Python, not in JSON.
    return type(value) is type(harmless) and value == harmless


def _walk(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below `config`, dotted, sections before what is in them; our own section is left out."""
    for key, value in config.items():
        if not prefix and key == SECTION:
            continue
        dotted = f"{prefix}{key}"
        yield dotted, value
        if isinstance(value, Mapping):
            yield from _walk(value, f"{dotted}.")
