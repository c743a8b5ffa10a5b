"""The settings of the training loop: DeepSpeed's part of the config, and the optimizer.

`load` reads and checks the whole config. It refuses unsupported keys by name. Defaults, types and
batch arithmetic are those of DeepSpeed's own DeepSpeedConfig, which `load` constructs. The errors
are ours. The training thread enters, once per engine, before any memory is allocated. DeepSpeed is
imported at the first call.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from stronghold.config.keys import (
    BATCH_KEYS,
    BF16,
    FP16,
    FP32,
    ignored_keys,
    refusals,
    unfilled_lines,
    warn_of_misspelt,
)
from stronghold.config.section import StrongholdConfig, parse_section, resolve_nvme
from stronghold.config.source import SECTION, Source, read_config, warn_once
from stronghold.errors import ConfigError, did_you_mean, with_unknown_key_page
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

FP32_POWERS = range(-126, 128)  # of two
# Errors that DeepSpeed raises when it unpacks a section of a wrong form.
_UNPACKING = (TypeError, AttributeError, KeyError)
Precision = Literal["fp32", "bf16", "fp16"]
DTYPE_NAMES: dict[Precision, tuple[str, ...]] = {  # DeepSpeed's spellings
    "fp32": FP32,
    "bf16": BF16,
    "fp16": FP16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The optimizer of one parameter group, and the group's hyper-parameters by torch's names."""

    optimizer: Optimizer
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """A learning-rate schedule by name: one of DeepSpeed's, or of torch.optim.lr_scheduler."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def build(self, optimizer: torch.optim.Optimizer) -> Any:
        """Construct the schedule for `optimizer`. Raises ConfigError if it refuses the params."""
        try:
            return _schedule_class(self.type)(optimizer, **self.params)
        except (TypeError, ValueError, AssertionError, ArithmeticError) as error:
            raise ConfigError(f"scheduler.params of {self.type}: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole config: the user's text, DeepSpeed's reading of it, our section, and the honoured
    DeepSpeed keys with DeepSpeed's defaults filled in.

    gradient_clipping  largest global L2 norm. 0.0: off
    skip_on_overflow   skip a step if its gradient norm is not finite
    managed            false: every step() ends a step, and backwards before it are added up
    optimizer          None: the client brings one, or the engine runs forward alone
    steps_per_print    None: never
    ignored            dotted keys that are without effect
    """

    original: dict[str, Any]
    deepspeed: DeepSpeedConfig
    stronghold: StrongholdConfig
    precision: Precision
    gradient_accumulation_steps: int
    gradient_clipping: float
    skip_on_overflow: bool
    managed: bool
    optimizer: OptimizerSettings | None
    scheduler: SchedulerSettings | None
    steps_per_print: int | None
    ignored: tuple[str, ...]

    def warn_of_ignored(self) -> None:
        """Log the keys that are without effect, once per process."""
        if self.ignored:
            keys = ", ".join(self.ignored)
            warn_once(f"config keys without effect under stronghold: {keys}")

    @property
    def accumulates(self) -> bool:
        """True if gradients of several backwards may be added up."""
        return self.gradient_accumulation_steps > 1 or not self.managed


def load(source: Source, args: object | None = None, world_size: int | None = None) -> Settings:
    """Read and check the whole config.

    source, args  as in `read_config`
    world_size    number of ranks. None: from torch.distributed

    Raises ConfigError with a line for each wrong key.
    """
    original = read_config(source, args)
    section, config = parse_section(original), _without_section(original)
    _raise(refusals(config) + unfilled_lines(config))
    config = {key: value for key, value in config.items() if value != "auto"}
    precision = _precision(config)
    optimizer = settings_from_config(config.get("optimizer"))
    scheduler = _scheduler(config.get("scheduler"))
    deepspeed = _deepspeed_config(config, world_size)
    section = resolve_nvme(section, deepspeed.zero_config)
    _check_states(section, precision)
    warn_of_misspelt(config)
    steps_per_print = config.get("steps_per_print")
    if steps_per_print in (0, math.inf):  # accelerate writes infinity for "never"
        steps_per_print = None
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
        steps_per_print=steps_per_print,
        ignored=ignored_keys(config),
    )


