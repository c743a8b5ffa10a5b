"""SGD with momentum and Nesterov's variant, as `torch.optim.SGD` without dampening.

The formula is in `kernels/include/stronghold.h`, the vectors in `kernels/src/sgd-inl.h`, and the
GPU's programs in `triton_programs.sgd_step` and `sgd_momentum_step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stronghold.errors import ConfigError
from stronghold.optim.contract import (
    BELOW_ONE,
    BOOLEAN,
    NUMBER,
    Expected,
    FixedKey,
    Group,
    Moment,
    Optimizer,
    refuse_changed,
)

NESTEROV = 1  # the kernel's flag


def _is_zero(value: object) -> bool:
    return value == 0


NO_DAMPENING = Expected(_is_zero, "0: the kernel has no dampening")


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """SGD, with or without momentum.

    `has_momentum`: a parameter has a momentum buffer. Without it a parameter has no moment.
    `nesterov`: the step looks ahead along the momentum.
    """

    has_momentum: bool = False
    nesterov: bool = False

    name = "SGD"
    possible_moments = (Moment(name="momentum_buffer"),)
    types = ("sgd",)
    classes = frozenset({("torch", "SGD")})
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "dampening": 0.0,
        "nesterov": False,
    }
    expected: ClassVar[Mapping[str, Expected]] = {
        "lr": NUMBER,
        "momentum": BELOW_ONE,
        "weight_decay": NUMBER,
        "dampening": NO_DAMPENING,
        "nesterov": BOOLEAN,
    }
    fixed: ClassVar[Mapping[str, FixedKey]] = {
        "maximize": FixedKey(
            False, "the CPU kernel minimizes; set it to false, and negate the loss"
        ),
        "differentiable": FixedKey(
            False, "the update runs outside autograd; set it to false or remove it"
        ),
    }
    without_effect = frozenset({"foreach", "fused"})
    note = "SGD, as torch's."
    params_note = "lr, momentum, weight_decay, nesterov; dampening must be 0"
    example: ClassVar[Mapping[str, Any]] = {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}

    @property
    def kernel(self) -> str:
        return "sgd_momentum" if self.has_momentum else "sgd"

    @property
    def moments(self) -> tuple[Moment, ...]:
        return self.possible_moments if self.has_momentum else ()

    @property
    def flags(self) -> int:
        return NESTEROV * self.nesterov

    def numbers(self, group: Group) -> tuple[float, ...]:
        momentum = float(group["momentum"])
        if momentum and not self.has_momentum:
            raise refuse_changed("momentum", momentum, "0")
        if bool(group.get("nesterov", False)) != self.nesterov:
            raise refuse_changed("nesterov", group["nesterov"], str(self.nesterov))
        return float(group["lr"]), momentum, float(group["weight_decay"])

    @classmethod
    def from_params(cls, type_name: str, params: Mapping[str, Any]) -> tuple[Optimizer, Group]:
        group = cls.hyperparameters(params)
        return cls.from_group(None, cls, group), group

    @classmethod
    def from_group(cls, optimizer: object, base: type, group: Mapping[str, Any]) -> Optimizer:
        has_momentum = float(group["momentum"]) > 0.0
        nesterov = bool(group.get("nesterov", False))
        if nesterov and not has_momentum:
            raise ConfigError(
                "optimizer: nesterov is on and momentum is 0; set momentum above 0, or nesterov "
                "to false"
            )
        return cls(has_momentum=has_momentum, nesterov=nesterov)
