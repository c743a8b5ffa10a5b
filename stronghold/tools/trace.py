"""`stronghold trace`: reads the trace of a run and draws it as a timeline."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from stronghold.telemetry import trace
from stronghold.tools.answer import Answer
from stronghold.tools.plot import draw_timeline


def run(arguments: argparse.Namespace, _: Callable[[str], None]) -> Answer:
    """Draw `arguments.file`. The answer is the path of the picture."""
    spans = trace.read(arguments.file)
    png = arguments.output or arguments.file.with_suffix(".png")
    draw_timeline(spans, png, step=arguments.step, from_s=arguments.from_s, to_s=arguments.to_s)
    return Answer(text=str(png))
