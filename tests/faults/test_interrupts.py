"""Ctrl-C at any moment, then the checkpoint on the same engine: the losses of a run that nobody
interrupted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import children

PROGRAM = """
import faulthandler
from tests.support.interrupts import main
faulthandler.enable()
main()
"""


def interrupt(folder: Path, first: int, count: int) -> None:
    """These seeds of `tests.support.interrupts`, in a process of their own, which may hang."""
    with (folder / "said").open("w+") as said:
        status, errors = children.run(PROGRAM, folder, first, count, folder=folder, stdout=said)
    text = (folder / "said").read_text()
    lines = [line for line in text.splitlines() if line.startswith("seed ")]
    assert status == 0, f"{lines[-1:]}\n{errors[-6000:]}"
    assert len(lines) == count
    landed = [line for line in lines if "nothing" not in line]
    assert len(landed) > count // 2, "most came too late to interrupt anything"


def test_an_interrupt_leaves_nothing_that_a_load_does_not_heal(tmp_path: Path) -> None:
    interrupt(tmp_path, 0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_two_hundred_interrupts_leave_nothing(first: int, tmp_path: Path) -> None:
    interrupt(tmp_path, first, 20)
