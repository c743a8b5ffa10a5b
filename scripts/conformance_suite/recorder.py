"""A pytest plugin that leaves out and records the tests of a suite.

The environment says which suite runs, and where the outcomes go:

  STRONGHOLD_CONFORMANCE_SUITE     name of the suite; its rows say which tests are not run
  STRONGHOLD_CONFORMANCE_OUTCOMES  a file; each outcome is a line of JSON in it
  STRONGHOLD_CONFORMANCE_ENGINE    "reference": the project's own engine runs, and every test is run
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from conformance_suite.explanations import skip_reason
from conformance_suite.suites import load_suite

SUITE = "STRONGHOLD_CONFORMANCE_SUITE"
OUTCOMES = "STRONGHOLD_CONFORMANCE_OUTCOMES"
ENGINE = "STRONGHOLD_CONFORMANCE_ENGINE"
REFERENCE = "reference"


@pytest.hookimpl(trylast=True)  # after the project's own markers have left tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = load_suite(os.environ[SUITE])
    rows = () if is_reference_engine() else suite.rows
    run = []
    for item in items:
        name = name_of(item, suite.prefix)
        reason = skip_reason(rows, name)
        if reason is None:
            write(name, "begun", "")
            run.append(item)
        else:
            write(name, "not run", reason)
    items[:] = run


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        text = report.longreprtext
        if report.skipped and isinstance(report.longrepr, tuple):
            text = str(report.longrepr[2])
        write(name_of(item, load_suite(os.environ[SUITE]).prefix), report.outcome, text)


def is_reference_engine() -> bool:
    """True if the project's own engine runs in this process."""
    return os.environ.get(ENGINE) == REFERENCE


def name_of(item: pytest.Item, prefix: str) -> str:
    """ "file::class::test", without the suite's prefix."""
    return item.nodeid.removeprefix(prefix)


def write(test: str, outcome: str, text: str) -> None:
    with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")
