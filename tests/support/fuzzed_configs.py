"""Random configs of documented keys: what each asks for, and which key must be refused, if any.

`drawn(number)` is one config. In seven of ten all values are valid, in the others one is not. The
oracle of refusals is here, not in the package: `FAULTS` has the wrong values, `CONFLICTS` the pairs
of valid values that exclude each other.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stronghold.optim.adam import Adam
from stronghold.optim.lion import Lion
from stronghold.optim.sgd import SGD
from tests.support.training import Trains

NUM_BLOCKS = 4  # of the models that are trained with these configs
BATCH = 4  # sequences in a micro-batch
CAUSAL = "llama"  # the model whose head "stronghold.loss_chunk" takes apart
NVME_DIRECTORIES = ("nvme0", "nvme1")
FAULTY = 0.3  # of the configs
LEVELS = ["keep", "offload", "attention", "attention_offload", "recompute", "recompute_offload"]
Keys = dict[str, Any]


@dataclass(kw_only=True)
class Drawn:
    """One config and what the plain loop must know about it.

    model       "llama" or "gpt"
    config      the whole config, with the "stronghold" section
    managed     False: one engine.step() ends a step of `accumulation` backwards
    refused     the dotted keys of which a refusal names at least one, or () if the config is valid
    """

    model: str
    config: Keys
    trains: Trains
    precision: str = "fp32"
    accumulation: int = 1
    clipping: float = 1.0
    managed: bool = True
    refused: tuple[str, ...] = ()
    section: Keys = field(default_factory=dict)

    @property
    def stage(self) -> int:
        """ZeRO's stage, by which DeepSpeed chooses among loss scalers."""
        return int(self.config.get("zero_optimization", {}).get("stage", 0))


def drawn(number: int, folder: Path) -> Drawn:
    """The config of this number. Files and directories that it names lie in `folder`."""
    rng = random.Random(number)
    for name in NVME_DIRECTORIES:
        (folder / name).mkdir(exist_ok=True)
    trains = optimizer_of(rng)
    made = Drawn(model=rng.choice([CAUSAL, "gpt"]), config={}, trains=trains)
    made.config = {"optimizer": trains.section, "steps_per_print": 10**9}
    draw_batch(rng, made)
    draw_precision(rng, made)
    draw_clipping(rng, made)
    draw_section(rng, made, folder)
    draw_schedule(rng, made)
    draw_offload(rng, made, folder)
    draw_others(rng, made, folder)
    made.config["stronghold"] = made.section
    made.refused = conflicts(made)
    if not made.refused and may(rng, FAULTY):
        path, value = rng.choice(FAULTS)
        put(made.config, path, value)
        made.refused = (path,)
    return made


def may(rng: random.Random, chance: float) -> bool:
    return rng.random() < chance


def put(config: Keys, path: str, value: Any) -> None:
    """Set a dotted key. Sections on its way are made."""
    *sections, last = path.split(".")
    for name in sections:
        if not isinstance(config.get(name), dict):
            config[name] = {}
        config = config[name]
    config[last] = copy.deepcopy(value)


# -- valid values ----------------------------------------------------------------------------------
def optimizer_of(rng: random.Random) -> Trains:
    """An optimizer by the config's words, and by the package's class with the same values."""
    rate = rng.choice([1e-3, 3e-3, 1e-2])
    decay = rng.choice([0.0, 0.1])
    kind = rng.choice(["adam", "adamw", "lion", "sgd", "momentum"])
    if kind in ("adam", "adamw"):
        betas, eps = rng.choice([(0.9, 0.99), (0.8, 0.999)]), rng.choice([1e-8, 1e-6])
        numbers: Keys = {"lr": rate, "betas": betas, "eps": eps, "weight_decay": decay}
        flags: Keys = {}
        if may(rng, 0.4):
            flags["bias_correction"] = rng.choice([True, False])
        if kind == "adam" and may(rng, 0.5):
            flags["adam_w_mode"] = rng.choice([True, False])
        adam = Adam(
            adamw=flags.get("adam_w_mode", True), bias_correction=flags.get("bias_correction", True)
        )
        words = rng.choice(["Adam", "adam"] if kind == "adam" else ["AdamW", "adamw", "ADAMW"])
        return Trains(type=words, hyperparameters=numbers, optimizer=adam, flags=flags)
    if kind == "lion":
        numbers = {"lr": rate / 4, "betas": (0.9, 0.99), "weight_decay": decay}
        return Trains(type="Lion", hyperparameters=numbers, optimizer=Lion())
    numbers = {"lr": rate, "weight_decay": decay}
    if kind == "sgd":
        return Trains(type="SGD", hyperparameters=numbers, optimizer=SGD())
    nesterov = rng.choice([True, False])
    numbers |= {"momentum": 0.9, "nesterov": nesterov}
    sgd = SGD(has_momentum=True, nesterov=nesterov)
    return Trains(type="sgd", hyperparameters=numbers, optimizer=sgd)


