"""The mark `sampled(n)`: which cases the default run has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sampling import mark_sampled

CASES = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("short", ["a", "b"])
@pytest.mark.parametrize("long", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_sampled(long, short): ...

@pytest.mark.parametrize("value", range(4))
def test_whole(value): ...
"""


class Collection:
    """Takes part in a collection of pytest, and keeps the names of cases that are not slow."""

    names: list[str]

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        mark_sampled(items)
        self.names = [item.name for item in items if not item.get_closest_marker("slow")]
        return (yield)


def test_each_third_case_and_every_value_of_a_short_axis_stay(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    collection = Collection()
    words = [
        "--collect-only",
        "-qq",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:warnings",
    ]
    pytest.main([*words, f"--rootdir={tmp_path}", str(tmp_path)], plugins=[collection])
    sampled = [name for name in collection.names if name.startswith("test_sampled")]
    # of 0-a, 0-b, 1-a, 1-b, 2-a, 2-b, 4-a, 4-b; 0-b has the first "b"
    assert sampled == [f"test_sampled[{case}]" for case in ("0-a", "0-b", "1-b", "4-a")]
    assert len(collection.names) == len(sampled) + 4
