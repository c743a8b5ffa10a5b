"""The hyper-parameters of the kernels' optimizers by name: a segment has them by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What `stronghold.h` describes of one optimizer, and values for tests."""

    numbers: dict[str, float]  # in the optimizer's order
    flags: dict[str, int]  # the bit of each
    set_flags: tuple[str, ...] = ()  # those that are set unless a test changes them
    moments: tuple[str, ...]

    @property
    def num_moments(self) -> int:
        return len(self.moments)


OPTIMIZERS = {
    "adam": Hyper(
        numbers={"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1},
        flags={"adamw": 1, "bias_correction": 2},
        set_flags=("adamw", "bias_correction"),
        moments=("exp_avg", "exp_avg_sq"),
    ),
    "lion": Hyper(
        numbers={"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
        flags={},
        moments=("exp_avg",),
    ),
    "sgd_momentum": Hyper(
        numbers={"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1},
        flags={"nesterov": 1},
        moments=("momentum_buffer",),
    ),
    "sgd": Hyper(numbers={"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.1}, flags={}, moments=()),
}

# Every form of every formula: the optimizer, and what distinguishes the form.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam-adamw": ("adam", {"adamw": True}),
    "adam-l2": ("adam", {"adamw": False}),
    "lion": ("lion", {}),
    "sgd-momentum": ("sgd_momentum", {}),
    "sgd-nesterov": ("sgd_momentum", {"nesterov": True}),
    "sgd": ("sgd", {}),
}


def hyper_fields(optimizer: str, **changes: Any) -> dict[str, Any]:
    """The fields of a segment for the optimizer's values, some of which `changes` replaces by
    name. A name that is neither a number nor a flag of the optimizer is a field already."""
    hyper = OPTIMIZERS[optimizer]
    numbers = [changes.pop(name, value) for name, value in hyper.numbers.items()]
    flags = 0
    for name, bit in hyper.flags.items():
        if changes.pop(name, name in hyper.set_flags):
            flags |= bit
    fields = {f"number{i}": value for i, value in enumerate(numbers)}
    return {"grad_scale": 0.5, "flags": flags, **fields, **changes}


def number_field(optimizer: str, name: str) -> str:
    """The field of a segment that holds one of the optimizer's numbers."""
    return f"number{list(OPTIMIZERS[optimizer].numbers).index(name)}"
