"""A share of a test's cases for the default run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

LAWS = Path(__file__).parents[1] / "laws"
OF_LAWS = 3


def mark_sampled(items: Iterable[pytest.Item]) -> None:
    """Mark cases of laws, and of tests with the mark `sampled(n)`, as slow.

    Of the cases that are not slow yet, each n-th (of a law each third) stays, from the first on. So
    does the first case with a value of a parameter that has at most n values.
    """
    cases: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_sampled = item.get_closest_marker("sampled") or LAWS in item.path.parents
        if is_sampled and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            cases[item.parent, item.originalname].append(item)
    for of_test in cases.values():
        _mark(of_test)


def _mark(cases: list[pytest.Function]) -> None:
    mark = cases[0].get_closest_marker("sampled")
    (every,) = mark.args if mark else (OF_LAWS,)
    num_values = Counter(name for name, _ in set().union(*map(_values, cases)))
    seen: set[tuple[str, int]] = set()
    for number, case in enumerate(cases):
        short = {value for value in _values(case) if num_values[value[0]] <= every}
        if number % every and short <= seen:
            case.add_marker(pytest.mark.slow)
        seen |= short


def _values(case: pytest.Function) -> set[tuple[str, int]]:
    """The case's values of parameters. Each is known by its identity: some have no hash."""
    return {(name, id(value)) for name, value in case.callspec.params.items()}
