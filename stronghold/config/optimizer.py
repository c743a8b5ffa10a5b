"""Which optimizer, by the config or the client's object: Adam and AdamW, others refused.

Owns the reading of hyper-parameters, never the arithmetic. What cannot be run is refused by name;
nothing is ever swapped for something else silently. Called in the training thread, while an engine
is built.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stronghold.errors import ConfigError, did_you_mean

logger = logging.getLogger("stronghold")

SUPPORTED = "Adam and AdamW"
TORCH_ADAMW_WEIGHT_DECAY = 1e-2  # its default; DeepSpeed's own classes default to 0
# Keys of optimizer.params that change how torch computes, not what.
WITHOUT_EFFECT = frozenset({"foreach", "fused", "capturable", "set_grad_none"})
# Keys whose one acceptable value is what our kernel does, with the reason for refusing the other.
FIXED: dict[str, tuple[bool, str]] = {
    "amsgrad": (False, "the CPU kernel has no AMSGrad; set it to false or remove it"),
    "maximize": (False, "the CPU kernel minimizes; set it to false, and negate the loss"),
    "differentiable": (False, "the update runs outside autograd; set it to false or remove it"),
    "fp32_optimizer_states": (True, "the moments are kept in fp32; set it to true or remove it"),
}
# Known optimizer classes by where they come from, so that none of these packages has to be
# imported.
KNOWN_CLASSES = {
    ("torch", "Adam"),
    ("torch", "AdamW"),
    ("deepspeed", "DeepSpeedCPUAdam"),
    ("deepspeed", "FusedAdam"),
    ("apex", "FusedAdam"),
    ("stronghold", "CPUAdam"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Hyper-parameters of one parameter group.

    `adamw`: the decay is decoupled from the gradient; otherwise it is added to it (L2).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw: bool = True
    bias_correction: bool = True


def settings_from_config(optimizer: object) -> AdamSettings | None:
    """The `optimizer` section by DeepSpeed's rules; None where there is none.

    "Adam" means AdamW unless params.adam_w_mode is false, "AdamW" means AdamW whatever adam_w_mode
    says, and `torch_adam` brings torch's default weight decay. Raises one ConfigError with every
    wrong key.
    """
    if optimizer is None or optimizer == {}:
        return None
    if not isinstance(optimizer, Mapping):
        raise ConfigError(
            f'optimizer: got {optimizer!r}, expected {{"type": "AdamW", "params": {{"lr": 1e-4}}}}.'
        )
    name, params = optimizer.get("type"), optimizer.get("params")
    if not isinstance(name, str):
        raise ConfigError(f'optimizer.type: got {name!r}, expected "Adam" or "AdamW".')
    if name.lower() not in ("adam", "adamw"):
        raise ConfigError(
            f'optimizer.type: got "{name}", which cannot run on the CPU here; {SUPPORTED} can. '
            'Set "optimizer": {"type": "AdamW", ...} and adjust params.lr.'
        )
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise ConfigError(
            f'optimizer.params: got {params!r}, expected an object such as {{"lr": 1e-4}}.'
        )
    present = {key: value for key, value in params.items() if value is not None}
    return _settings_from_params(name.lower(), present)


def settings_from_client_optimizer(optimizer: object) -> tuple[AdamSettings, ...]:
    """The hyper-parameters of each of the optimizer's parameter groups, in their order.

    Accepts torch's Adam and AdamW (whatever foreach, fused or capturable say), DeepSpeedCPUAdam,
    FusedAdam and stronghold.CPUAdam, and subclasses that inherit their `step`. Raises ConfigError
    for every other class, and for amsgrad, maximize or differentiable.
    """
    known = _known_base(type(optimizer))
    if known is None:
        raise ConfigError(
            f"optimizer: {_class_name(type(optimizer))} cannot run on the CPU here; {SUPPORTED} "
            "can. Pass torch.optim.AdamW, torch.optim.Adam, DeepSpeedCPUAdam, FusedAdam or "
            "stronghold.CPUAdam, or leave the "
            'optimizer out and set "optimizer": {"type": "AdamW", ...} in the config.'
        )
    groups: list[dict[str, Any]] = optimizer.param_groups  # type: ignore[attr-defined]
    return tuple(
        _settings_of_group(optimizer, known, index, group) for index, group in enumerate(groups)
    )


def _settings_from_params(name: str, params: Mapping[str, Any]) -> AdamSettings:
    problems: list[str] = []
    if "max_grad_norm" in params:
        problems.append(
            "optimizer.params.max_grad_norm: not an optimizer parameter. Remove it and set the "
            "top-level "
            f'"gradient_clipping": {params["max_grad_norm"]!r}.'
        )
    flags = {"adam_w_mode": True, "torch_adam": False, "bias_correction": True}
    numbers = {"lr": AdamSettings().lr, "eps": AdamSettings().eps, "weight_decay": 0.0}
    for key in flags:
        flags[key] = _boolean(f"optimizer.params.{key}", params.get(key, flags[key]), problems)
    adamw = name == "adamw" or flags["adam_w_mode"]
    if name == "adamw" and not flags["adam_w_mode"]:
        logger.warning(
            'optimizer.params.adam_w_mode is without effect: type "AdamW" is always AdamW, as in '
            "DeepSpeed"
        )
    if flags["torch_adam"] and adamw:
        numbers["weight_decay"] = TORCH_ADAMW_WEIGHT_DECAY
    for key in numbers:
        numbers[key] = _number(f"optimizer.params.{key}", params.get(key, numbers[key]), problems)
    betas = _betas("optimizer.params.betas", params.get("betas", AdamSettings().betas), problems)
    known = {*flags, *numbers, "betas", "max_grad_norm", *WITHOUT_EFFECT, *FIXED}
    for key, value in params.items():
        if key in FIXED and value is not FIXED[key][0]:
            problems.append(f"optimizer.params.{key}: got {value!r}; {FIXED[key][1]}.")
        elif key not in known:
            usable = sorted(known - {"max_grad_norm"})
            hint = did_you_mean(key, usable) or f" Known: {', '.join(usable)}."
            problems.append(f"optimizer.params.{key}: unknown parameter.{hint}")
    if problems:
        raise ConfigError("\n".join(problems))
    return AdamSettings(
        lr=numbers["lr"],
        betas=betas,
        eps=numbers["eps"],
        weight_decay=numbers["weight_decay"],
        adamw=adamw,
        bias_correction=flags["bias_correction"],
    )


def _boolean(key: str, value: object, problems: list[str]) -> bool:
    if not isinstance(value, bool):
        problems.append(f"{key}: got {value!r}, expected true or false.")
        return False
    return value


def _number(key: str, value: object, problems: list[str]) -> float:
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    ):
        return float(value)
    hint = ""
    if isinstance(value, str):
        hint = (
            " Fill it in: nobody replaced it." if value == "auto" else " Write it without quotes."
        )
    problems.append(f"{key}: got {value!r}, expected a number >= 0.{hint}")
    return 0.0


def _betas(key: str, value: object, problems: list[str]) -> tuple[float, float]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        first, second = value
        if all(
            isinstance(b, (int, float)) and not isinstance(b, bool) and 0 <= b < 1 for b in value
        ):
            return float(first), float(second)
    problems.append(f"{key}: got {value!r}, expected two numbers in [0, 1), such as [0.9, 0.999].")
    return AdamSettings().betas


def _known_base(cls: type) -> type | None:
    """The class of the table that `cls` is, or inherits its `step` from."""
    for base in cls.__mro__:
        if (base.__module__.partition(".")[0], base.__name__) in KNOWN_CLASSES:
            # torch wraps a class's step for its profiler when the first object is made: compare
            # what is inside.
            step, own = inspect.unwrap(base.step), inspect.unwrap(cls.step)  # type: ignore[attr-defined]
            return base if step is own else None
    return None


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _settings_of_group(
    optimizer: object, known: type, index: int, group: Mapping[str, Any]
) -> AdamSettings:
    problems: list[str] = []
    where = f"optimizer.param_groups[{index}]"
    for key in ("amsgrad", "maximize", "differentiable"):
        if group.get(key):
            problems.append(f"{where}: {key} is on; {FIXED[key][1]}.")
    default = AdamSettings()
    # With capturable, torch may hold the learning rate and betas as tensors.
    betas = [float(beta) for beta in group["betas"]]
    settings = AdamSettings(
        lr=_number(f"{where}: lr", float(group["lr"]), problems),
        betas=_betas(f"{where}: betas", betas, problems),
        eps=_number(f"{where}: eps", float(group.get("eps", default.eps)), problems),
        weight_decay=_number(
            f"{where}: weight_decay", float(group.get("weight_decay", 0.0)), problems
        ),
        adamw=_is_adamw(optimizer, known, group),
        bias_correction=bool(group.get("bias_correction", default.bias_correction)),
    )
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _is_adamw(optimizer: object, known: type, group: Mapping[str, Any]) -> bool:
    """Whether the group's decay is decoupled, in the words of whoever made the optimizer."""
    for key in ("decoupled_weight_decay", "adamw", "adamw_mode", "adam_w_mode"):
        if key in group:
            return bool(group[key])
    for name in ("adam_w_mode", "adamw_mode", "adamw"):
        mode = getattr(optimizer, name, None)
        if mode is not None:
            return bool(mode)
    return known.__name__ == "AdamW"
