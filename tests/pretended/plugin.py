"""`python -m pytest -p tests.pretended.plugin`: tests find a GPU, the pretended one.

Loaded by `-p`, before any conftest imports torch. A test that is not `alone` shares the device with
another process, as under pytest-xdist. Laws that only a GPU keeps (`deselected`) are left out, with
the reason in the summary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.pretended import install
from tests.pretended.deselected import DESELECTED

os.environ["DS_ACCELERATOR"] = "cuda"
try:
    extension = install.install()
except (install.Refused, RuntimeError) as error:
    raise pytest.UsageError(str(error)) from None

from tests.pretended import kernels, process_groups  # they import torch

kernels.install(extension)
process_groups.install()

SKIPPED = pytest.StashKey[dict[str, int]]()


def pytest_report_header() -> str:
    return f"pretended device: {extension.__file__}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    install.neighbour.there = item.get_closest_marker("alone") is None
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [item.nodeid.split("[")[0] for item in items]
    out = [item for item, name in zip(items, names, strict=True) if name in DESELECTED]
    config.stash[SKIPPED] = {name: names.count(name) for name in DESELECTED if name in names}
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in terminalreporter.config.stash.get(SKIPPED, {}).items():
        terminalreporter.write_line(f"DESELECTED {name} ({count}): {DESELECTED[name]}")
