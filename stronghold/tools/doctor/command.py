"""`stronghold doctor`: measures the machine and writes its profile, or prints a bug report."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from stronghold.errors import ConfigError
from stronghold.plan import machine
from stronghold.tools.answer import Answer, write_text
from stronghold.tools.doctor.examine import examine, gpu_name
from stronghold.tools.doctor.page import page
from stronghold.tools.doctor.report import report

BAR = "{desc:<40} {percentage:3.0f}% |{bar}| {elapsed}"


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Answer:
    """Print the figures and problems of this machine, and write its profile; or the report.

    The status is 2 if the profile could not be written. The table is printed even so.
    """
    if arguments.report:
        return _report(arguments)
    for option, value in (("--config", arguments.config), ("--output", arguments.output)):
        if value is not None:
            raise ConfigError(f"{option}: is for the report; expected --report beside it")
    with tqdm(total=100, bar_format=BAR, leave=False, disable=None) as bar:
        findings = examine(
            arguments.device, arguments.path, quick=arguments.quick, progress=_Bar(bar)
        )
    path = arguments.json or machine.default_path(gpu_name(arguments.device))
    try:
        findings.profile.save(path)
    except OSError as error:
        progress(f"--json {path}: cannot be written: {error}")
        return Answer(text=page(findings), status=2)
    return Answer(text=f"{page(findings)}\n\nThe profile is in {path}")


class _Bar:
    """Shows the progress of the measurements."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def __call__(self, measured: str, share: float) -> None:
        self._bar.set_description(measured, refresh=False)
        self._bar.n = round(100 * share)
        self._bar.refresh()


def _report(arguments: argparse.Namespace) -> Answer:
    text = report(arguments.config)
    if arguments.output is None:
        return Answer(text=text)
    write_text("-o", arguments.output, text + "\n")
    return Answer(text=f"The report is in {arguments.output}. Read it before you send it.")
