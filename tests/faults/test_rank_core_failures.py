"""A rank of several that own layers fails: the others end, and name it."""

from __future__ import annotations

import pickle
from itertools import product
from pathlib import Path

import pytest

from tests.support.rank_core import FAILS_IN, HOWS, LIMIT_S
from tests.support.ranks import Launch

SECONDS = 3.0  # a busy machine takes one of them


LAUNCHES = ["2 1", "2 2", "4 2", "4 1"]
QUICK = [("raises", "2 1"), ("dies", "2 2")]  # a launch takes seconds


@pytest.mark.parametrize(
    ("how", "launch"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(HOWS, LAUNCHES)
    ],
)
def test_the_other_ranks_end_in_time_and_name_it(how: str, launch: str, tmp_path: Path) -> None:
    num_ranks, num_nodes = map(int, launch.split())
    with Launch(
        run="tests.support.rank_core:failing",
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        folder=tmp_path,
        environment={"HOW": how},
    ) as processes:
        processes.finish(timeout_s=60.0)
        said = "\n".join(map(processes.output, range(num_ranks)))
    for rank in {*range(num_ranks)} - {1}:
        result = tmp_path / f"result-{rank}"
        assert result.exists(), said
        kind, words, seconds = pickle.loads(result.read_bytes())
        assert kind == "RankError", f"rank {rank}: {kind}: {words}"
        on_its_node = rank // (num_ranks // num_nodes) == 1 // (num_ranks // num_nodes)
        if how != "hangs" or on_its_node:
            assert "rank 1 " in words, words
        assert "raises" not in how or "the program's own error" in words, words
        assert seconds < SECONDS + (LIMIT_S if how == "hangs" else 0.0), words
    if "dies" not in how:
        kind, words, _ = pickle.loads((tmp_path / "result-1").read_bytes())
        # What a lane has met is raised by the next operation on a lane or of ranks.
        is_ours = how in ("raises", "hangs", "raises in its step")
        assert kind in (["ArithmeticError"] if is_ours else ["LaneError", "RankError"]), words
        assert "the program's own error" in words
    assert FAILS_IN < 5
