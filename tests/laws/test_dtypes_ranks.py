"""Several ranks with parameters of several dtypes: each layer is reduced in its own dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_ranks import interleaved
from tests.models import loss_of, without_caches
from tests.support import rank_dtypes
from tests.support.ranks import ranks_once
from tests.support.training import Run, assert_identical

# By default test_ranks.py has two ranks, and test_dtypes.py has several dtypes.
TWO_RANKS = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks_once("tests.support.rank_dtypes:two_ranks", 2, tmp_path_factory)


@TWO_RANKS
@pytest.mark.parametrize("name", rank_dtypes.CASES)
def test_ranks_have_the_bits_of_one_that_accumulates(name: str, two: list[Any]) -> None:
    one = rank_dtypes.CASES[name]()
    losses = interleaved([found["bits"][name] for found in two])
    for found in two:
        run = found["bits"][name]
        assert_identical(Run(losses=losses, weights=run.weights), one)
        assert run.norms == pytest.approx(one.norms, rel=1e-12)
        assert run.norms == two[0]["bits"][name].norms
    assert len({weight.dtype for weight in one.weights.values()}) > 1


@TWO_RANKS
@pytest.mark.parametrize("case", rank_dtypes.GRADIENTS)
def test_gradients_are_the_mean_of_the_ranks_in_each_parameters_dtype(
    case: str, two: list[Any]
) -> None:
    name, _ = rank_dtypes.GRADIENTS[case]
    sums: dict[str, torch.Tensor] = {}
    for number in range(2):
        model, make_batch = rank_dtypes.MODELS[name]()
        loss_of(without_caches(model)(**make_batch(number))).backward()
        for parameter, p in model.named_parameters():
            if p.grad is not None:
                sums[parameter] = sums[parameter] + p.grad if number else p.grad
    for found in two:
        assert found["gradients"][case].keys() == sums.keys()
        for parameter, gradient in found["gradients"][case].items():
            assert torch.equal(gradient, (sums[parameter] / 2).float()), parameter


@pytest.mark.slow
@pytest.mark.parametrize("name", rank_dtypes.NODES)
def test_nodes_have_the_bits_of_one_rank_that_accumulates(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = "tests.support.rank_dtypes:two_nodes"
    two = ranks_once(run, 2, tmp_path_factory, num_nodes=2)
    one = rank_dtypes.CASES[name]()
    losses = interleaved([found[name] for found in two])
    for found in two:
        assert_identical(Run(losses=losses, weights=found[name].weights), one)


@TWO_RANKS
@pytest.mark.parametrize("name", rank_dtypes.FILES)
def test_files_of_each_rank_never_change_a_bit(name: str, two: list[Any]) -> None:
    for found in two:
        on_files, in_memory = found["files"][name]
        assert_identical(on_files, in_memory)
        assert on_files.norms == pytest.approx(in_memory.norms, rel=1e-12)


@TWO_RANKS
@pytest.mark.parametrize("name", rank_dtypes.MEASURED)
def test_what_two_ranks_save_resumes_on_two_and_on_one(
    name: str, two: list[Any], tmp_path: Path
) -> None:
    saved = two[0]["checkpoints"][name]["saved"]
    elsewhere = {
        "one": rank_dtypes.session(name, None, Path(saved), steps=2),
        "one, in files": rank_dtypes.session(
            name, None, Path(saved), steps=2, nvme={"path": str(tmp_path), "spill": "weights"}
        ),
    }
    for found in two:
        mine = found["checkpoints"][name]
        for way in (mine["on"], mine["on files"], *elsewhere.values()):
            assert all(map(torch.equal, way["losses"], mine["straight"]["losses"][2:]))
            for parameter, weight in mine["straight"]["weights"].items():
                assert way["weights"][parameter].dtype is weight.dtype
                assert torch.equal(way["weights"][parameter], weight), parameter


@TWO_RANKS
@pytest.mark.parametrize("precision", ["bf16", "lean"])
@pytest.mark.parametrize("name", rank_dtypes.MEASURED)
def test_bytes_of_each_rank_are_those_of_what_it_owns(
    name: str, precision: str, two: list[Any]
) -> None:
    """And the plan's are those of the rank with the most, without the early layers of step 1."""
    seen = [found["memory"][f"{name}, {precision}"] for found in two]
    on_files = [found["memory on files"][name] for found in two]
    for of_rank in seen:
        assert of_rank["host"][0] == of_rank["formula"] + of_rank["early"]
        assert of_rank["gpu"][0] == of_rank["gpu"][1]
    for of_ranks, tier in ((seen, "host"), (on_files, "host"), (on_files, "nvme")):
        early = [of_rank["early"] if tier == "host" else 0 for of_rank in of_ranks]
        most = max(of_rank[tier][0] - n for of_rank, n in zip(of_ranks, early, strict=True))
        assert most == of_ranks[0][tier][1] > 0