def draw_batch(rng: random.Random, made: Drawn) -> None:
    made.accumulation = rng.choice([1, 1, 2, 3])
    sizes = {
        "train_batch_size": BATCH * made.accumulation,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": made.accumulation,
    }
    left_out = rng.choice([*sizes, None])
    if left_out == "gradient_accumulation_steps" or made.accumulation > 1 or left_out is None:
        sizes.pop(left_out or "", None)
    made.config |= sizes
    if may(rng, 0.15):
        made.managed = False
        made.config["managed_gradient_accumulation"] = False


def draw_precision(rng: random.Random, made: Drawn) -> None:
    made.precision = rng.choice(["fp32", "bf16", "bf16", "fp16", "lean"])
    if made.precision in ("bf16", "lean"):
        section: Keys = {"enabled": True}
        if may(rng, 0.5):
            section["check_grad_overflow"] = rng.choice([True, False])
        for key in ("immediate_grad_update", "bf16_master_weights_and_grads"):
            if may(rng, 0.2):
                section[key] = rng.choice([True, False])
        if section.get("bf16_master_weights_and_grads") and may(rng, 0.5):
            section["bf16_optimizer_states"] = True
        made.config[rng.choice(["bf16", "bfloat16"])] = section
        made.section |= {"states": "lean"} if made.precision == "lean" else {}
    if made.precision == "fp16":
        section = {"enabled": True}
        if may(rng, 0.4):
            section["loss_scale"] = rng.choice([128, 100, 1024])
        else:
            section["initial_scale_power"] = rng.choice([8, 12, 30])
            section["loss_scale_window"] = rng.choice([1, 2, 1000])
            section["min_loss_scale"] = rng.choice([1, 4])
            section["hysteresis"] = rng.choice([1, 2])
            section["consecutive_hysteresis"] = rng.choice([True, False])
        if may(rng, 0.2):
            section["auto_cast"] = rng.choice([True, False])
        made.config["fp16"] = section
    if may(rng, 0.2):
        words = {"fp32": "fp32", "bf16": "bf16", "lean": "bfloat16", "fp16": "fp16"}
        put(made.config, "data_types.param_dtype", words[made.precision])
    if may(rng, 0.2):
        put(made.config, "data_types.grad_accum_dtype", rng.choice(["fp32", "bf16"]))


def draw_clipping(rng: random.Random, made: Drawn) -> None:
    clipping = rng.choice([None, 0.0, 0.05, 0.5, 1e4])
    made.clipping = 1.0 if clipping is None else clipping
    if clipping is not None:
        made.config["gradient_clipping"] = clipping


