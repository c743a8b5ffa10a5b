"""Several ranks on one node: processes over gloo, each with its share of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import rank_programs
from tests.ranks import run_ranks
from tests.training import Run, assert_identical

PROGRAMS = "tests.rank_programs"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks found in one launch: processes take seconds to start."""
    return run_ranks(f"{PROGRAMS}:two_ranks", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", rank_programs.CASES)
def test_ranks_have_the_bits_of_one_that_accumulates(name: str, two: list[Any]) -> None:
    """In fp32 with 2 or 4 ranks: halves are exact, and sums come in the order of the ranks. The
    norm differs by its own rounding, since a parameter's squares are added in parts."""
    one = rank_programs.CASES[name]()
    losses = interleaved([found["bits"][name] for found in two])
    for found in two:
        run = found["bits"][name]
        assert_identical(Run(losses=losses, weights=run.weights), one)
        assert run.norms == pytest.approx(one.norms, rel=1e-12)
        assert run.norms == two[0]["bits"][name].norms


def interleaved(runs: list[Run]) -> list[torch.Tensor]:
    """The losses of all ranks in the order of their micro-batches."""
    return [loss for of_all in zip(*(run.losses for run in runs), strict=True) for loss in of_all]


@pytest.mark.parametrize("name", rank_programs.CLOSE)
def test_ranks_and_one_rank_differ_by_rounding(name: str, two: list[Any]) -> None:
    """Clipping multiplies by a number that is rounded differently in its last bit, and 16-bit
    gradients are rounded once more, after the mean. Adam's first steps turn a gradient of any size
    into one of the size of the learning rate, 1e-2: there the bound is of the loss."""
    one = rank_programs.CLOSE[name]()
    losses = interleaved([found["close"][name] for found in two])
    tolerance = 1e-5 if name == "clipped" else 2e-2
    for loss, expected in zip(losses, one.losses, strict=True):
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    norms = [found["close"][name].norms for found in two]
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(one.norms, rel=1e-6 if name == "clipped" else 2e-2)


def test_two_ranks_twice_are_identical(two: list[Any]) -> None:
    for found in two:
        for name, run in found["again"].items():
            assert_identical(run, found["bits"][name])
            assert run.norms == found["bits"][name].norms


def test_host_bytes_are_the_plans_and_half_of_one_ranks(two: list[Any]) -> None:
    for found in two:
        report = found["memory"]
        assert report["host_peak"] == report["host_planned"]
        assert report["gpu_peak"] == report["gpu_planned"]
        # bf16 with held gradients: 14 bytes a parameter, layers padded to pages of each rank.
        assert report["host_peak"] == 14 * report["padded_numel"] // 2
        assert "x 2 ranks" in report["plan"]


def test_the_nodes_weights_are_there_once(two: list[Any]) -> None:
    """Proportional set size: a page that two processes map counts half in each."""
    sizes = [found["memory"]["weights_pss"] for found in two]
    whole = two[0]["memory"]["weights_bytes"]
    assert sum(sizes) == pytest.approx(whole, rel=0.05)


def test_the_wire_carries_what_zero_3_needs(two: list[Any]) -> None:
    """Weights of streamed layers twice and of resident ones once, gradients once, and of each the
    part that other ranks have."""
    for found in two:
        traffic = found["traffic"]
        assert traffic["received"] == traffic["expected"], traffic


def test_one_rank_may_evaluate_alone(two: list[Any]) -> None:
    """And read the weights: nothing of it meets the other, and training goes on as without it."""
    expected = rank_programs.CASES["gpt"]()
    for found in two:
        assert_identical(
            Run(losses=[], weights=found["alone"].weights), Run(weights=expected.weights)
        )
    assert torch.equal(two[0]["alone loss"], two[1]["alone loss"])


def test_what_the_engine_says_of_ranks(two: list[Any]) -> None:
    for rank, found in enumerate(two):
        assert found["surface"] == {
            "global_rank": rank,
            "world_size": 2,
            "dp_world_size": 2,
            "train_batch_size": 12,
            "gradient_accumulation_steps": 3,
            "samples": found["surface"]["samples"],
        }
    seen = [sorted(found["surface"]["samples"]) for found in two]
    assert sorted(seen[0] + seen[1]) == list(range(8))


def test_an_overflow_on_one_rank_skips_the_step_on_all(two: list[Any]) -> None:
    for found in two:
        assert found["overflow"] == {"skipped": 1, "scale": 128.0, "unchanged": True}


def test_what_several_ranks_cannot_do_yet_is_refused(two: list[Any]) -> None:
    for found in two:
        refused = found["refused"]
        assert "resident_updates" in refused["gpu"]
        assert "stronghold.nvme" in refused["nvme"]
        assert "the model's parameters differ between the ranks" in refused["model"]
