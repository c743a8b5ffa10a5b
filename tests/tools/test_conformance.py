"""scripts/conformance.py: its tables explain what they name alone, and its counts are right."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "conformance.py"

UNIT_TESTS = """
def test_passes(): pass

def test_buffers(): raise ValueError("data_types.buffer_dtype: got bf16. Refused.")

def test_unknown(): raise ValueError("something new")

class TestFP16OptimizerForMoE:
    def test_waits(self): raise AssertionError("it was run")
"""

COMMON = """
class DistributedExec: ...

class DistributedFixture:
    world_size = None
"""

PEFT_TABLE = """
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


def run(*given: object) -> tuple[int, str]:
    command = [sys.executable, PROGRAM, *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_no_pattern_explains_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    conformance = importlib.import_module("conformance")
    tables = [suite.rows for suite in conformance.SUITES.values()] + [conformance.PEFT]
    for rows in tables:
        assert len({pattern for pattern, _ in rows}) == len(rows)
        for pattern, reason in rows:
            assert reason, pattern
            assert not re.search(pattern, "test_x\nE AssertionError: losses differ"), pattern


@pytest.mark.slow
def test_it_counts_and_fails_on_what_is_unexplained(tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "unit"
    (unit / "runtime").mkdir(parents=True)
    for name in ("", "runtime/"):
        (unit / name / "__init__.py").touch()
    (unit / "common.py").write_text(COMMON)
    (unit / "util.py").touch()
    (unit / "runtime" / "test_data.py").write_text(UNIT_TESTS)
    code, said = run("deepspeed", tmp_path, "--only", "runtime/test_data.py", "--reference")
    assert code == 1, said
    assert re.search(r"^runtime/test_data\.py +1 +2 +1$", said, re.MULTILINE), said
    assert re.search(r" 2  uses what is refused by name, with the way out", said), said
    assert re.search(r"Unexplained:\n.*test_unknown: ValueError: something new", said), said
    assert re.search(r"^of those that pass with DeepSpeed's engine +1 +0 +0$", said, re.MULTILINE)
    code, said = run("deepspeed", tmp_path, "--only", "test_fp16.py")
    assert code == 1
    assert "file or directory not found" in said


@pytest.mark.slow
def test_rows_of_peft_pass_cannot_apply_or_fail(tmp_path: Path) -> None:
    """A model that computes otherwise in each call, or trains nothing, does not pass."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_custom_models.py").write_text(PEFT_TABLE)
    code, said = run("peft", tmp_path)
    assert code == 1, said
    assert re.search(r"in all +1 +1 +2$", said, re.MULTILINE), said
    assert "1  LoRA on nn.MultiheadAttention" in said
    assert "restless LoRA: AssertionError: micro-batch 0" in said
    assert "frozen LoRA: AssertionError: the plain loop has trained no adapter" in said
    assert run("peft", tmp_path, "--only", "one LoRA")[0] == 0
