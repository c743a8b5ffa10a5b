"""A pytest plugin that makes DeepSpeed's distributed fixtures known to the installed pytest.

DeepSpeed writes such a fixture as a class, `DistributedFixture`, and marks it for a pytest older
than 8.4. A newer one looks for functions of `pytest.fixture`, so each class gets one.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """Before a module's tests are collected: a fixture for each of its distributed fixtures."""
    if not isinstance(collector, pytest.Module):
        return
    base = importlib.import_module("unit.common").DistributedFixture
    try:
        names = dict(vars(collector.obj))
    except Exception:  # the file cannot be imported: pytest reports that next
        return
    for name, value in names.items():
        is_fixture = inspect.isclass(value) and issubclass(value, base) and value is not base
        if is_fixture and value.world_size is not None:
            setattr(collector.obj, f"fixture_{name}", fixture_of(value))


def fixture_of(distributed: Any) -> Any:
    """A fixture of pytest's that runs the distributed one."""

    def run(request: pytest.FixtureRequest) -> None:
        distributed()(request)

    return pytest.fixture(run, name=distributed.__name__)
