"""Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019).

The formula is in `kernels/include/stronghold.h`, the vectors in `kernels/src/adam-inl.h`, and the
GPU's program in `triton_programs.adam_step`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stronghold.optim.contract import (
    BETAS,
    BOOLEAN,
    NUMBER,
    Expected,
    FixedKey,
    Group,
    Moment,
    Optimizer,
)

logger = logging.getLogger("stronghold")

ADAMW, BIAS_CORRECTION = 1, 2  # the kernel's flags
TORCH_ADAMW_WEIGHT_DECAY = 1e-2  # its default; DeepSpeed's own classes default to 0
# of a group
MODE_KEYS = ("decoupled_weight_decay", "adamw", "adamw_mode", "adam_w_mode")


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam or AdamW.

    `adamw`: the weight decay is decoupled (AdamW), not added to the gradient (L2).
    `bias_correction`: both moments are divided by 1 - beta^step.
    """

    adamw: bool = True
    bias_correction: bool = True

    name = "Adam"
    possible_moments = (Moment(name="exp_avg"), Moment(name="exp_avg_sq", is_root=True))
    types = ("adam", "adamw")
    classes = frozenset(
        {
            ("torch", "Adam"),
            ("torch", "AdamW"),
            ("deepspeed", "DeepSpeedCPUAdam"),
            ("deepspeed", "FusedAdam"),
            ("apex", "FusedAdam"),
            ("stronghold", "CPUAdam"),
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    expected: ClassVar[Mapping[str, Expected]] = {
        "lr": NUMBER,
        "betas": BETAS,
        "eps": NUMBER,
        "weight_decay": NUMBER,
    }
    params: ClassVar[Mapping[str, Expected]] = {
        "adam_w_mode": BOOLEAN,
        "torch_adam": BOOLEAN,
        "bias_correction": BOOLEAN,
    }
    fixed: ClassVar[Mapping[str, FixedKey]] = {
        "amsgrad": FixedKey(False, "the CPU kernel has no AMSGrad; set it to false or remove it"),
        "maximize": FixedKey(
            False, "the CPU kernel minimizes; set it to false, and negate the loss"
        ),
        "differentiable": FixedKey(
            False, "the update runs outside autograd; set it to false or remove it"
        ),
        "fp32_optimizer_states": FixedKey(
            True,
            "moments are kept in fp32; set it to true or remove it (smaller ones are "
            'stronghold.states: "lean")',
        ),
    }
    without_effect = frozenset({"foreach", "fused", "capturable", "set_grad_none"})
    note = "Adam or AdamW, in any case. Adam means AdamW unless adam_w_mode is false."
    params_note = "lr, betas, eps, weight_decay, bias_correction, adam_w_mode, torch_adam"
    example: ClassVar[Mapping[str, Any]] = {
        "type": "AdamW",
        "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    }

    @property
    def kernel(self) -> str:
        return "adam"

    @property
    def flags(self) -> int:
        return ADAMW * self.adamw | BIAS_CORRECTION * self.bias_correction

    def numbers(self, group: Group) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
        )

    def step_size(self, group: Group) -> float | None:
        return float(group["lr"])

    @classmethod
    def from_params(cls, type_name: str, params: Mapping[str, Any]) -> tuple[Optimizer, Group]:
        """Make the optimizer by DeepSpeed's rules.

        "Adam" means AdamW unless `adam_w_mode` is false. "AdamW" always means AdamW. `torch_adam`
        sets torch's default weight decay.
        """
        is_adamw_type = type_name == "adamw"
        adam_w_mode = params.get("adam_w_mode", True)
        if is_adamw_type and not adam_w_mode:
            logger.warning(
                'optimizer.params.adam_w_mode is without effect: type "AdamW" is always AdamW, as '
                "in DeepSpeed"
            )
        is_adamw = is_adamw_type or adam_w_mode
        group = dict(params)
        if params.get("torch_adam") and is_adamw:
            group.setdefault("weight_decay", TORCH_ADAMW_WEIGHT_DECAY)
        optimizer = cls(adamw=is_adamw, bias_correction=bool(params.get("bias_correction", True)))
        return optimizer, cls.hyperparameters(group)

    @classmethod
    def from_group(cls, optimizer: object, base: type, group: Mapping[str, Any]) -> Optimizer:
        return cls(
            adamw=_is_adamw(optimizer, base, group),
            bias_correction=bool(group.get("bias_correction", True)),
        )


def _is_adamw(optimizer: object, base: type, group: Mapping[str, Any]) -> bool:
    """True if the group's weight decay is decoupled. Packages have different keys for it."""
    for key in MODE_KEYS:
        if key in group:
            return bool(group[key])
    for name in MODE_KEYS[1:]:
        mode = getattr(optimizer, name, None)
        if mode is not None:
            return bool(mode)
    return base.__name__ == "AdamW"
