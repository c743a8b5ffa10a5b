"""Laws of the five cases: the search, what is counted as speed, and small runs that are real."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import case1_largest  # noqa: E402
import case2_each_largest  # noqa: E402
import case3_plains_largest  # noqa: E402
import case4_layers  # noqa: E402
import case5_window  # noqa: E402
import case6_tokens  # noqa: E402
import cases  # noqa: E402
from methods.task import Task, gpt_parameters, tflops_megatron  # noqa: E402

from tests.support.bench_rows import run_here  # noqa: E402

TINY = ["--machine", "emulated", "--hidden", "32", "--heads", "2", "--vocab", "64", "--seq", "16"]
TINY += ["--steps", "2", "--warmup", "1"]
SIMULATED = ["--machine", "simulated:v100-32gb"]


class Shelf(cases.Machine):
    """A machine on which a model fits up to a number of layers."""

    word = "shelf"

    def __init__(self, most: dict[str, int]) -> None:
        self._most = most
        self.asked: list[tuple[str, int]] = []

    def methods(self) -> list[str]:
        return list(self._most)

    def run(self, method: str, task: Task) -> cases.Row:
        self.asked.append((method, task.layers))
        if method not in self._most:
            return {"status": "not here", "reason": "needs a GPU"}
        if task.layers <= self._most[method]:
            return {"status": "ok", "num_parameters": task.layers * 10}
        return {"status": "out of memory", "reason": f"{task.layers} layers"}

    def compare(self, names: Sequence[str], task: Task) -> list[cases.Row]:
        return [self.run(name, task) for name in names]


# -- the search -----------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 100])
@pytest.mark.parametrize("start", [1, 2, 8])
def test_the_search_finds_the_largest_that_fits(most: int, start: int) -> None:
    asked: list[int] = []

    def fits(layers: int) -> bool:
        asked.append(layers)
        return layers <= most

    assert case1_largest.largest(fits, start=start) == (most, most + 1)
    assert len(asked) == len(set(asked)), "no size is tried twice"


def test_a_coarse_search_leaves_no_larger_gap_than_asked() -> None:
    low, high = case1_largest.largest(lambda layers: layers <= 45, start=8, resolution=4)
    assert low <= 45 < (high or 0) <= low + 4
    assert case1_largest.largest(lambda _: True, start=8, most=64) == (64, None)


def test_tries_survive_an_interruption(tmp_path: Path) -> None:
    file, task = tmp_path / "tries.json", Task()
    machine = Shelf({"plain": 5})
    first = case1_largest.run(["plain"], task, machine, file, 1)
    assert first[0]["layers"] == 5
    assert first[0]["reason"] == "6 layers"
    again = Shelf({"plain": 5})
    assert case1_largest.run(["plain"], task, again, file, 1) == first
    assert again.asked == []
    other = case1_largest.run(["plain"], dataclasses.replace(task, seq=128), again, file, 1)
    assert other[0]["layers"] == 5
    assert again.asked, "another task is another search"


def test_a_method_that_cannot_run_has_no_size_and_a_reason() -> None:
    (row,) = case1_largest.run(["superoffload"], Task(), Shelf({}), None, 1)
    assert row["layers"] is None
    assert "needs a GPU" in case1_largest.table([row], Task())


# -- figures --------------------------------------------------------------------------------------
def test_wrong_losses_have_no_speed() -> None:
    row = {"status": "ok", "verdict": "wrong", "samples_per_s": 9.0, "first_wrong_step": 2}
    assert cases.speed(row) is None
    assert cases.result_in_words(row) == "wrong losses from step 2"
    assert cases.speed({**row, "verdict": "equal"}) == 9.0


def test_the_published_figures_are_those_of_the_formulas() -> None:
    """The artifact's sizes in billions, and its TFLOPS from samples/s and k = 4."""
    for layers, billions in ((32, 1.717), (48, 2.522), (78, 4.033), (100, 5.141)):
        count = gpt_parameters(layers=layers, hidden=2048, vocab=50304, seq=1024)
        assert count / 1e9 == pytest.approx(billions, abs=6e-4)
    count = gpt_parameters(layers=32, hidden=2048, vocab=50304, seq=1024)
    assert tflops_megatron(count, 1024, 1 / 0.7496, True) == pytest.approx(10.54, abs=0.01)


