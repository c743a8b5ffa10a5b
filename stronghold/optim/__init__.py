"""Optimizers: one file each, behind one contract.

contract          what the rest of the package asks of an optimizer
adam              Adam and AdamW
lion              Lion
sgd               SGD with momentum, and Nesterov's
states            the arrays that hold a parameter's training state
cpu_optimizer     an optimizer's kernels as a `torch.optim.Optimizer`
triton_kernels    the kernels on a GPU; triton_programs has their formulas
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
"""Of plans and checkpoints that name no optimizer."""


def optimizer_of_type(word: str) -> type[Optimizer] | None:
    """The optimizer that `optimizer.type` means; None for another word. Case does not count."""
    return next((cls for cls in OPTIMIZERS if word.lower() in cls.types), None)


def optimizer_named(name: str) -> type[Optimizer]:
    """The optimizer with this name, as checkpoints write it. ConfigError for another name."""
    for cls in OPTIMIZERS:
        if cls.name == name:
            return cls
    raise ConfigError(f"optimizer: {name!r} is none of {', '.join(o.name for o in OPTIMIZERS)}")


def optimizer_of_class(cls: type) -> tuple[type[Optimizer], type] | None:
    """The optimizer whose step a client's class makes, and the class whose `step` that is: `cls`
    or a base of it. None where no optimizer here computes the same."""
    for base in cls.__mro__:
        key = base.__module__.partition(".")[0], base.__name__
        optimizer = next((found for found in OPTIMIZERS if key in found.classes), None)
        if optimizer is not None:
            # torch wraps a class's step for its profiler when the first object is made: compare
            # what is inside.
            step, inherited = inspect.unwrap(base.step), inspect.unwrap(cls.step)  # type: ignore[attr-defined]
            return (optimizer, base) if step is inherited else None
    return None


def optimizer_of_state(names: Iterable[str]) -> type[Optimizer]:
    """The optimizer whose moments have these names. The default one where there are none.
    ConfigError for other names."""
    wanted = set(names)
    if not wanted:
        return type(DEFAULT)
    for cls in OPTIMIZERS:
        if wanted == {moment.name for moment in cls.possible_moments}:
            return cls
    raise ConfigError(f"optimizer state {sorted(wanted)} is of none of the optimizers here")


def hyperparameter_names() -> frozenset[str]:
    """The keys of a group that some optimizer reads."""
    return frozenset(key for cls in OPTIMIZERS for key in cls.defaults)


def examples() -> dict[str, Mapping[str, Any]]:
    """An `optimizer` section of each optimizer, by its type in lower case."""
    return {cls.example["type"].lower(): cls.example for cls in OPTIMIZERS}


def known_types() -> tuple[str, ...]:
    """Every word that `optimizer.type` may be, in lower case."""
    return tuple(word for cls in OPTIMIZERS for word in cls.types)


def known_classes() -> list[str]:
    """The optimizers of other packages that can be passed, as you write them, torch's first."""
    prefixes = {"torch": "torch.optim.", "stronghold": "stronghold."}
    classes = sorted({pair for cls in OPTIMIZERS for pair in cls.classes})
    names = [f"{prefixes.get(package, '')}{name}" for package, name in classes]
    return sorted(dict.fromkeys(names), key=lambda name: not name.startswith("torch."))


def listed(words: Iterable[str], last: str = "and") -> str:
    """The words in a sentence: "a, b and c"."""
    *before, end = words
    return f"{', '.join(before)} {last} {end}" if before else end
