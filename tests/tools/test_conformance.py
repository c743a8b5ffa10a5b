"""Suites of scripts/conformance: their tables are well-formed, their counts and pages are right."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import logging
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "conformance"
LOGGER = logging.getLogger("stronghold")

SIMPLE = """
import pytest

def test_passes(): pass

def test_buffers(): raise ValueError("data_types.buffer_dtype: got bf16. Refused.")

def test_unknown(): raise ValueError("something new")
"""


SUITES = (  # those whose rows are a table of `Row`
    "accelerate",
    "deepspeed",
)


def module(name: str) -> Any:
    """A module of conformance_suite."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return import_module(f"conformance_suite.{name}")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_each_suite_has_a_page_and_a_line_in_the_overview() -> None:
    overview = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    for name in module("suites").NAMES:
        assert (ROOT / "docs" / "conformance" / f"{name}.md").is_file(), name
        assert f"| `{name}` |" in overview, name
        assert module("suites").load_suite(name).about


@pytest.mark.parametrize("name", SUITES)
def test_each_row_has_a_reason_a_pattern_and_a_symptom_that_can_be_read(name: str) -> None:
    suite = module("suites").load_suite(name)
    for row in suite.rows:
        assert row.reason in suite.reasons, row
        assert row.pattern, row
        if row.symptom is not None:
            re.compile(row.symptom)
            assert not re.search(row.symptom, ""), f"{row} explains every failure"


@pytest.mark.parametrize("name", SUITES)
def test_each_reason_is_used(name: str) -> None:
    suite = module("suites").load_suite(name)
    assert {row.reason for row in suite.rows} == set(suite.reasons)


@pytest.mark.parametrize("name", SUITES)
def test_no_row_is_there_twice_and_no_file_is(name: str) -> None:
    suite = module("suites").load_suite(name)
    assert len(set(suite.rows)) == len(suite.rows)
    assert len(set(suite.files)) == len(suite.files)


@pytest.mark.parametrize("name", SUITES)
def test_a_pattern_of_one_file_names_a_file_that_is_run(name: str) -> None:
    suite = module("suites").load_suite(name)
    for row in suite.rows:
        file = row.pattern.split("::")[0]
        assert not file.endswith(".py") or any(
            fnmatch.fnmatchcase(known, file) for known in suite.files
        ), row


def test_a_failure_is_explained_by_its_symptom_alone() -> None:
    rows = module("deepspeed.table").ROWS
    explain = module("explanations").explain
    test = "v1/zero/test_zero_user_backward.py::TestX::test_y"
    assert explain(rows, test, "data_types.buffer_dtype: got bf16") == "buffers"
    assert explain(rows, test, "AssertionError: losses differ") is None
    assert explain(rows, test, "") is None