def test_break_even_is_where_a_method_keeps_up_from_there_on() -> None:
    speeds = {
        100: {"plain": 10.0, "ours": 9.9},
        200: {"plain": 10.0, "ours": 5.0},
        400: {"plain": 10.0, "ours": 9.8},
        800: {"plain": 10.0, "ours": 10.0},
    }
    assert case6_tokens.break_even(speeds, "ours") == 400
    assert case6_tokens.break_even(speeds, "theirs") is None


# -- real runs, small -----------------------------------------------------------------------------
def left(folder: Path) -> dict[str, object]:
    """The JSON that a case left, beside a page and a picture."""
    (data,) = folder.glob("*.json")
    assert data.with_suffix(".md").read_text().startswith("# ")
    assert data.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    found: dict[str, object] = json.loads(data.read_text())
    assert found["simulated"] is ("simulated" in data.name)
    return found


def test_the_largest_size_on_the_emulated_device_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of 12,704 parameters at 16 bytes, and activations."""
    run_here(monkeypatch, ["plain"])
    arguments = [*TINY, "--gpu-memory", "420000", "--method", "plain", "--output", str(tmp_path)]
    assert case1_largest.main(arguments) == 0
    (row,) = left(tmp_path)["rows"]
    assert row["layers"] == 1
    assert "the cap is 420000" in row["reason"]
    assert 16 * row["num_parameters"] < row["device_peak_bytes"] <= 420_000


@pytest.mark.slow
def test_a_window_sweep_on_the_emulated_device_has_times_and_bytes(tmp_path: Path) -> None:
    arguments = [*TINY, "--layers", "3", "--sweep", "1", "--output", str(tmp_path)]
    assert case5_window.main(arguments) == 0
    (point,) = left(tmp_path)["sweep"]
    assert point["row"]["verdict"] == "equal"
    assert point["row"]["median_step_s"] > 0.0
    assert point["row"]["link_bytes"] > 0


# -- predicted, at the artifact's sizes -----------------------------------------------------------
@pytest.mark.slow
def test_predicted_cases_say_so_and_stand_beside_the_published_figures(tmp_path: Path) -> None:
    mains = {
        case1_largest: [],
        case2_each_largest: [],
        case3_plains_largest: [],
        case4_layers: ["--sweep", "16,32"],
        case5_window: ["--sweep", "2,15"],
        case6_tokens: ["--sweep", "1,4", "--layers", "32"],
    }
    for case, more in mains.items():
        folder = tmp_path / case.__name__
        window = [] if case is case5_window else ["--window", "15"]
        assert case.main([*SIMULATED, *more, *window, "--output", str(folder)]) == 0
        found = left(folder)
        assert found["simulated"] is True
        (page,) = folder.glob("*.md")
        assert "**Predicted**, not measured" in page.read_text()
        assert ("published*" in page.read_text()) is (case is not case6_tokens)


@pytest.mark.slow
def test_the_predicted_largest_size_is_bounded_by_the_hosts_memory(tmp_path: Path) -> None:
    """16 bytes per parameter in fp32 with held gradients, 90 GB."""
    assert case1_largest.main([*SIMULATED, "--window", "15", "--output", str(tmp_path)]) == 0
    (row,) = left(tmp_path)["rows"]
    assert 0.97 * 90e9 <= 16 * row["num_parameters"] <= 90e9
    assert "host memory" in row["reason"]


def test_a_prediction_is_not_saved_as_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        case3_plains_largest.main([*SIMULATED, "--save"])
    assert "a prediction is not a result" in capsys.readouterr().err


def test_others_are_not_predicted(tmp_path: Path) -> None:
    small = ["--layers", "16", "--window", "4"]
    arguments = [*SIMULATED, *small, "--method", "plain,stronghold", "--output", str(tmp_path)]
    assert case3_plains_largest.main(arguments) == 0
    rows = {row["method"]: row for row in left(tmp_path)["rows"]}
    assert rows["plain"]["status"] == "not here"
    assert rows["stronghold"]["samples_per_s"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("case", [case2_each_largest, case3_plains_largest, case4_layers])
def test_the_other_cases_run_on_the_emulated_device(case: object, tmp_path: Path) -> None:
    more = {
        case2_each_largest: ["--sizes", "plain=2,l2l=4"],
        case3_plains_largest: ["--layers", "2"],
        case4_layers: ["--sweep", "2,3", "--method", "stronghold"],
    }[case]
    assert case.main([*TINY, *more, "--output", str(tmp_path)]) == 0
    assert left(tmp_path)["case"]
