"""Optimizers: one file each, behind one contract. This file has the table of all of them.

contract          the interface of an optimizer
adam              Adam and AdamW
lion              Lion
sgd               SGD with momentum, and Nesterov's
states            the arrays that hold a parameter's training state
cpu_adam          Adam's kernels as a `torch.optim.Optimizer`
triton_programs   the formulas on a GPU, which `devices.triton_kernels` launches
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from stronghold.errors import ConfigError
from stronghold.optim.adam import Adam
from stronghold.optim.contract import Optimizer as Optimizer
from stronghold.optim.lion import Lion
from stronghold.optim.sgd import SGD

OPTIMIZERS: tuple[type[Optimizer], ...] = (Adam, Lion, SGD)
DEFAULT = Adam()
"""The optimizer of plans that name none."""


def optimizer_of_type(word: str) -> type[Optimizer] | None:
    """The optimizer for a value of `optimizer.type`, in any case; None for an unknown word."""
    for optimizer in OPTIMIZERS:
        if word.lower() in optimizer.types:
            return optimizer
    return None


def optimizer_named(name: str) -> type[Optimizer]:
    """The optimizer with this name, as checkpoints write it. ConfigError for an unknown name."""
    for optimizer in OPTIMIZERS:
        if optimizer.name == name:
            return optimizer
    known = ", ".join(optimizer.name for optimizer in OPTIMIZERS)
    raise ConfigError(f"optimizer: {name!r} is none of {known}")


def optimizer_of_class(cls: type) -> tuple[type[Optimizer], type] | None:
    """The optimizer that computes the same as a client's class.

    Returns the optimizer and the class whose `step` it replaces: `cls` or a base of it. None if no
    optimizer computes the same, or if `cls` overrides that `step`.
    """
    for base in cls.__mro__:
        optimizer = _optimizer_replacing(base)
        if optimizer is None:
            continue
        # torch wraps a class's step for its profiler when the first object is made. So compare the
        # wrapped functions.
        step = inspect.unwrap(base.step)  # type: ignore[attr-defined]
        inherited = inspect.unwrap(cls.step)  # type: ignore[attr-defined]
        return (optimizer, base) if step is inherited else None
    return None


def _optimizer_replacing(cls: type) -> type[Optimizer] | None:
    """The optimizer that names this class in `classes`."""
    package = cls.__module__.partition(".")[0]
    for optimizer in OPTIMIZERS:
        if (package, cls.__name__) in optimizer.classes:
            return optimizer
    return None


def examples() -> dict[str, Mapping[str, Any]]:
    """An `optimizer` section of each optimizer, by its type in lower case."""
    return {cls.example["type"].lower(): cls.example for cls in OPTIMIZERS}


def known_types() -> tuple[str, ...]:
    """Every word that `optimizer.type` may be, in lower case."""
    return tuple(word for cls in OPTIMIZERS for word in cls.types)


def known_classes() -> list[str]:
    """Names of the optimizer classes that a user can pass, as the user writes them.

    torch's come first.
    """
    prefixes = {"torch": "torch.optim.", "stronghold": "stronghold."}
    classes: set[tuple[str, str]] = set()
    for optimizer in OPTIMIZERS:
        classes.update(optimizer.classes)
    names: dict[str, None] = {}
    for package, name in sorted(classes):
        names[f"{prefixes.get(package, '')}{name}"] = None
    torch_names = [name for name in names if name.startswith("torch.")]
    other_names = [name for name in names if not name.startswith("torch.")]
    return torch_names + other_names


def listed(words: Iterable[str], last: str = "and") -> str:
    """The words in a sentence: "a, b and c"."""
    *before, end = words
    if not before:
        return end
    return f"{', '.join(before)} {last} {end}"
