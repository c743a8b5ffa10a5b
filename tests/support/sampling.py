"""A share of a test's cases for the default run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LAWS = TESTS / "laws"
OF_LAWS = 3
# The default run has these on both rooms.
ON_BOTH_ROOMS = (
    *(f"laws/test_{name}.py" for name in ("bits", "fuzzed_configs", "recompute", "attention")),
    *(f"laws/test_{name}.py" for name in ("aliases", "checkpoint_resume", "chunks", "programs")),
    *(f"laws/test_{name}.py" for name in ("chunk_effects", "early_updates", "reads")),
    *(f"laws/test_{name}.py" for name in ("weights_read", "weights_written")),
    *(f"border/test_{name}.py" for name in ("fragments", "named_weights", "offload_states")),
    "units/test_pinned.py",
    *(f"faults/test_{name}.py" for name in ("checkpoint_files", "checkpoint_crash")),
    "faults/test_second_thread.py",
)
# These train on the old room, in which nothing changes any more. Of them, and on the old room of
# those above, the default run takes a third of the cases that it would take else.
ON_THE_OLD_ROOM = (
    *(f"laws/test_{name}.py" for name in ("dtypes", "first_batch")),
    *(f"laws/test_{name}.py" for name in ("fourth_home", "frozen_formats", "memory")),
    *(f"laws/test_{name}.py" for name in ("nvme_memory", "optimizer", "packed_bases", "ranks")),
    "faults/test_interrupts.py",
    "faults/test_nvme_training_faults.py",
)
FEWER = 3


def mark_sampled(items: Iterable[pytest.Item]) -> None:
    """Mark cases of laws, and of tests with the mark `sampled(n)`, as slow.

    Of the cases that are not slow yet, each n-th (of a law each third) stays, from the first on. So
    does the first case with a value of a parameter that has at most n values. Files on the old room
    keep a third of those, and none of these.
    """
    from tests.support.room import is_next  # here: `scripts/test` asks for the names alone

    old = () if is_next() else (*ON_BOTH_ROOMS, *ON_THE_OLD_ROOM)
    paths = {TESTS / path for path in old}
    cases: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_sampled = item.get_closest_marker("sampled") or LAWS in item.path.parents
        if is_sampled and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            cases[item.parent, item.originalname].append(item)
    for of_test in cases.values():
        _mark(of_test, FEWER if of_test[0].path in paths else 1)


def _mark(cases: list[pytest.Function], fewer: int) -> None:
    mark = cases[0].get_closest_marker("sampled")
    (every,) = mark.args if mark else (OF_LAWS,)
    num_values = Counter(name for name, _ in set().union(*map(_values, cases)))
    seen: set[tuple[str, int]] = set()
    for number, case in enumerate(cases):
        short = {value for value in _values(case) if num_values[value[0]] <= every}
        if number % (every * fewer) and (short <= seen or fewer > 1):
            case.add_marker(pytest.mark.slow)
        seen |= short


def _values(case: pytest.Function) -> set[tuple[str, int]]:
    """The case's values of parameters. Each is known by its identity: some have no hash."""
    return {(name, id(value)) for name, value in case.callspec.params.items()}


if __name__ == "__main__":
    print(*(f"tests/{path}" for path in ON_BOTH_ROOMS), sep="\n")