def check_keys(config: Mapping[str, Any]) -> StrongholdConfig:
    """Check the keys of a config before an engine is made, and return our section.

    For frameworks that act on the config earlier than `load`. "auto" is accepted. Raises
    ConfigError if `load` would refuse the keys.
    """
    section = parse_section(config)
    _raise(refusals(_without_section(config)))
    return section


def _without_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's keys that have a value, bf16 under its present name."""
    return {
        {"bfloat16": "bf16"}.get(key, key): value
        for key, value in config.items()
        if key != SECTION and value is not None
    }


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _precision(config: Mapping[str, Any]) -> Precision:
    names: tuple[Precision, ...] = ("bf16", "fp16")
    enabled = [name for name in names if (config.get(name) or {}).get("enabled")]
    if len(enabled) > 1:
        raise ConfigError(
            "fp16.enabled and bf16.enabled are both true, and a model has one dtype. "
            'Set "fp16": {"enabled": false} (bf16 needs no loss scale), or the other way round.'
        )
    precision = enabled[0] if enabled else "fp32"
    wanted = (config.get("data_types") or {}).get("param_dtype")
    if wanted is not None and wanted not in DTYPE_NAMES[precision]:
        raise ConfigError(
            f"data_types.param_dtype: got {wanted!r}, but the config trains in {precision}. "
            "Remove it, or enable the section bf16 or fp16 that it means."
        )
    return precision


def _check_states(section: StrongholdConfig, precision: Precision) -> None:
    """Refuse lean states of weights that are not bf16."""
    if section.states == "lean" and precision != "bf16":
        raise ConfigError(
            f'{SECTION}.states: got "lean", and weights are {precision}: lean states are a layout '
            "of bf16 weights, whose masters are their upper 16 bits and 8 more. Set "
            f'"bf16": {{"enabled": true}}, or {SECTION}.states to "exact".'
        )


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

    deepspeed_names = lr_schedules.VALID_LR_SCHEDULES
    torch_names = torch.optim.lr_scheduler.__all__
    if name in deepspeed_names:
        return getattr(lr_schedules, name)  # type: ignore[no-any-return]
    if name in torch_names:
        return getattr(torch.optim.lr_scheduler, name)  # type: ignore[no-any-return]
    hint = did_you_mean(name, [*deepspeed_names, *torch_names])
    hint = hint or f" DeepSpeed's are {', '.join(deepspeed_names)}."
    raise ConfigError(f'scheduler.type: unknown schedule "{name}".{hint}')


def _set_batch_sizes(deepspeed: DeepSpeedConfig, config: Mapping[str, Any], ranks: int) -> None:
    """Derive all of BATCH_KEYS from those in the config, by DeepSpeed's own rules."""
    deepspeed.world_size = ranks
    given = {key: config.get(key) for key in BATCH_KEYS}
    if given["train_batch_size"] is None and given["train_micro_batch_size_per_gpu"] is None:
        raise ConfigError(
            'no batch size: add "train_micro_batch_size_per_gpu": 1 (or "train_batch_size").'
        )
    for key, size in given.items():
        setattr(deepspeed, key, None if size is None else int(size))
    try:
        deepspeed._configure_train_batch_size()
    except AssertionError as error:
        named = ", ".join(f"{key} {size}" for key, size in given.items() if size is not None)
        raise ConfigError(
            f"batch sizes do not multiply out: {named}, on {ranks} rank{'s' * (ranks > 1)}: "
            f"{error}. Change one of them."
        ) from error


def _num_ranks() -> int:
    from deepspeed import comm

    return int(comm.get_world_size()) if comm.is_initialized() else 1


