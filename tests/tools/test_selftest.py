"""Laws of `stronghold test`: four lines, an early first word, and a status."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from stronghold.tools import cli
from stronghold.tools.doctor import selftest
from stronghold.train.job import MemoryReport
from tests.support.children import FOREIGN
from tests.support.quiet import law_of_time, on_time

CPU = torch.device("cpu")
WORDS = ["bits:   ok, ", "memory: ok, ", "link:   ok, ", "To report a problem, "]


# what a test run sets, and a user's terminal does not
CHOSEN = ("RANK", "WORLD_SIZE", "DS_ACCELERATOR")


def test_three_checks_and_what_to_send() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in CHOSEN}
    result = subprocess.run(
        [sys.executable, "-m", "stronghold.tools.cli", "test"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert not FOREIGN.search(result.stderr)
    lines = result.stdout.splitlines()
    assert [line[: len(word)] for line, word in zip(lines, WORDS, strict=True)] == WORDS
    assert lines[-1].endswith("stronghold version")
    if not torch.cuda.is_available():
        assert "on the emulated device" in lines[0]
        assert "there is no GPU" in lines[2]


@law_of_time
def test_the_first_word_comes_within_two_seconds() -> None:
    begun_s = time.perf_counter()
    command = [sys.executable, "-m", "stronghold.tools.cli", "test"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        seconds = time.perf_counter() - begun_s
        process.kill()
    assert line == "stronghold test: loading torch and DeepSpeed\n"
    on_time(seconds < 2, seconds)


def test_a_bit_that_differs_fails() -> None:
    plain = {"loss 1": torch.ones(()), "a": torch.ones(2), "b": torch.ones(3)}
    windowed = {name: tensor.clone() for name, tensor in plain.items()}
    assert selftest.compare(windowed, plain, CPU).passed
    windowed["b"][1] += 2.0**-23
    check = selftest.compare(windowed, plain, CPU)
    assert not check.passed
    assert str(check).startswith("bits:   FAILED, 1 of 3 losses and weights differ")
    assert str(check).endswith("the first is b")


@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_a_byte_beside_the_plan_fails(tier: str) -> None:
    planned = dict.fromkeys(("gpu_planned", "gpu_peak", "host_planned", "host_peak"), 4096)
    planned["host_activations"] = 0
    assert selftest.check_memory(MemoryReport(**planned)).passed
    planned[f"{tier}_peak"] += 1
    assert not selftest.check_memory(MemoryReport(**planned)).passed


def test_a_check_that_fails_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [selftest.Check(name, name != "link", "words") for name in ("bits", "memory", "link")]
    monkeypatch.setattr(selftest, "run", lambda progress: checks)
    assert cli.main(["test"]) == 1
    assert "link:   FAILED, words" in capsys.readouterr().out
