"""On a GPU, operators that add in any order would hide which side of a comparison is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.training import operators_in_one_order


@pytest.fixture(autouse=True)
def same_order_in_every_run() -> Iterator[None]:
    with operators_in_one_order():
        yield
