"""The training loop's settings: the DeepSpeed part of the config, and the optimizer, which the
config names or the client brings. `load` reads all of it. It refuses by name what cannot be run.

Defaults, types and batch arithmetic are those of DeepSpeed's own DeepSpeedConfig, which is made
here; the errors are ours. Called in the training thread, once per engine, before anything is
allocated. DeepSpeed is imported at the first call.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from stronghold.config.keys import (
    BATCH_KEYS,
    BF16_STATES,
    FP32,
    ignored_keys,
    refusals,
    unfilled_lines,
    warn_of_misspelt,
)
from stronghold.config.section import StrongholdConfig, parse_section, resolve_nvme
from stronghold.config.source import SECTION, Source, check_key_types, read_config, warn_once
from stronghold.errors import ConfigError, did_you_mean
from stronghold.optim import (
    Optimizer,
    examples,
    known_classes,
    known_types,
    listed,
    optimizer_of_class,
    optimizer_of_type,
)

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

logger = logging.getLogger("stronghold")

FP32_POWERS = range(-126, 128)  # of two
_UNPACKING = (
    TypeError,
    AttributeError,
    KeyError,
)  # what DeepSpeed meets in a section of another form
Precision = Literal["fp32", "bf16", "fp16"]
DTYPE_NAMES: dict[Precision, tuple[str, ...]] = {  # DeepSpeed's spellings
    "fp32": FP32,
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Of one parameter group: how it is updated, and its hyper-parameters as a live group has
    them."""

    optimizer: Optimizer
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """A learning-rate schedule by name: one of DeepSpeed's, or of torch.optim.lr_scheduler."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def build(self, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule, attached to `optimizer`. Raises ConfigError where it refuses the params."""
        try:
            return _schedule_class(self.type)(optimizer, **self.params)
        except (TypeError, ValueError, AssertionError, ArithmeticError) as error:
            raise ConfigError(f"scheduler.params of {self.type}: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that was read: the user's words, DeepSpeed's reading of them, our section, and the
    DeepSpeed keys that are honoured, with DeepSpeed's defaults filled in."""

    original: dict[str, Any]
    deepspeed: DeepSpeedConfig
    stronghold: StrongholdConfig
    precision: Precision
    gradient_accumulation_steps: int
    gradient_clipping: float  # global L2 norm; 0.0 is off
    # Whether a step is skipped if its gradient norm, known in time, is not finite.
    skip_on_overflow: bool
    managed: bool  # false: every step() ends a step, and backwards before it are added up
    optimizer: OptimizerSettings | None  # None: the client's, or forward only
    scheduler: SchedulerSettings | None
    steps_per_print: int | None  # None: never
    ignored: tuple[str, ...]  # dotted keys that are without effect

    def warn_of_ignored(self) -> None:
        """Log the keys that are without effect; once in a process."""
        if self.ignored:
            keys = ", ".join(self.ignored)
            warn_once(f"config keys without effect under stronghold: {keys}")

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several backwards may be added up."""
        return self.gradient_accumulation_steps > 1 or not self.managed


def load(
    source: Source, args: object | None = None, world_size: int | None = None, mpu: Any = None
) -> Settings:
    """Reads and checks the whole config, for `world_size` data-parallel ranks (None: as
    torch.distributed says). ConfigError, a line for each key that is wrong."""
    original = read_config(source, args)
    check_key_types(original)
    section = parse_section(original)
    config = {key: value for key, value in original.items() if key != SECTION and value is not None}
    _raise(refusals(config) + unfilled_lines(config))
    config = {key: value for key, value in config.items() if value != "auto"}
    precision = _precision(config)
    optimizer = settings_from_config(config.get("optimizer"))
    scheduler = _scheduler(config.get("scheduler"))
    _check_log_level(config.get("log_level"))
    deepspeed = _deepspeed_config(config, world_size, mpu)
    section = resolve_nvme(section, deepspeed.zero_config, config.get("aio"))
    _check_states(section, precision, config.get("bf16") or config.get("bfloat16") or {})
    warn_of_misspelt(config)
    steps_per_print = config.get("steps_per_print")  # infinity is how accelerate says never
    return Settings(
        original=original,
        deepspeed=deepspeed,
        stronghold=section,
        precision=precision,
        gradient_accumulation_steps=deepspeed.gradient_accumulation_steps,
        gradient_clipping=float(config.get("gradient_clipping", deepspeed.gradient_clipping)),
        skip_on_overflow=precision != "bf16" or bool(deepspeed.bfloat16_config.check_grad_overflow),
        managed=bool(deepspeed.managed_gradient_accumulation),
        optimizer=optimizer,
        scheduler=scheduler,
        steps_per_print=None if steps_per_print in (None, 0, math.inf) else steps_per_print,
        ignored=(*ignored_keys(config), *_ignored_of(section)),
    )


def _ignored_of(section: StrongholdConfig) -> tuple[str, ...]:
    """Dotted keys of the section that are without effect."""
    return () if section.deferred_layers is None else (f"{SECTION}.deferred_layers",)


def check_keys(config: Mapping[str, Any]) -> StrongholdConfig:
    """The section, unless `load` would refuse the config by its keys alone; "auto" may be there:
    for programs whose framework acts on the config before an engine is made."""
    check_key_types(config)
    section = parse_section(config)
    _raise(refusals({k: v for k, v in config.items() if k != SECTION and v is not None}))
    return section


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _precision(config: Mapping[str, Any]) -> Precision:
    sections = (config.get("bf16") or config.get("bfloat16") or {}, config.get("fp16") or {})
    bf16, fp16 = (bool(section.get("enabled")) for section in sections)
    if bf16 and fp16:
        raise ConfigError(
            "fp16.enabled and bf16.enabled are both true, and a model has one dtype. "
            'Set "fp16": {"enabled": false} (bf16 needs no loss scale), or the other way round.'
        )
    precision: Precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    wanted = (config.get("data_types") or {}).get("param_dtype")
    if wanted is not None and wanted not in DTYPE_NAMES[precision]:
        raise ConfigError(
            f"data_types.param_dtype: got {wanted!r}, but the config trains in {precision}. "
            "Remove it, or enable the section bf16 or fp16 that it means."
        )
    return precision


def _check_states(section: StrongholdConfig, precision: Precision, bf16: Mapping[str, Any]) -> None:
    """Refuses lean states of other weights; says what meets DeepSpeed's own words for states."""
    if section.states == "lean" and precision != "bf16":
        raise ConfigError(
            f'{SECTION}.states: got "lean", and weights are {precision}: lean states are a layout '
            "of bf16 weights, whose masters are their upper 16 bits and 8 more. Set "
            f'"bf16": {{"enabled": true}}, or {SECTION}.states to "exact".'
        )
    for key, met in BF16_STATES.items():
        if bf16.get(key) is True:
            logger.info(
                'bf16.%s: met by %s (%s.states "%s")',
                key,
                met[section.states],
                SECTION,
                section.states,
            )


def _check_log_level(value: object) -> None:
    from deepspeed.utils.logging import log_levels

    if value is not None and not (isinstance(value, str) and value.lower() in log_levels):
        words = ", ".join(f'"{word}"' for word in log_levels)
        raise ConfigError(f"log_level: got {value!r}, expected one of {words}.")


def _scheduler(section: Any) -> SchedulerSettings | None:
    if not section:
        return None
    name, params = section.get("type"), section.get("params") or {}
    if not isinstance(name, str):
        raise ConfigError(
            f'scheduler.type: got {name!r}, expected the name of a schedule such as "WarmupLR".'
        )
    accepted = {**inspect.signature(_schedule_class(name)).parameters}
    accepted.pop("optimizer", None)
    problems = []
    for key in params:
        if key not in accepted:
            hint = did_you_mean(key, accepted) or f" {name} takes: {', '.join(accepted)}."
            problems.append(f"scheduler.params.{key}: unknown parameter of {name}.{hint}")
    for key, parameter in accepted.items():
        if parameter.default is parameter.empty and key not in params:
            problems.append(f"scheduler.params.{key}: missing, and {name} needs it.")
    _raise(problems)
    return SchedulerSettings(type=name, params=dict(params))


def _schedule_class(name: str) -> type:
    import torch
    from deepspeed.runtime import lr_schedules

    theirs, torchs = lr_schedules.VALID_LR_SCHEDULES, torch.optim.lr_scheduler.__all__
    for module, names in ((lr_schedules, theirs), (torch.optim.lr_scheduler, torchs)):
        if name in names:
            return getattr(module, name)  # type: ignore[no-any-return]
    hint = did_you_mean(name, [*theirs, *torchs]) or f" DeepSpeed's are {', '.join(theirs)}."
    raise ConfigError(f'scheduler.type: unknown schedule "{name}".{hint}')


def _batch_sizes(config: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """All of BATCH_KEYS from those that are given, by DeepSpeed's rules."""
    sizes: list[Any] = [config.get(key) for key in BATCH_KEYS]
    total, micro, steps = sizes
    if total is None and micro is None:
        raise ConfigError(
            'no batch size: add "train_micro_batch_size_per_gpu": 1 (or "train_batch_size").'
        )
    if steps is None:
        steps = total // (micro * ranks) if total and micro else 1
    if micro is None:
        micro = total // (steps * ranks)
    if total is None:
        total = micro * steps * ranks
    if total != micro * steps * ranks or not micro or not steps:
        given = ", ".join(f"{k} {config[k]}" for k in BATCH_KEYS if config.get(k) is not None)
        divisor = ranks * (sizes[1] or 1) * (sizes[2] or 1)
        raise ConfigError(
            f"batch sizes do not multiply out: {given}, on {ranks} rank{'s' if ranks > 1 else ''}; "
            "train_batch_size must be train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps x ranks, and {total} != {micro} x {steps} x {ranks}. Set "
            f'"train_batch_size": {divisor * max(1, total // divisor)}, or change the others.'
        )
    return dict(zip(BATCH_KEYS, (total, micro, steps), strict=True))


def _ranks(mpu: Any) -> int:
    from deepspeed import comm

    if not comm.is_initialized():
        return 1
    if mpu is None:
        return int(comm.get_world_size())
    count = getattr(mpu, "get_data_parallel_world_size", None)
    if count is None:  # DeepSpeed then takes it for sequence parallelism
        raise ConfigError(
            "mpu: has no get_data_parallel_world_size; pass none, or one that has it."
        )
    return int(count())


def _deepspeed_config(config: dict[str, Any], world_size: int | None, mpu: Any) -> DeepSpeedConfig:
    """DeepSpeed's reading of the config, for `world_size` data-parallel ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    ranks = _ranks(mpu) if world_size is None else world_size
    batch = _batch_sizes(config, ranks)
    # DeepSpeed asks torch.distributed for the ranks, and it may not run yet: give it what does not
    # depend on them.
    without_total = {**config, **batch}
    del without_total["train_batch_size"]
    try:
        deepspeed = DeepSpeedConfig(without_total, mpu)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    except (DeepSpeedConfigError, ValueError, AssertionError, *_UNPACKING) as error:
        refusal: type[Exception] = ConfigError
        if isinstance(error, DeepSpeedConfigError):  # programs catch that
            refusal = type("ConfigError", (ConfigError, DeepSpeedConfigError), {})
        raise refusal(f"DeepSpeed refuses the config: {type(error).__name__}: {error}") from error
    power = deepspeed.float16_config.initial_scale_power
    if power not in FP32_POWERS:
        raise ConfigError(
            f"fp16.initial_scale_power: got {power}, expected {FP32_POWERS[0]} to "
            f"{FP32_POWERS[-1]}: the loss is multiplied by 2**{power}, which fp32 does not have. "
            "Remove it for DeepSpeed's 16."
        )
    deepspeed.world_size = ranks
    deepspeed.train_batch_size = batch["train_batch_size"]
    return deepspeed


# The title of a pydantic error is the class of DeepSpeed's that refused; users know the section.
_SECTION_OF_CLASS = {
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedZeroConfig": "zero_optimization",
    "CompileConfig": "compile",
    "HybridEngineConfig": "hybrid_engine",
    "DeepSpeedMonitorConfig": "",
}


def _explain(error: ValidationError) -> str:
    section = _SECTION_OF_CLASS.get(error.title, error.title)
    lines = []
    for detail in error.errors(include_url=False):
        key = ".".join(str(part) for part in (section, *detail["loc"]) if part != "")
        if detail["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key.{_hint(error.title, str(detail['loc'][-1]))}")
        else:
            lines.append(f"{key}: got {detail['input']!r}. {detail['msg']}.")
    return "\n".join(lines)


def _hint(title: str, key: str) -> str:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    precisions = precision_config.DeepSpeedBF16Config, precision_config.DeepSpeedFP16Config
    model = {cls.__name__: cls for cls in (*precisions, DeepSpeedZeroConfig)}.get(title)
    fields = {} if model is None else model.model_fields
    known = [field.alias or name for name, field in fields.items()]
    return did_you_mean(key, known) or " Remove it: DeepSpeed does not know it."


# -- the optimizer --------------------------------------------------------------------------------
def _usable_types() -> str:
    return listed((f'"{word}"' for word in known_types()), "or")


def settings_from_config(optimizer: object) -> OptimizerSettings | None:
    """The `optimizer` section by DeepSpeed's rules. None where there is none. ConfigError names
    every wrong key."""
    if optimizer is None or optimizer == {}:
        return None
    if not isinstance(optimizer, Mapping):
        raise ConfigError(
            f"optimizer: got {optimizer!r}, expected an object such as "
            f"{json.dumps(next(iter(examples().values())))}."
        )
    name, params = optimizer.get("type"), optimizer.get("params")
    if not isinstance(name, str):
        raise ConfigError(f"optimizer.type: got {name!r}, expected one of {_usable_types()}.")
    cls = optimizer_of_type(name)
    if cls is None:
        raise ConfigError(
            f'optimizer.type: got "{name}", which cannot run on the CPU here; expected '
            f"{_usable_types()}.{did_you_mean(name.lower(), known_types())} Set the type, and "
            "adjust params.lr."
        )
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise ConfigError(
            f'optimizer.params: got {params!r}, expected an object such as {{"lr": 1e-4}}.'
        )
    present = {key: value for key, value in params.items() if value is not None}
    _raise([line for key, value in present.items() if (line := cls.wrong_param(key, value))])
    made, hyperparameters = cls.from_params(name.lower(), present)
    return OptimizerSettings(optimizer=made, hyperparameters=hyperparameters)


def settings_from_client_optimizer(optimizer: object) -> tuple[OptimizerSettings, ...]:
    """How each of a client optimizer's parameter groups is updated, in their order. The object may
    be of a subclass that inherits its `step`. ConfigError for a class that computes what no
    optimizer here does, and for hyper-parameters that are refused."""
    client = type(optimizer)
    known = optimizer_of_class(client)
    if known is None:
        raise ConfigError(
            f"optimizer: {client.__module__}.{client.__qualname__} cannot run on the CPU here. "
            f"Pass {listed(known_classes(), 'or')}, or leave the optimizer out and set "
            f'"optimizer": {{"type": ...}} in the config to {_usable_types()}.'
        )
    cls, base = known
    groups: list[dict[str, Any]] = optimizer.param_groups  # type: ignore[attr-defined]
    for index, group in enumerate(groups):
        _raise(cls.problems(group, f"optimizer.param_groups[{index}]"))
    return tuple(
        OptimizerSettings(
            optimizer=cls.from_group(optimizer, base, group),
            hyperparameters=cls.hyperparameters(group),
        )
        for group in groups
    )


def settings_of_group(
    group: Mapping[str, Any], configured: OptimizerSettings, where: str
) -> OptimizerSettings:
    """How one group of `model_parameters` is updated: as its key "optimizer" names it, else as the
    config does. A hyper-parameter is the group's, else the config's under the same name, else the
    optimizer's default. ConfigError names what is wrong, at `where`."""
    word = group.get("optimizer")
    if word is None:
        return configured
    cls = optimizer_of_type(word) if isinstance(word, str) else None
    if cls is None:
        raise ConfigError(f"{where}.optimizer: got {word!r}, expected {_usable_types()}.")
    shared = {key: configured.hyperparameters.get(key) for key in cls.defaults}
    known = {*cls.expected, *cls.params, *cls.fixed}
    params = {**shared, **{key: value for key, value in group.items() if key in known}}
    present = {key: value for key, value in params.items() if value is not None}
    wrong = [cls.wrong_param(key, value) for key, value in present.items()]
    _raise([line.replace("optimizer.params", where) for line in wrong if line])
    made, hyperparameters = cls.from_params(word.lower(), present)
    return OptimizerSettings(optimizer=made, hyperparameters=hyperparameters)
