"""The contract of an optimizer: all that the rest of the package asks of one.

Owns no tensor and runs no kernel. An `Optimizer` is plain data, made from the config or from a
client's parameter group; any thread may read it. `stronghold/optim/__init__.py` lists the
optimizers. No file outside `stronghold/optim/` and `kernels/` needs to name one.

[Note: one file] To add an optimizer, write

1. a subclass of `Optimizer` in a file of its own here, with a `CPUOptimizer` beside it;
2. a header in `kernels/src/`, with the formula for vectors, and its line in the kernels' table;
3. a formula in `triton_programs.py`, with the same operations in the same order;
4. the subclass's line in `OPTIMIZERS`.

Arrays, plan, files, checkpoints, config keys and the documentation of keys follow from these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stronghold.errors import (
    BOOLEAN,
    NUMBER,
    ConfigError,
    Expected,
    did_you_mean,
    is_number,
    value_problem,
)

Group = dict[str, Any]
"""A live parameter group of a `torch.optim.Optimizer`."""


def _is_pair_of_betas(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(is_number(beta) and beta < 1 for beta in value)
    )


def _is_below_one(value: object) -> bool:
    return is_number(value) and value < 1  # type: ignore[operator]


BETAS = Expected(_is_pair_of_betas, "two numbers in [0, 1), such as [0.9, 0.999]")
BELOW_ONE = Expected(_is_below_one, "a number in [0, 1)")
__all__ = ["BELOW_ONE", "BETAS", "BOOLEAN", "NUMBER", "Expected", "Fixed", "Moment", "Optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One number per element that an optimizer keeps between two steps. Zero is a fresh one.

    `name` is torch's, in `optimizer.state`. `is_root`: the number is never negative, and the step
    divides by its square root. Lean states keep a code of that root.
    """

    name: str
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of which only `value` is accepted, and the `reason` for refusing every other value."""

    value: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Optimizer(ABC):
    """How one parameter group is updated. The hyper-parameters that a schedule may change stay in
    the live group; a subclass's fields are what stays fixed. Equal objects share a kernel call.

    `name` is written in checkpoints. `possible_moments` are at most `native.MAX_MOMENTS`. `types`
    are the words of `optimizer.type`, in lower case.
    `classes` names optimizers of other packages that compute the same: (package, class).
    `defaults` has the group's hyper-parameters with DeepSpeed's defaults, and `expected` what each
    must be. `params` are further keys of `optimizer.params`. Keys in `fixed` have one accepted
    value; keys in `without_effect` change how torch computes, not what. `note` documents the type,
    `params_note` its keys. `example` is an `optimizer` section to begin with.
    """

    name: ClassVar[str]
    possible_moments: ClassVar[tuple[Moment, ...]]
    types: ClassVar[tuple[str, ...]]
    classes: ClassVar[frozenset[tuple[str, str]]]
    defaults: ClassVar[Mapping[str, Any]]
    expected: ClassVar[Mapping[str, Expected]]
    params: ClassVar[Mapping[str, Expected]] = {}
    fixed: ClassVar[Mapping[str, Fixed]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()
    note: ClassVar[str]
    params_note: ClassVar[str]
    example: ClassVar[Mapping[str, Any]]

    # -- what it keeps, and its kernel ------------------------------------------------------------
    @property
    @abstractmethod
    def kernel(self) -> str:
        """The name of its kernels: `native.optimizers()` lists them."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments that it keeps, in the kernel's order: `possible_moments`, or none."""
        return self.possible_moments

    @property
    def flags(self) -> int:
        """The kernel's flags."""
        return 0

    @abstractmethod
    def numbers(self, group: Group) -> tuple[float, ...]:
        """The kernel's numbers, in its order, as the live group has them now. ConfigError where the
        group asks for what this object cannot do."""

    def step_size(self, group: Group) -> float | None:
        """About how far one step moves a weight; None where that depends on the gradients' size."""
        return None

    # -- where it comes from ----------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def from_params(cls, type_name: str, params: Mapping[str, Any]) -> tuple[Optimizer, Group]:
        """The optimizer and a group's hyper-parameters, from `optimizer.type` (lower case) and the
        checked `optimizer.params` without null values."""

    @classmethod
    @abstractmethod
    def from_group(cls, optimizer: object, base: type, group: Mapping[str, Any]) -> Optimizer:
        """The optimizer of one group of a client's object. `base` is the class of `classes` whose
        `step` the object has."""

    @classmethod
    def hyperparameters(cls, group: Mapping[str, Any]) -> Group:
        """The group's values of the keys in `defaults`, as plain numbers."""
        return {key: _plain(group.get(key, value)) for key, value in cls.defaults.items()}

    @classmethod
    def wrong_param(cls, key: str, value: Any) -> str | None:
        """The line of an error for one key of `optimizer.params`; None where it is right."""
        dotted = f"optimizer.params.{key}"
        if key == "max_grad_norm":
            return (
                f"{dotted}: not an optimizer parameter. Remove it and set the top-level "
                f'"gradient_clipping": {value!r}.'
            )
        if key in cls.fixed:
            fixed = cls.fixed[key]
            if value is fixed.value:
                return None
            return f"{dotted}: got {value!r}; {fixed.reason}."
        expected = {**cls.expected, **cls.params}
        if key in expected:
            return value_problem(dotted, value, expected[key])
        if key in cls.without_effect:
            return None
        usable = sorted({*expected, *cls.without_effect, *cls.fixed})
        hint = did_you_mean(key, usable) or f" Known: {', '.join(usable)}."
        return f"{dotted}: unknown parameter.{hint}"

    @classmethod
    def problems(cls, group: Mapping[str, Any], where: str) -> list[str]:
        """The lines of an error for a client's group at `where`; empty where all is right."""
        lines = [
            f"{where}: {key} is on; {fixed.reason}."
            for key, fixed in cls.fixed.items()
            if not fixed.value and group.get(key)
        ]
        hyperparameters = cls.hyperparameters(group)
        for key, expected in cls.expected.items():
            line = value_problem(f"{where}: {key}", hyperparameters[key], expected)
            if line is not None:
                lines.append(line)
        return lines


def _plain(value: Any) -> Any:
    """Numbers as floats: torch keeps some of them in tensors. Switches stay."""
    if isinstance(value, bool | None):
        return value
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return float(value)


def refuse_changed(key: str, value: object, expected: str) -> ConfigError:
    """The error for a hyper-parameter that may not change after `initialize`."""
    return ConfigError(
        f"optimizer.param_groups: {key} is {value!r} now, expected {expected} as when "
        "stronghold.initialize was called: pass the final value to initialize"
    )
