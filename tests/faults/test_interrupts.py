"""Ctrl-C at any moment, then the checkpoint on the same engine: the losses of a run that nobody
interrupted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 540.0  # twenty seeds take less than a minute here: a hang fails the test


def interrupt(folder: Path, first: int, count: int) -> None:
    """These seeds of `tests.support.interrupts`, in a process of their own."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.interrupts"]
    done = subprocess.run(
        [*command, str(folder), str(first), str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
    assert done.returncode == 0, f"{lines[-1:]}\n{done.stderr[-6000:]}"
    assert len(lines) == count
    landed = [line for line in lines if "nothing" not in line]
    assert len(landed) > count // 2, "most came too late to interrupt anything"


def test_an_interrupt_leaves_nothing_that_a_load_does_not_heal(tmp_path: Path) -> None:
    interrupt(tmp_path, 0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_two_hundred_interrupts_leave_nothing(first: int, tmp_path: Path) -> None:
    interrupt(tmp_path, first, 20)
