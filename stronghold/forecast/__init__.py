"""`stronghold plan`: what fits, how fast, and what bounds it, before anything runs."""

from __future__ import annotations

from pathlib import Path

from stronghold.forecast.answer import answer, with_largest_batch
from stronghold.forecast.page import config_text, page
from stronghold.forecast.question import Question, Words
from stronghold.forecast.question import understand as _understand

__all__ = ["Question", "Words", "answer", "config_text", "page", "sweep", "understand"]


def understand(words: Words) -> Question:
    """The question that the options ask, with the largest micro-batch that fits where the options
    leave it to us; ConfigError, with the option's name, for a mistake.
    """
    question = _understand(words)
    return with_largest_batch(question) if words.batch is None else question


def sweep(question: Question, axis: str, png: Path) -> str:
    """Predict along an axis, draw it to `png`; a table of it in words."""
    from stronghold.forecast import sweeps  # matplotlib: only for those who draw

    points = sweeps.sweep(question, axis)
    sweeps.draw(points, axis, f"{question.subject.name}, {question.machine.name}", png)
    return f"{sweeps.table(points, axis)}\n\nThe plot is in {png}"