@pytest.mark.slow
def test_the_program_counts_and_fails_on_what_is_unexplained(tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "unit"
    (unit / "runtime").mkdir(parents=True)
    for name in ("", "runtime/"):
        (unit / name / "__init__.py").touch()
    (unit / "common.py").write_text("class DistributedExec: ...\nclass DistributedFixture: ...\n")
    (unit / "util.py").touch()
    (unit / "runtime" / "test_data.py").write_text(SIMPLE)
    command = [sys.executable, PROGRAM, "deepspeed", str(tmp_path)]
    command += ["--only", "runtime/test_data.py", "--results", str(tmp_path / "results")]
    command += ["--page", "--page-folder", str(tmp_path / "pages")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"runtime/test_data\.py +1 +1 +1\n", done.stdout)
    assert "data_types.buffer_dtype is refused" in done.stdout
    assert re.search(r"Unexplained:\n +runtime/test_data\.py::test_unknown: .*new", done.stdout)
    page = (tmp_path / "pages" / "deepspeed.md").read_text()
    assert "| `runtime/test_data.py` | 1 | 1 | 1 |" in page
    (kept,) = (tmp_path / "results").iterdir()  # what is there is not run again
    known = [line for line in kept.read_text().splitlines(True) if "test_unknown" not in line]
    kept.write_text("".join(known))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = [*command[:-3], "--reference", "--results", str(tmp_path / "theirs")]
    done = subprocess.run(reference, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"in all +1\n", done.stdout)


def kept(folder: Path, file: str, outcomes: dict[str, str]) -> None:
    """Write outcomes as the recorder does. A failure has the symptom of a refused key."""
    folder.mkdir()
    lines = [
        {
            "test": f"{file}::{test}",
            "outcome": outcome,
            "text": "" if outcome == "passed" else "data_types.buffer_dtype: got bf16",
        }
        for test, outcome in outcomes.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{file.replace('/', '_')}.jsonl").write_text(text)


def test_a_page_shows_what_the_projects_own_engine_passes(tmp_path: Path) -> None:
    file = "runtime/test_data.py"
    unit = tmp_path / "sources" / "tests" / "unit"
    (unit / "runtime").mkdir(parents=True)
    (unit / "common.py").touch()
    (unit / file).touch()
    (tmp_path / "sources" / "version.txt").write_text("0.1\n")
    ours = {"test_a": "passed", "test_b": "failed", "test_c": "failed"}
    kept(tmp_path / "ours", file, ours)
    theirs = {"test_a": "passed", "test_b": "passed", "test_c": "failed"}
    kept(tmp_path / "theirs", file, theirs)
    known = module("suites").load_suite("deepspeed")
    suite = dataclasses.replace(known, files=(file,))
    given = [str(tmp_path / "sources"), "--results", str(tmp_path / "ours"), "--page"]
    given += ["--page-folder", str(tmp_path), "--beside", str(tmp_path / "theirs")]
    assert suite.run(given) == 0
    page = (tmp_path / "deepspeed.md").read_text()
    assert ", tests of 0.1.\n" in page
    assert "own engine 2 of these tests pass" in page
    assert "Of them 1 pass here, and 1 cannot apply: 50%." in page
    assert f"| 2 | 1 | {known.reasons['buffers']} |" in page


# --- PEFT's table ---------------------------------------------------------------------------------

TABLE = """
import pytest
import torch
from torch import nn

from peft import LoraConfig

from .testing_common import PeftCommonTester

TEST_CASES = [
    ("one LoRA", "MLP", LoraConfig, {"target_modules": ["first"]}),
    ("attention LoRA", "Attention", LoraConfig, {"target_modules": ["attention"]}),
    ("restless LoRA", "Restless", LoraConfig, {"target_modules": ["first"]}),
    ("frozen LoRA", "Cut", LoraConfig, {"target_modules": ["first"]}),
]
CALLS = [0]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 2)

    def forward(self, X):
        return self.second(self.first(X.float()).relu())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.second = nn.MultiheadAttention(10, 2), nn.Linear(10, 2)

    def forward(self, X):
        X = X.float()
        return self.second(self.attention(X, X, X)[0])


class Restless(MLP):
    def forward(self, X):
        CALLS[0] += 1
        return super().forward(X) * CALLS[0]


class Cut(MLP):
    def forward(self, X):
        return super().forward(X).detach()


class MockTransformerWrapper:
    @classmethod
    def from_pretrained(cls, name):
        torch.manual_seed(0)
        return globals()[name]()


class TestPeft(PeftCommonTester):
    pass
"""


@pytest.fixture
def run_peft() -> Iterator[Callable[..., int]]:
    """`scripts/conformance peft` in this process, whose settings come back."""
    threads, level, path = torch.get_num_threads(), LOGGER.level, list(sys.path)
    suite = module("peft.suite").SUITE
    sys.path.insert(0, str(ROOT / "scripts"))
    yield lambda *given: suite.run([*map(str, given)])
    torch.set_num_threads(threads)
    LOGGER.setLevel(level)
    sys.path[:] = path


@pytest.mark.slow
def test_rows_of_peft_are_equal_refused_or_unexplained(
    run_peft: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that computes otherwise in each call, or trains nothing, is no equal row."""
    (tmp_path / "peft-1" / "tests").mkdir(parents=True)
    (tmp_path / "peft-1" / "tests" / "test_custom_models.py").write_text(TABLE)
    with tarfile.open(tmp_path / "peft-1.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "peft-1", "peft-1")
    page = tmp_path / "pages" / "peft.md"
    paged = ["--page", "--page-folder", page.parent]
    assert run_peft(tmp_path / "peft-1.tar.gz", *paged) == 1
    said = capsys.readouterr().out
    assert "1 equal, 0 equal with `resident_layers`, 1 refused, 2 unexplained" in said
    assert re.search(r"refused +attention LoRA: LoRA on `nn\.Multihead", said)
    assert re.search(r"unexplained +restless LoRA: AssertionError: micro-batch 0", said)
    assert re.search(
        r"unexplained +frozen LoRA: AssertionError: the plain loop has trained no adapter", said
    )
    assert "| 4 | in all |" in page.read_text()
    assert run_peft(tmp_path / "peft-1", "--only", "one", *paged) == 0
    assert "| 1 | in all |" in page.read_text()


def test_sources_without_pefts_tests_are_refused(
    run_peft: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_peft(tmp_path) == 2
    assert "give a checkout or a source distribution" in capsys.readouterr().err


def test_no_reason_of_a_refused_row_explains_every_error() -> None:
    reasons = module("peft.table").REASONS
    assert all(not re.search(reason.symptom, "") and reason.text for reason in reasons)


def test_a_folder_that_holds_no_tests_of_deepspeeds_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "deepspeed", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "has no tests/unit/common.py" in done.stderr
