"""`stronghold plan`: the options become a question, and its estimate a page, JSON or a plot."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stronghold.errors import ConfigError
from stronghold.tools.answer import Answer, write_text
from stronghold.tools.estimate.advice import with_advice
from stronghold.tools.estimate.estimate import estimate, with_fastest_chunk, with_largest_batch
from stronghold.tools.estimate.page import config_text, page
from stronghold.tools.estimate.question import Question, question_from_options


def run(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Estimate what `arguments` ask for. The status is 1 if nothing fits."""
    _check_output(arguments)
    question = _question(arguments)
    if arguments.sweep:
        # imports matplotlib, which others do without
        from stronghold.tools.estimate import sweep

        png = arguments.output or Path(f"sweep_{arguments.sweep}.png")
        points = sweep.sweep(question, arguments.sweep)
        sweep.draw(points, arguments.sweep, png)
        text = f"{sweep.table(points, arguments.sweep)}\n\nThe plot is in {png}"
        return Answer(text=text)
    answer = with_advice(estimate(question))
    path = arguments.write
    if path is not None and answer.config is not None:
        write_text("--write", path, config_text(answer.config) + "\n")
    if arguments.json:
        text = json.dumps(answer.as_json(), indent=2)
    else:
        text = page(answer, config_path=None if path is None else str(path))
    return Answer(text=text, status=0 if answer.fits else 1)


def _question(arguments: argparse.Namespace) -> Question:
    """The question, with the batch and the chunk that the options leave to the estimate."""
    options = inspect.signature(question_from_options).parameters
    question = question_from_options(**{name: getattr(arguments, name) for name in options})
    if arguments.batch is None:
        if arguments.chunk == 0:
            question = replace(question, chunk=1)
        question = with_largest_batch(question)
    if arguments.chunk == 0:
        question = with_fastest_chunk(question)
    return question


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.output is not None and not arguments.sweep:
        raise ConfigError(
            "--output: is for the plot of --sweep; expected --sweep, or --write for the config"
        )
    for option, value in (("--write", arguments.write), ("--json", arguments.json)):
        if value and arguments.sweep:
            raise ConfigError(f"{option} and --sweep: expected one of them; a sweep is many plans")
