"""`stronghold plan`: the options become a question, and its estimate a page, a table or JSON."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from stronghold.tools import Answer, write_text
from stronghold.tools.estimate.estimate import Estimate, estimate, with_advice, with_largest_batch
from stronghold.tools.estimate.page import config_text, page, table
from stronghold.tools.estimate.question import Question, question_from_options

# The first value of a sweep; each further one is twice the one before it.
FIRST = {"batch": 1, "chunk": 1, "seq": 512}
MOST_POINTS = 9  # of a sweep


def run(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Estimate what `arguments` ask for. The status is 1 if nothing fits."""
    options = inspect.signature(question_from_options).parameters
    question = question_from_options(**{name: getattr(arguments, name) for name in options})
    if arguments.batch is None:
        question = with_largest_batch(question)
    if arguments.sweep is not None:
        points = dict(_sweep(question, arguments.sweep))
        fits = any(point.fits for point in points.values())
        figures: object = [point.as_json() for point in points.values()]
        text = table(points, arguments.sweep)
    else:
        answer = with_advice(estimate(question))
        fits, figures, path = answer.fits, answer.as_json(), arguments.write
        if path is not None and answer.config is not None:
            write_text("--write", path, config_text(answer.config) + "\n")
        text = page(answer, config_path=None if path is None else str(path))
    if arguments.json:
        text = json.dumps(figures, indent=2)
    return Answer(text=text, status=0 if fits else 1)


def _sweep(question: Question, axis: str) -> Iterator[tuple[int, Estimate]]:
    """Estimates along "batch", "chunk" or "seq", up to the first that does not fit."""
    model = question.model
    for doublings in range(MOST_POINTS):
        value = FIRST[axis] << doublings
        if axis == "chunk":
            if value > question.batch:
                return
            asked = replace(question, chunk=value)
        elif axis == "seq":
            if value > (model.positions or value):
                return
            asked = replace(question, seq=value, model=model.with_positions(value))
        else:
            asked = replace(question, batch=value)
        point = estimate(asked)
        yield value, point
        if not point.fits:
            return
