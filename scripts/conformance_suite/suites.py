"""The suites of scripts/conformance: each is a folder beside this file.

A folder has `suite.py` with SUITE, an object with the two methods of `Suite`. Most are a
`PytestSuite`: files of foreign tests that run under pytest.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

NAMES = ("accelerate", "deepspeed", "peft", "transformers")


class Suite(Protocol):
    """Tests of another project against this engine."""

    about: str  # one line for --help

    def run(self, given: list[str]) -> int:
        """Run the suite with arguments of the command line. Returns the exit code: 1 if anything
        is unexplained."""


def load_suite(name: str) -> Any:
    """Return the suite of this name."""
    return importlib.import_module(f"conformance_suite.{name}.suite").SUITE
