"""Lion (Chen et al., 2023, arXiv 2302.06675), with decoupled weight decay as DeepSpeed's CPULion.

The formula is in `kernels/include/stronghold.h`, the vectors in `kernels/src/lion-inl.h`, and the
GPU's program in `triton_programs.lion_step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stronghold.optim.contract import BETAS, NUMBER, Expected, FixedKey, Group, Moment, Optimizer


@dataclass(frozen=True, slots=True)
class Lion(Optimizer):
    """Lion. A step moves every weight by the learning rate, in the direction of a sign."""

    name = "Lion"
    possible_moments = (Moment(name="exp_avg"),)
    types = ("lion",)
    classes = frozenset({("deepspeed", "DeepSpeedCPULion"), ("deepspeed", "FusedLion")})
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    expected: ClassVar[Mapping[str, Expected]] = {
        "lr": NUMBER,
        "betas": BETAS,
        "weight_decay": NUMBER,
    }
    fixed: ClassVar[Mapping[str, FixedKey]] = {
        "maximize": FixedKey(
            False, "the CPU kernel minimizes; set it to false, and negate the loss"
        ),
        "fp32_optimizer_states": FixedKey(
            True,
            "the moment is kept in fp32; set it to true or remove it (a smaller one is "
            'stronghold.states: "lean")',
        ),
    }
    without_effect = frozenset({"set_grad_none"})
    note = "Lion."
    params_note = "lr, betas, weight_decay"
    example: ClassVar[Mapping[str, Any]] = {
        "type": "Lion",
        "params": {"lr": 2e-6, "betas": [0.9, 0.99], "weight_decay": 0.5},
    }

    @property
    def kernel(self) -> str:
        return "lion"

    def numbers(self, group: Group) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (float(group["lr"]), float(beta1), float(beta2), float(group["weight_decay"]))

    def step_size(self, group: Group) -> float | None:
        return float(group["lr"])

    @classmethod
    def from_params(cls, type_name: str, params: Mapping[str, Any]) -> tuple[Optimizer, Group]:
        return cls(), cls.hyperparameters(params)

    @classmethod
    def from_group(cls, optimizer: object, base: type, group: Mapping[str, Any]) -> Optimizer:
        return cls()
