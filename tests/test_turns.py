"""Laws of turns: a test that is alone has the machine to itself, the others share it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.quiet import law_of_time
from tests.turns import turn

PATIENCE_S = 20.0  # a wait that must end; only a failing test ever takes so long


def test_those_that_are_not_alone_run_beside_each_other(tmp_path: Path) -> None:
    meet = threading.Barrier(3)

    def run() -> None:
        with turn(tmp_path, alone=False):
            meet.wait(PATIENCE_S)

    with ThreadPoolExecutor(3) as threads:
        for ended in [threads.submit(run) for _ in range(3)]:
            ended.result()


def test_one_that_is_alone_meets_nobody_and_gets_its_turn(tmp_path: Path) -> None:
    inside, met, over = [0], [0], threading.Event()
    counted = threading.Lock()

    def run(alone: bool) -> None:
        with turn(tmp_path, alone=alone):
            with counted:
                inside[0] += 1
                met[0] = max(met[0], inside[0] if alone else 0)
            with counted:
                met[0] = max(met[0], inside[0] if alone else 0)
                inside[0] -= 1

    def again_and_again() -> None:
        while not over.is_set():
            run(alone=False)

    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(again_and_again) for _ in range(3)]
        try:
            for _ in range(20):
                threads.submit(run, True).result(PATIENCE_S)
        finally:
            over.set()
        for ended in others:
            ended.result(PATIENCE_S)
    assert met == [1]


def test_a_law_of_time_is_alone() -> None:
    @law_of_time
    def law() -> None: ...

    assert "alone" in [mark.name for mark in law.pytestmark]  # type: ignore[attr-defined]


@pytest.mark.alone
def test_the_mark_is_known(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("alone")
