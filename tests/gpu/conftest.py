"""On a GPU, operators that add in any order would hide which side of a comparison is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def same_order_in_every_run() -> Iterator[None]:
    """Deterministic operators where torch has them, a warning where it has none."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write beside the lanes
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
