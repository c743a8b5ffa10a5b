"""PEFT's own table of adapters, row by row, in a plain loop and with the engine."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from conformance_suite.pages import FOLDER, table, write_page
from conformance_suite.peft.table import TESTS, read_table
from conformance_suite.sources import SourcesError, find_sources

ROOT = Path(__file__).resolve().parents[3]


class PeftSuite:
    """PEFT's TEST_CASES. Some rows need scikit-learn."""

    about = "PEFT's own table of adapters, in a plain loop and with the engine."

    def run(self, given: list[str]) -> int:
        """Run the rows. Returns 1 if one is not equal and nothing explains it."""
        parser = argparse.ArgumentParser(prog="conformance peft", description=self.about)
        parser.add_argument("sources", type=Path, nargs="?", help="PEFT's source distribution")
        parser.add_argument("--only", default="", help="rows whose title contains this")
        parser.add_argument("--page", action="store_true", help="write peft.md")
        parser.add_argument("--page-folder", type=Path, default=FOLDER, help="folder of the page")
        arguments = parser.parse_args(given)
        version = importlib.metadata.version("peft")
        with tempfile.TemporaryDirectory() as scratch:
            try:
                sources = find_sources(
                    arguments.sources,
                    distribution="peft",
                    version=version,
                    marker=TESTS,
                    scratch=Path(scratch),
                )
            except SourcesError as error:
                print(f"conformance peft: error: {error}", file=sys.stderr)
                return 2
            sys.path.insert(0, str(ROOT))  # the plain loop is the one of our tests
            from conformance_suite.peft.rows import Outcome, run_all

            cases = read_table(sources)
            print(f"PEFT {version}, {len(cases.cases)} rows of {sources.name}")
            counts = run_all(cases, arguments.only)
        totals: Counter[Any] = Counter()
        for (outcome, _), count in counts.items():
            totals[outcome] += count
        print(", ".join(f"{totals[outcome]} {outcome.value}" for outcome in Outcome))
        if arguments.page:
            write_page("peft", page(version, counts), arguments.page_folder)
        return 1 if totals[Outcome.UNEXPLAINED] else 0


def page(version: str, counts: Counter[Any]) -> list[str]:
    """Return the lines of docs/conformance/peft.md. `counts`: of rows by outcome and reason."""
    rows = [(count, outcome.value, reason) for (outcome, reason), count in counts.most_common()]
    rows.append((counts.total(), "in all", ""))
    return [
        "# PEFT's table of adapters, against this engine",
        "",
        f"Written by `scripts/conformance peft --page`: PEFT {version}, the rows of",
        "`TEST_CASES` in `tests/test_custom_models.py` of its source distribution. Each row",
        "trains three steps in a plain loop and with the engine: in fp32, on one thread,",
        "through a window of one slot, with activations kept and recomputed. A row is equal if",
        "every loss, norm, weight and moment has the same bits.",
        "",
        *table(("rows", "outcome", "reason"), rows, "rll"),
    ]


SUITE = PeftSuite()
