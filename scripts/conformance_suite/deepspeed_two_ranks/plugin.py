"""A pytest plugin under which DeepSpeed's own unit tests meet stronghold's engine, on two ranks.

Tests that DeepSpeed runs on one rank, or in no process group, are left out. Those for more than two
ranks run on two. The config of `deepspeed.zero.Init` has our section, too, as in a user's program.
"""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import pytest

from conformance_suite.deepspeed.process import adapt
from conformance_suite.deepspeed_two_ranks.ranks import run_test

pytest_plugins = ("conformance_suite.deepspeed.fixtures",)

NUM_RANKS = 2


def on_two_ranks(test: Any, request: Any, world_size: Any) -> None:
    """Run a distributed test, or a distributed fixture, on at most two ranks."""
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)
    folder = str(request.getfixturevalue("tmpdir"))
    for size in sorted({min(size, NUM_RANKS) for size in sizes}):
        test.world_size = size
        with tempfile.NamedTemporaryFile(delete=False, dir=folder, suffix="_store") as store:
            run_test(test, size, f"file://{store.name}")


def num_ranks_of(item: pytest.Item) -> int:
    """The number of ranks for which the test was written; 0 outside of a process group."""
    owner: Any = getattr(item, "cls", None)
    if not getattr(owner, "is_dist_test", False):
        return 0
    mark = item.get_closest_marker("world_size")
    size = owner.world_size if mark is None else mark.args[0]
    call: Any = getattr(item, "callspec", None)
    if call is not None:
        size = call.params.get("world_size", size)
    return size if isinstance(size, int) else max(size)


def pytest_configure(config: pytest.Config) -> None:
    adapt()
    importlib.import_module("unit.common").DistributedExec._launch_with_file_store = on_two_ranks


@pytest.hookimpl(tryfirst=True)  # before the recorder
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if num_ranks_of(item) >= NUM_RANKS]
