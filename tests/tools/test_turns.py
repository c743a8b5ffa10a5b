"""Laws of turns: a test that is alone has the machine to itself, the others share it. And a law of
time forgives lateness, and where others use the machine alone; nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import quiet
from tests.support.quiet import law_of_time
from tests.support.turns import turn

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0  # a wait that must end; only a failing test ever takes so long
MEETING = f"""
import pathlib, time
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("me", [0, 1])
def test_meeting(me):
    here = pathlib.Path(__file__).parent
    (here / str(me)).touch()
    end = time.monotonic() + {PATIENCE_S}
    while not (here / str(1 - me)).exists():
        assert time.monotonic() < end, "the other one waits for this one to end"
        time.sleep(0.01)
"""


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


@pytest.mark.slow
def test_tests_on_a_gpu_run_beside_each_other(tmp_path: Path) -> None:
    """In shards: a process that waits for the others has a context on the GPU for nothing."""
    (tmp_path / "conftest.py").write_text("from tests import conftest\nconftest.HAS_CUDA = True\n")
    (tmp_path / "test_meeting.py").write_text(MEETING)
    words = ["-q", "-n", "2", "-p", "no:cacheprovider", "-p", "tests.conftest", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert "2 passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.alone
def test_the_mark_is_known(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("alone")


# -- laws of time ----------------------------------------------------------------------------------


def test_a_late_law_is_tried_again() -> None:
    tries = []

    @quiet.law_of_time
    def law() -> None:
        tries.append(1)
        quiet.on_time(len(tries) == quiet.ATTEMPTS, "late")

    law()
    assert len(tries) == quiet.ATTEMPTS


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        ([None, None, None], quiet.Late),
        (["others work here", None, None], pytest.skip.Exception),
        ([None, None, "others work here"], pytest.skip.Exception),
    ],
)
def test_a_law_that_is_always_late_fails_where_the_machine_is_quiet_each_time(
    reasons: list[str | None], outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "busy", reasons.pop)
    monkeypatch.setattr(quiet.OtherProcesses, "busy", lambda _: None)

    @quiet.law_of_time
    def law() -> None:
        quiet.on_time(False, "late")

    with pytest.raises(outcome):
        law()
    assert reasons == []


def test_another_process_makes_the_machine_busy() -> None:
    others = quiet.OtherProcesses()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        reason = others.busy()
    finally:
        other.kill()
        other.wait()
    assert "others used" in str(reason)


def test_another_failure_is_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "busy", lambda: "others work here")
    tries = []

    @quiet.law_of_time
    def law() -> None:
        tries.append(1)
        assert tries == []

    with pytest.raises(AssertionError):
        law()
    assert len(tries) == 1