def _deepspeed_config(config: dict[str, Any], world_size: int | None) -> DeepSpeedConfig:
    """DeepSpeed's reading of the config, for `world_size` ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # DeepSpeed asks torch.distributed for the ranks, which may not run yet. Without batch sizes but
    # this one its config does not depend on them.
    read = {key: value for key, value in config.items() if key not in BATCH_KEYS}
    read["train_micro_batch_size_per_gpu"] = 1
    try:
        deepspeed = DeepSpeedConfig(read)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    except (DeepSpeedConfigError, ValueError, AssertionError, *_UNPACKING) as error:
        refusal: type[Exception] = ConfigError
        if isinstance(error, DeepSpeedConfigError):  # programs catch this class
            refusal = type("ConfigError", (ConfigError, DeepSpeedConfigError), {})
        raise refusal(f"DeepSpeed refuses the config: {type(error).__name__}: {error}") from error
    deepspeed.grad_accum_dtype = "fp32"  # whichever the config has
    _set_batch_sizes(deepspeed, config, _num_ranks() if world_size is None else world_size)
    read.update({key: getattr(deepspeed, key) for key in BATCH_KEYS})  # it keeps and prints this
    power = deepspeed.float16_config.initial_scale_power
    if power not in FP32_POWERS:
        raise ConfigError(
            f"fp16.initial_scale_power: got {power}, expected {FP32_POWERS[0]} to "
            f"{FP32_POWERS[-1]}: the loss is multiplied by 2**{power}, which fp32 cannot hold. "
            "Remove it for DeepSpeed's 16."
        )
    return deepspeed


# The title of a pydantic error is DeepSpeed's class. The user knows the section's name instead.
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
        steps = [str(step) for step in (section, *detail["loc"])]
        key = ".".join(step for step in steps if step)
        if detail["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key. Remove it: DeepSpeed does not know it.")
        else:
            lines.append(f"{key}: got {detail['input']!r}. {detail['msg']}.")
    return with_unknown_key_page("\n".join(lines))


# -- the optimizer --------------------------------------------------------------------------------
def _usable_types() -> str:
    return listed((f'"{word}"' for word in known_types()), "or")


def settings_from_config(optimizer: object) -> OptimizerSettings | None:
    """Read the `optimizer` section by DeepSpeed's rules. None if there is none.

    Raises ConfigError with a line for each wrong key.
    """
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
    problems = [cls.wrong_param(key, value) for key, value in present.items()]
    _raise([line for line in problems if line])
    configured, hyperparameters = cls.from_params(name.lower(), present)
    return OptimizerSettings(optimizer=configured, hyperparameters=hyperparameters)


def settings_from_client_optimizer(optimizer: object) -> tuple[OptimizerSettings, ...]:
    """Read the settings of each parameter group of a client's optimizer, in order.

    The object may be of a subclass that inherits its `step`. Raises ConfigError for a class that no
    optimizer of stronghold computes, and for refused hyper-parameters.
    """
    client = type(optimizer)
    known = optimizer_of_class(client)
    if known is None:
        name = f"{client.__module__}.{client.__qualname__}"
        is_small = name.startswith(("bitsandbytes.", "torchao.")) or "Adafactor" in name
        lean = 'For less memory set "stronghold": {"states": "lean"}: 8-bit moments. '
        raise ConfigError(
            f"optimizer: {name} cannot run on the CPU here. {lean if is_small else ''}"
            f"Pass {listed(known_classes(), 'or')}, or leave the optimizer out and set "
            f'"optimizer": {{"type": ...}} in the config to {_usable_types()}. Of the Trainer\'s '
            'optim= "adamw_torch", "adamw_torch_fused" and "sgd" work.'
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
    """Read the settings of one group of `model_parameters`.

    The group's key "optimizer" names its optimizer, else the config does. A hyper-parameter is the
    group's, else the config's of the same name, else the optimizer's default. Raises ConfigError
    with a line for each wrong key, which begins with `where`.
    """
    word = group.get("optimizer")
    if word is None:
        return configured
    cls = optimizer_of_type(word) if isinstance(word, str) else None
    if cls is None:
        raise ConfigError(f"{where}.optimizer: got {word!r}, expected {_usable_types()}.")
    params = {key: configured.hyperparameters.get(key) for key in cls.defaults}
    known = {*cls.expected, *cls.params, *cls.fixed}
    params.update({key: value for key, value in group.items() if key in known})
    present = {key: value for key, value in params.items() if value is not None}
    problems = [cls.wrong_param(key, value) for key, value in present.items()]
    _raise([line.replace("optimizer.params", where) for line in problems if line])
    optimizer, hyperparameters = cls.from_params(word.lower(), present)
    return OptimizerSettings(optimizer=optimizer, hyperparameters=hyperparameters)
