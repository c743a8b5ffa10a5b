"""Trains every row of PEFT's table of adapters with the engine, and compares with a plain loop.

In fp32, on one thread, with the native kernel of AdamW on both sides. Each part of a row's model is
a layer of its own that streams through a window of one slot, with activations kept and recomputed.
A row is equal if every loss, norm, weight and moment has the bits of the plain loop.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import peft
import torch
from torch import nn

from conformance_suite.peft.table import Case, Table, explain
from stronghold.errors import ConfigError
from tests.support.training import Run, assert_identical, config, train_plain, train_windowed

STEPS = 3
CLIPPING = 0.5
POLICIES = ("keep", "recompute")


class Outcome(Enum):
    """What became of a row. The values stand in the page of counts."""

    EQUAL = "equal"
    EQUAL_RESIDENT = "equal with `resident_layers`"
    REFUSED = "refused"
    UNEXPLAINED = "unexplained"


class Scored(nn.Module):
    """A model with the mean squared distance of its output from fixed numbers as its loss.

    Its scale is trained, too: the loss has a gradient even if a dropout leaves out all adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        output = self.model(X=X) * self.scale
        target = torch.linspace(-1.0, 1.0, output.numel()).view_as(output)
        return (output - target).square().mean()


def make(case: Case, table: Table) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """The model of a row with its adapters in train mode, and its batches."""
    base = table.make_model(case.model)
    settings = case.config_class(**copy.deepcopy(case.options))
    torch.manual_seed(0)
    model = peft.get_peft_model(base, settings)
    # Whole numbers below 100, the vocabulary of the embeddings.
    return Scored(model).train(), lambda seed: {"X": torch.arange(90).view(9, 10) + seed}


def layers_of(model: nn.Module) -> list[str]:
    """Names of the parts of the adapted model that have parameters."""
    base = model.model.base_model.model
    prefix = "model.base_model.model"
    parts = [name for name, part in base.named_children() if list(part.parameters())]
    return [f"{prefix}.{name}" for name in parts]


def run(case: Case, table: Table) -> tuple[Outcome, str]:
    """The outcome of one row, and its reason or error.

    A row that the engine refuses to stream with a known reason is tried again with layers that stay
    on the GPU, if the reason names that way.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = _plain(case, table)
            try:
                for policy in POLICIES:
                    _compare(case, table, expected, {"window": 1, "activations": policy})
            except ConfigError as error:
                reason = explain(str(error))
                if reason is None:
                    return Outcome.UNEXPLAINED, str(error)
                if not reason.works_resident:
                    return Outcome.REFUSED, reason.text
                _compare(case, table, expected, {"resident_layers": "all"})
                return Outcome.EQUAL_RESIDENT, reason.text
    except Exception as error:  # whatever a row does, the next one runs
        return Outcome.UNEXPLAINED, f"{type(error).__name__}: {error}"
    return Outcome.EQUAL, ""


def _plain(case: Case, table: Table) -> Run:
    """The row in a plain loop. Raises AssertionError if no adapter changes."""
    expected = train_plain(lambda: make(case, table), steps=STEPS, clipping=CLIPPING)
    for name, value in make(case, table)[0].named_parameters():
        if name != "scale" and not torch.equal(value, expected.weights[name]):
            return expected
    raise AssertionError("the plain loop has trained no adapter")


def _compare(case: Case, table: Table, expected: Run, section: dict[str, Any]) -> None:
    """Train the row with the engine. Raises AssertionError unless all bits are equal."""
    section = {**section, "layers": layers_of(make(case, table)[0])}
    settings = config(clipping=CLIPPING, section=section)
    found = train_windowed(lambda: make(case, table), steps=STEPS, settings=settings)
    assert_identical(found, expected)
    if found.norms != expected.norms:
        raise AssertionError(f"norms {found.norms} differ from {expected.norms}")


def run_all(table: Table, only: str) -> Counter[tuple[Outcome, str]]:
    """Run the rows whose titles contain `only`, and count them by outcome and reason.

    Prints each row that is not equal.
    """
    torch.set_num_threads(1)
    logging.getLogger("stronghold").setLevel(logging.ERROR)
    counts: Counter[tuple[Outcome, str]] = Counter()
    for case in table.cases:
        if only in case.title:
            outcome, text = run(case, table)
            if outcome is not Outcome.EQUAL:
                print(f"{outcome.value:28} {case.title}: {text}", flush=True)
            counts[outcome, "" if outcome is Outcome.UNEXPLAINED else text] += 1
    return counts
