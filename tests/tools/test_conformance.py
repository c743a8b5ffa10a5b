"""The table of scripts/conformance is well-formed, and its program explains what the table says."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "conformance"

SIMPLE = """
import pytest

def test_passes(): pass

def test_buffers(): raise ValueError("data_types.buffer_dtype: got bf16. Refused.")

def test_unknown(): raise ValueError("something new")
"""


@pytest.fixture(scope="module")
def table() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield import_module("conformance_suite.table")
    sys.path.remove(str(ROOT / "scripts"))


def test_every_row_has_a_reason_a_pattern_and_a_symptom_that_can_be_read(table: Any) -> None:
    for row in table.ROWS:
        assert row.reason in table.REASONS, row
        assert row.pattern, row
        if row.symptom is not None:
            re.compile(row.symptom)
            assert not re.search(row.symptom, ""), f"{row} explains every failure"
        elif "/" in row.pattern:
            assert row.pattern.split("::")[0] in table.FILES, row


def test_every_reason_is_used(table: Any) -> None:
    assert {row.reason for row in table.ROWS} == set(table.REASONS)


def test_no_row_is_there_twice_and_no_file_is(table: Any) -> None:
    assert len(set(table.ROWS)) == len(table.ROWS)
    assert len(set(table.FILES)) == len(table.FILES)


def test_a_pattern_of_one_file_names_a_file_that_is_run(table: Any) -> None:
    for row in table.ROWS:
        file = row.pattern.split("::")[0]
        assert "/" not in file or any(
            fnmatch.fnmatchcase(name, file + "*") for name in table.FILES
        ), row


def test_a_failure_is_explained_by_its_symptom_alone(table: Any) -> None:
    test = "v1/zero/test_zero_user_backward.py::TestX::test_y"
    assert table.explain(test, "data_types.buffer_dtype: got bf16") == "buffers"
    assert table.explain(test, "AssertionError: losses differ") is None
    assert table.explain(test, "") is None


def test_the_program_counts_and_fails_on_what_is_unexplained(tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "unit"
    (unit / "runtime").mkdir(parents=True)
    for name in ("", "runtime/"):
        (unit / name / "__init__.py").touch()
    (unit / "common.py").touch()
    (unit / "util.py").touch()
    (unit / "runtime" / "test_data.py").write_text(SIMPLE)
    command = [sys.executable, PROGRAM, str(unit.parent), "--only", "runtime/test_data.py"]
    command += ["--results", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"runtime/test_data\.py +1 +1 +1\n", done.stdout)
    assert "data_types.buffer_dtype is refused" in done.stdout
    assert re.search(r"Unexplained:\n +runtime/test_data\.py::test_unknown: .*new", done.stdout)
    (kept,) = (tmp_path / "results").iterdir()  # what is there is not run again
    known = [line for line in kept.read_text().splitlines(True) if "test_unknown" not in line]
    kept.write_text("".join(known))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_that_holds_no_tests_of_deepspeeds_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no unit/common.py" in done.stderr
