"""Why a foreign test that did not pass cannot apply to this engine.

A row explains a test if its pattern matches the test's name and its symptom is found in what pytest
said. Another failure of the same test stays unexplained. Rows are tried in order.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One explanation.

    pattern  shell pattern of "file::class::test"
    symptom  regular expression, or None: the test is not run
    reason   key of the suite's reasons
    """

    pattern: str
    symptom: str | None
    reason: str


def explain(rows: Iterable[Row], test: str, text: str) -> str | None:
    """Return the reason why a test cannot apply, or None if it is unexplained.

    text  what pytest said of the test
    """
    for row in rows:
        if row.symptom is None or not fnmatch.fnmatchcase(test, row.pattern):
            continue
        if re.search(row.symptom, text, re.MULTILINE | re.DOTALL):
            return row.reason
    return None


def skip_reason(rows: Iterable[Row], test: str) -> str | None:
    """Return the reason why a test is not run, or None if it is run."""
    for row in rows:
        if row.symptom is None and fnmatch.fnmatchcase(test, row.pattern):
            return row.reason
    return None
