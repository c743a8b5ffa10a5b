"""`stronghold plan`: what fits, how fast, and what bounds it, before anything runs."""

from __future__ import annotations

from stronghold.forecast.answer import answer, sweep, with_fastest_chunk, with_largest_batch
from stronghold.forecast.page import config_text, draw, page, table
from stronghold.forecast.question import Question, understand

__all__ = [
    "Question",
    "answer",
    "config_text",
    "draw",
    "page",
    "sweep",
    "table",
    "understand",
    "with_fastest_chunk",
    "with_largest_batch",
]
