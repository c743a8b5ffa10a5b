"""What lies in the tables of a module and of a parameter, of which torch shows no list; and a limit
inside of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

Tables = dict[str, list[tuple[Any, int]]]


def tables_of(owner: object) -> Tables:
    """The dicts among an object's attributes, by name: of a module its parameters, buffers,
    children and hooks. Each has its keys and which objects they name, in order."""
    return {
        name: [(key, id(value)) for key, value in table.items()]
        for name, table in vars(owner).items()
        if isinstance(table, dict)
    }


def hooks_of(owner: object, *kinds: str) -> Tables:
    """Those of its tables that have hooks; with `kinds`, of which the name has one of these words
    ("forward", "backward", "state_dict")."""
    return {
        name: table
        for name, table in tables_of(owner).items()
        if table and "hooks" in name and (not kinds or any(kind in name for kind in kinds))
    }


def num_hooks(parameter: nn.Parameter) -> int:
    """How many hooks wait for the parameter's gradient."""
    tables = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return sum(len(table or ()) for table in tables)


def offload_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors be offloaded, too."""
    monkeypatch.setattr("stronghold.train.offload.MIN_OFFLOAD_BYTES", 1)
