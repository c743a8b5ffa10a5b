"""The contract of an optimizer: the interface that the rest of the package uses.

Owns no tensor and runs no kernel. An `Optimizer` is plain data. It is made from the config or from
a client's parameter group; any thread may read it. `stronghold/optim/__init__.py` lists the
optimizers. Outside `stronghold/optim/` and `kernels/` only the package's root names one: it exports
`CPUAdam`.

[Note: a new optimizer] To add an optimizer, write

1. a subclass of `Optimizer` in a file of its own here;
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
__all__ = ["BELOW_ONE", "BETAS", "BOOLEAN", "NUMBER", "Expected", "FixedKey", "Moment", "Optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One number per element that an optimizer keeps between two steps. It starts at zero.

    `name` is torch's, in `optimizer.state`. `is_root`: the number is never negative, and the update
    divides by its square root. Lean states keep a code of that root.
    """

    name: str
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class FixedKey:
    """A key with one accepted `value`, and the `reason` for refusing every other one."""

    value: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Optimizer(ABC):
    """The update of one parameter group, as plain data.

    Hyper-parameters that a schedule may change stay in the live group. A subclass's fields stay
    fixed. Parameters with equal optimizers share a kernel call.

    name              written in checkpoints
    possible_moments  at most `native.MAX_MOMENTS`
    types             values of `optimizer.type`, in lower case
    classes           optimizers of other packages that compute the same: (package, class)
    defaults          the group's hyper-parameters, with DeepSpeed's defaults
    expected          the condition on each hyper-parameter
    params            further keys of `optimizer.params`
    fixed             keys with one accepted value
    without_effect    keys that change how torch computes, not its result
    note, params_note documentation of the type, and of its keys
    example           an `optimizer` section of the config
    """

    name: ClassVar[str]
    possible_moments: ClassVar[tuple[Moment, ...]]
    types: ClassVar[tuple[str, ...]]
    classes: ClassVar[frozenset[tuple[str, str]]]
    defaults: ClassVar[Mapping[str, Any]]
    expected: ClassVar[Mapping[str, Expected]]
    params: ClassVar[Mapping[str, Expected]] = {}
    fixed: ClassVar[Mapping[str, FixedKey]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()
    note: ClassVar[str]
    params_note: ClassVar[str]
    example: ClassVar[Mapping[str, Any]]

    # -- moments and kernel -----------------------------------------------------------------------
    @property
    @abstractmethod
    def kernel(self) -> str:
        """The name of the optimizer's kernels: `native.optimizers()` lists the names."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments that the update keeps, in the kernel's order: `possible_moments`, or none."""
        return self.possible_moments

    @property
    def flags(self) -> int:
        """The kernel's flags."""
        return 0

    @abstractmethod
    def numbers(self, group: Group) -> tuple[float, ...]:
        """The kernel's numbers, in its order, from the live group.

        ConfigError if the group has a value that this object cannot follow.
        """

    def step_size(self, group: Group) -> float | None:
        """The approximate distance by which one step moves a weight.

        None if it depends on the gradients' size.
        """
        return None

    # -- construction and checks ------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def from_params(cls, type_name: str, params: Mapping[str, Any]) -> tuple[Optimizer, Group]:
        """Make the optimizer and a group's hyper-parameters from the config.

        `type_name` is `optimizer.type` in lower case. `params` are the checked `optimizer.params`
        without null values.
        """

    @classmethod
    @abstractmethod
    def from_group(cls, optimizer: object, base: type, group: Mapping[str, Any]) -> Optimizer:
        """Make the optimizer of one group of a client's object.

        `base` is the class of `classes` whose `step` the object has.
        """

    @classmethod
    def hyperparameters(cls, group: Mapping[str, Any]) -> Group:
        """The group's values of the keys in `defaults`, as plain numbers."""
        return {key: _plain(group.get(key, value)) for key, value in cls.defaults.items()}

    @classmethod
    def wrong_param(cls, key: str, value: Any) -> str | None:
        """The line of an error for one key of `optimizer.params`; None if the value is right."""
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
        """The lines of an error for a client's group at `where`; empty if the group is right."""
        lines: list[str] = []
        for key, fixed in cls.fixed.items():
            is_on = bool(group.get(key))
            if is_on and not fixed.value:
                lines.append(f"{where}: {key} is on; {fixed.reason}.")
        hyperparameters = cls.hyperparameters(group)
        for key, expected in cls.expected.items():
            line = value_problem(f"{where}: {key}", hyperparameters[key], expected)
            if line is not None:
                lines.append(line)
        return lines


def _plain(value: Any) -> Any:
    """A number as a float, because torch keeps some in tensors. Booleans and None stay."""
    if isinstance(value, bool | None):
        return value
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return float(value)


def refuse_changed(key: str, value: object, expected: str) -> ConfigError:
    """The error for a hyper-parameter that has changed after `initialize`, and may not."""
    return ConfigError(
        f"optimizer.param_groups: {key} is {value!r} now, expected {expected} as when "
        "stronghold.initialize was called: pass the final value to initialize"
    )