def draw_section(rng: random.Random, made: Drawn, folder: Path) -> None:
    """Our section. Each key is there in some of the configs."""
    section = made.section
    section["device"] = "emulated"
    values: dict[str, tuple[float, list[Any]]] = {
        "enabled": (0.1, [True]),
        "dtypes": (0.2, ["cast"]),
        "gpu_memory": (0.2, [10**9, "2GB", "1.5GiB"]),
        "host_memory": (0.2, [2 * 10**9, "2GB", "2GiB"]),
        "window": (0.6, [1, 2, 3, 64]),
        "activations": (0.6, [*LEVELS, {"recompute": 1, "attention": 1, "keep": 2}]),
        "chunk": (0.3, [1, 3, 4, 64]),
        "streams": (0.2, [1, 2]),
        "loss_chunk": (0.3, [0] if made.model == CAUSAL else [0, 7, 1024]),
        "resident_layers": (0.4, [0, 1, 2, "all"]),
        "resident_updates": (0.4, ["gpu", "host"]),
        "early_layers": (0.5, [0, 1, 3, "all"]),
        "cpu_threads": (0.4, [1, 2, 3]),
        "layers": (0.2, ["model.layers" if made.model == CAUSAL else "blocks"]),
        "trace": (0.1, [str(folder / "trace.json")]),
        "async_checkpoint": (0.1, [True, False]),
        "rank_timeout_s": (0.1, [60, 1.5]),
    }
    for key, (chance, choices) in values.items():
        if may(rng, chance):
            section[key] = rng.choice(choices)
    if may(rng, 0.4):
        emulated = {"poison": rng.choice([True, False]), "jitter_s": rng.choice([0.0, 0.0003])}
        section["emulated"] = {**emulated, "seed": rng.randrange(9)}
    if may(rng, 0.25):
        paths = [str(folder / name) for name in NVME_DIRECTORIES]
        nvme: Keys = {"path": rng.choice([paths[0], paths])}
        if may(rng, 0.7):
            nvme["spill"] = rng.choice(["moments", "masters", "weights"])
        if may(rng, 0.3):
            nvme["capacity"] = "1GB"
        section["nvme"] = nvme
    for key in ("window", "activations", "chunk"):
        if key not in section and may(rng, 0.1):
            section[key] = rng.choice([None, "auto"])


def draw_schedule(rng: random.Random, made: Drawn) -> None:
    if may(rng, 0.5):
        return
    schedules: dict[str, Keys] = {
        "WarmupLR": {"warmup_max_lr": 5e-3, "warmup_num_steps": 3, "warmup_type": "linear"},
        "WarmupDecayLR": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 4e-3},
        "WarmupCosineLR": {"total_num_steps": 6, "warmup_num_steps": 2},
        "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2},
        "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 2},
        "StepLR": {"step_size": 2, "gamma": 0.5},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 4},
    }
    name = rng.choice(list(schedules))
    params = schedules[name]
    if name == "OneCycle":  # it has a momentum cycle for optimizers with betas alone
        params["cycle_momentum"] = False
    made.config["scheduler"] = {"type": name, "params": params}


def draw_offload(rng: random.Random, made: Drawn, folder: Path) -> None:
    if not may(rng, 0.6):
        return
    zero: Keys = {"stage": rng.choice([0, 1, 2, 3])}
    for key in ("offload_optimizer", "offload_param"):
        if may(rng, 0.3):
            zero[key] = {"device": rng.choice(["cpu", "none"]), "pin_memory": True}
    if "nvme" not in made.section and may(rng, 0.2):
        key = rng.choice(["offload_optimizer", "offload_param"])
        zero[key] = {"device": "nvme", "nvme_path": str(folder / NVME_DIRECTORIES[0])}
        if may(rng, 0.5):
            made.config["aio"] = {"queue_depth": 8, "block_size": 1 << 20}
    for key, value in (
        ("overlap_comm", True),
        ("contiguous_gradients", True),
        ("reduce_bucket_size", 10**6),
        ("stage3_prefetch_bucket_size", 10**6),
        ("sub_group_size", 10**8),
        ("round_robin_gradients", True),
    ):
        if may(rng, 0.2):
            zero[key] = value
    made.config["zero_optimization"] = zero


def draw_others(rng: random.Random, made: Drawn, folder: Path) -> None:
    """Keys that are honoured or without effect, and change no bit."""
    others: Keys = {
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "log_level": "warning",
        "dump_state": True,
        "steps_per_print": rng.choice([1, 2]),
        "dataloader_drop_last": True,
        "csv_monitor.enabled": True,
        "optimizer.legacy_fusion": False,
        "torch_autocast.enabled": False,
        "memory_breakdown": True,
        "hybrid_engine.enabled": False,
        "tensor_parallel.autotp_size": 1,
        "expert_parallel.enabled": False,
        "data_efficiency.enabled": False,
        "compile.deepcompile": False,
        "autotuning.enabled": False,
        "communication_data_type": "fp32",
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "disable_allgather": True,
        "activation_checkpointing.partition_activations": True,
        "comms_logger.enabled": False,
        "checkpoint.tag_validation": "Warn",
        "disable_python_gc": False,
        "sequence_parallel_size": 1,
        "pipeline": {},
        "weight_quantization": {},
        "gradient_allreduce_op": "mean",
    }
    for path, value in others.items():
        if may(rng, 0.08):
            put(made.config, path, value)
            if path == "csv_monitor.enabled":
                made.config["csv_monitor"] |= {"output_path": str(folder), "job_name": "job"}


