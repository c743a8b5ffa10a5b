"""PEFT's own table of adapters, and why some of its rows cannot train on this engine.

Owns the reading of `tests/test_custom_models.py` in PEFT's source distribution: its table
TEST_CASES and the models of its rows. None of it is in this repository. A reason explains a row if
its symptom is in the engine's error. Another failure of the same row stays unexplained.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

TESTS = Path("tests") / "test_custom_models.py"
TABLE = "TEST_CASES"
MODELS = "MockTransformerWrapper"  # its from_pretrained(name) makes the model of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a model by its name, and the adapters on it."""

    title: str
    model: str
    config_class: Any
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All rows, and the function that makes the model of a row."""

    cases: tuple[Case, ...]
    make_model: Callable[[str], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a row is refused.

    symptom         regular expression for the engine's error
    text            the reason for users
    works_resident  the row trains if its layers stay on the GPU
    """

    symptom: str
    text: str
    works_resident: bool


REASONS = (
    Reason(
        symptom=r"is another nn\.Parameter each time the model lists its parameters",
        text="LoRA on `nn.MultiheadAttention` makes the base's parameters anew in each forward: "
        "adapt other modules",
        works_resident=False,
    ),
    Reason(
        symptom=r"the forward of .* wrote into its parameters in place",
        text="constrained OFT (`coft`) writes its projected weight in each forward",
        works_resident=True,
    ),
    Reason(
        symptom=r"a view \(.*\) is still held after the block's forward or backward",
        text="HiRA on Transformers' `Conv1D` keeps a view of the base's weight until backward",
        works_resident=True,
    ),
)


def explain(error: str) -> Reason | None:
    """The reason for which a row is refused; None: it is unexplained."""
    return next((reason for reason in REASONS if re.search(reason.symptom, error)), None)


def read_table(sources: Path) -> Table:
    """Run the file of tests as far as its table and its models.

    Its classes of tests and its helpers are left out: they need further packages, and the table
    does not.
    """
    file = sources / TESTS
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    tree.body = [statement for statement in tree.body if not _is_left_out(statement)]
    module = ModuleType("peft_table_of_cases")
    sys.modules[module.__name__] = module  # classes look up their module
    exec(compile(tree, str(file), "exec"), vars(module))
    cases = tuple(
        Case(title=title, model=model, config_class=config_class, options=options)
        for title, model, config_class, options in getattr(module, TABLE)
    )
    return Table(cases=cases, make_model=getattr(module, MODELS).from_pretrained)


def _is_left_out(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.level > 0  # a helper of the tests
    return isinstance(statement, ast.ClassDef) and statement.name.startswith("Test")
