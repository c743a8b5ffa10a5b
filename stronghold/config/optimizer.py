"""Which optimizer, by the config or the client's object: Adam and AdamW, others refused.

Owns the reading of hyper-parameters, never the arithmetic. What cannot be run is refused by name;
nothing is ever swapped for something else silently. Called in the training thread, while an engine
is built.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stronghold.config.keys import BETAS, BOOLEAN, NUMBER, wrong
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
    "fp32_optimizer_states": (
        True,
        "moments are kept in fp32; set it to true or remove it (smaller ones are "
        'stronghold.states: "lean")',
    ),
}
KINDS = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), NUMBER),
    **dict.fromkeys(("adam_w_mode", "torch_adam", "bias_correction"), BOOLEAN),
    "betas": BETAS,
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
    problems = [line for key, value in present.items() if (line := _wrong_parameter(key, value))]
    if problems:
        raise ConfigError("\n".join(problems))
    always = name.lower() == "adamw"
    mode = present.get("adam_w_mode", True)
    if always and not mode:
        logger.warning(
            'optimizer.params.adam_w_mode is without effect: type "AdamW" is always AdamW, as in '
            "DeepSpeed"
        )
    if present.get("torch_adam") and (always or mode):
        present.setdefault("weight_decay", TORCH_ADAMW_WEIGHT_DECAY)
    return _settings(present, adamw=always or mode)


def _wrong_parameter(key: str, value: Any) -> str | None:
    dotted = f"optimizer.params.{key}"
    if key == "max_grad_norm":
        return (
            f"{dotted}: not an optimizer parameter. Remove it and set the top-level "
            f'"gradient_clipping": {value!r}.'
        )
    if key in FIXED:
        expected, reason = FIXED[key]
        return None if value is expected else f"{dotted}: got {value!r}; {reason}."
    if key in KINDS:
        return wrong(dotted, value, KINDS[key])
    if key in WITHOUT_EFFECT:
        return None
    usable = sorted({*KINDS, *WITHOUT_EFFECT, *FIXED})
    hint = did_you_mean(key, usable) or f" Known: {', '.join(usable)}."
    return f"{dotted}: unknown parameter.{hint}"


def _settings(group: Mapping[str, Any], *, adamw: bool) -> AdamSettings:
    default = AdamSettings()
    first, second = group.get("betas", default.betas)
    return AdamSettings(
        lr=float(group.get("lr", default.lr)),
        betas=(float(first), float(second)),  # with capturable, torch may hold them as tensors
        eps=float(group.get("eps", default.eps)),
        weight_decay=float(group.get("weight_decay", default.weight_decay)),
        adamw=adamw,
        bias_correction=bool(group.get("bias_correction", default.bias_correction)),
    )


def settings_from_client_optimizer(optimizer: object) -> tuple[AdamSettings, ...]:
    """The hyper-parameters of each of the optimizer's parameter groups, in their order.

    Accepts torch's Adam and AdamW (whatever foreach, fused or capturable say), DeepSpeedCPUAdam,
    FusedAdam and stronghold.CPUAdam, and subclasses that inherit their `step`. Raises ConfigError
    for every other class, and for amsgrad, maximize or differentiable.
    """
    cls = type(optimizer)
    known = _known_base(cls)
    if known is None:
        raise ConfigError(
            f"optimizer: {cls.__module__}.{cls.__qualname__} cannot run on the CPU here; "
            f"{SUPPORTED} can. Pass torch.optim.AdamW, torch.optim.Adam, DeepSpeedCPUAdam, "
            "FusedAdam or stronghold.CPUAdam, or leave the optimizer out and set "
            '"optimizer": {"type": "AdamW", ...} in the config.'
        )
    groups: list[dict[str, Any]] = optimizer.param_groups  # type: ignore[attr-defined]
    found = []
    for index, group in enumerate(groups):
        where = f"optimizer.param_groups[{index}]"
        settings = _settings(group, adamw=_is_adamw(optimizer, known, group))
        problems = [
            f"{where}: {key} is on; {FIXED[key][1]}."
            for key in ("amsgrad", "maximize", "differentiable")
            if group.get(key)
        ]
        for key in ("lr", "betas", "eps", "weight_decay"):
            problems += filter(None, [wrong(f"{where}: {key}", getattr(settings, key), KINDS[key])])
        if problems:
            raise ConfigError("\n".join(problems))
        found.append(settings)
    return tuple(found)


def _known_base(cls: type) -> type | None:
    """The class of the table that `cls` is, or inherits its `step` from."""
    for base in cls.__mro__:
        if (base.__module__.partition(".")[0], base.__name__) in KNOWN_CLASSES:
            # torch wraps a class's step for its profiler when the first object is made: compare
            # what is inside.
            step, own = inspect.unwrap(base.step), inspect.unwrap(cls.step)  # type: ignore[attr-defined]
            return base if step is own else None
    return None


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
