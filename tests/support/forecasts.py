"""What tests of `stronghold plan` share: small sizes, the command's output."""

from __future__ import annotations

from typing import Any

import pytest

from stronghold.tools import cli
from stronghold.tools.estimate.estimate import Estimate, estimate, with_advice
from stronghold.tools.estimate.question import Question, question_from_options

SIZES = ["--layers", "6", "--hidden", "128", "--heads", "4", "--vocab", "500", "--seq", "64"]
SMALL = {"layers": 6, "hidden": 128, "heads": 4, "vocab": 500, "seq": 64, "machine": "rtx4090"}
PROGRESS = "stronghold plan: loading torch and transformers\n"


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The status, the answer, and the errors behind the line of progress."""
    try:
        status = cli.main(["plan", *arguments])
    except SystemExit as stopped:
        status = int(str(stopped.code))
    captured = capsys.readouterr()
    return status, captured.out, captured.err.removeprefix(PROGRESS)


def full_estimate(question: Question) -> Estimate:
    """The estimate that the command shows, with notes and gains."""
    return with_advice(estimate(question))


def asked(**changes: Any) -> Question:
    return question_from_options(**SMALL | changes)