# -- values that must be refused -------------------------------------------------------------------
FAULTS: list[tuple[str, Any]] = [
    ("gradient_clipping", -1.0),
    ("gradient_clipping", "1.0"),
    ("train_micro_batch_size_per_gpu", 0),
    ("train_micro_batch_size_per_gpu", "auto"),
    ("train_batch_size", 7),
    ("gradient_accumulation_steps", 1.5),
    ("optimizer.type", "Adafactor"),
    ("optimizer.type", "OneBitAdam"),
    ("optimizer.params.lr", "1e-3"),
    ("optimizer.params.lr", "auto"),
    ("optimizer.params.lrate", 1e-3),
    ("optimizer.params.weight_decay", -0.1),
    ("scheduler.type", "WarmUpLR"),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_steps": 3}}),
    ("bf16", True),
    ("bf16.enabled", "yes"),
    ("fp16.fp16_master_weights_and_grads", True),
    ("data_types.grad_accum_dtype", "int8"),
    ("data_types.buffer_dtype", "bf16"),
    ("data_types.param_dtype", "int8"),
    ("zero_optimization.stage", 4),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
    ("torch_autocast.enabled", True),
    ("gradient_allreduce_op", "sum"),
    ("hybrid_engine.enabled", True),
    ("pipeline", {"stages": 2}),
    ("tensor_parallel.autotp_size", 2),
    ("sequence_parallel_size", 2),
    ("expert_parallel.enabled", True),
    ("data_efficiency.enabled", True),
    ("weight_quantization", {"quantized_initialization": {"num_bits": 4}}),
    ("compile.deepcompile", True),
    ("amp", {"enabled": True}),
    ("compression_training", {"a": 1}),
    ("curriculum_learning", {"enabled": True}),
    ("elasticity", {"enabled": True}),
    ("progressive_layer_drop", {"enabled": True}),
    ("sparse_attention", {"mode": "fixed"}),
    ("log_level", "loud"),
    ("steps_per_print", -1),
    ("stronghold.windows", 2),
    ("stronghold.window", 0),
    ("stronghold.window", "2"),
    ("stronghold.window", True),
    ("stronghold.activations", "recomputed"),
    ("stronghold.activations", {"keep": 99}),
    ("stronghold.chunk", 0),
    ("stronghold.streams", 0),
    ("stronghold.loss_chunk", -1),
    ("stronghold.resident_layers", "some"),
    ("stronghold.resident_updates", "nvme"),
    ("stronghold.early_layers", -2),
    ("stronghold.states", "leaner"),
    ("stronghold.dtypes", "bf16"),
    ("stronghold.device", "cpu"),
    ("stronghold.gpu_memory", "24G"),
    ("stronghold.gpu_memory", 4096),
    ("stronghold.host_memory", 4096),
    ("stronghold.cpu_threads", 0),
    ("stronghold.layers", "model.blocks"),
    ("stronghold.nvme.spill", "all"),
    ("stronghold.emulated.jitter", 0.1),
    ("stronghold.emulated.link_gbps", 0),
    ("stronghold.rank_timeout_s", 0),
]


# -- pairs of valid values that exclude each other ------------------------------------------------
def _streams_without_chunk(made: Drawn) -> bool:
    return made.section.get("streams", 1) > 1 and not isinstance(made.section.get("chunk"), int)


def _small_masters_without_zero(made: Drawn) -> bool:
    """DeepSpeed refuses it."""
    bf16 = made.config.get("bf16") or made.config.get("bfloat16") or {}
    return bool(bf16.get("bf16_master_weights_and_grads")) and made.stage == 0


CONFLICTS: list[tuple[Callable[[Drawn], bool], str]] = [
    (_streams_without_chunk, "stronghold.streams"),
    (_small_masters_without_zero, "bf16_master_weights_and_grads"),
]


def conflicts(made: Drawn) -> tuple[str, ...]:
    """The keys that a refusal of these valid values names. () if they agree."""
    return tuple(key for is_excluded, key in CONFLICTS if is_excluded(made))
