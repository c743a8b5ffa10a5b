"""Several ranks own layers of `stronghold.train`: the bits of one rank."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_bits import STEPS, never, plain
from tests.laws.test_core import AXES as OF_ONE
from tests.laws.test_core import PLACES, at_home, lanes
from tests.models import MODELS
from tests.support.core import train_core
from tests.support.insides import offload_small
from tests.support.pairs import covering
from tests.support.rank_core import UNLIKE, asked, joined
from tests.support.ranks import names_tested, ranks_once, run_ranks
from tests.support.training import Run, assert_identical

SUPPORT = "tests.support.rank_core"
HERE = "tests.laws.test_rank_core"

# A GPU updates no layer for several ranks, and their weights lie in memory.
AXES = OF_ONE | {
    "place": [name for name, place in PLACES.items() if "resident_updates" not in place],
    "home": ["ram", "moments", "masters"],
    "micro-batches": ["1", "2"],
    "ranks": ["2", "4"],
}
ARRAY = ["/".join(case) for case in covering(list(AXES.values()), never)]
random.Random(0).shuffle(ARRAY)
DEFAULT = ARRAY[:24]
EXACT = [name for name, case in UNLIKE.items() if case.micro_batches == 1 and "two " not in name]
CLOSE = [name for name in UNLIKE if name not in EXACT]


def values(case: str) -> dict[str, str]:
    return dict(zip(AXES, case.split("/"), strict=True))


def options(of: dict[str, str]) -> dict[str, Any]:
    return {
        "clipping": float(of["clipping"]),
        "accumulation": int(of["micro-batches"]),
        "precision": of["precision"],
        "optimizer": of["optimizer"],
    }


def like_2(folder: Path) -> dict[str, Run]:
    """Every rank has the same batches."""
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stronghold.plan.host_memory.PIECE_BYTES", 1)  # a page of each
        offload_small(patch)
        for number, name in enumerate(asked()):
            of = values(name)
            with joined() as ranks:
                place = folder / f"{number} of {ranks.rank}"
                place.mkdir()
                runs[name] = train_core(
                    MODELS[of["model"]],
                    steps=STEPS,
                    ranks=ranks,
                    device=lanes(are_late=of["lanes"] == "late"),
                    activations=of["activations"],
                    **PLACES[of["place"]],
                    **at_home(of["home"], place),
                    **options(of),
                )
    return runs


like_4 = like_2


def like_of(number: str, request: pytest.FixtureRequest, places: Any) -> list[Any]:
    names = json.loads(names_tested(request, "test_ranks_have_the_bits_of_one"))
    own = [name for name in names if values(name)["ranks"] == number]
    return ranks_once(f"{HERE}:like_{number}", int(number), places, NAMES=json.dumps(own))


def moments_of_all(runs: list[Run]) -> dict[str, Any]:
    """Each owner has some."""
    found = {name: moments for run in runs for name, moments in run.moments.items()}
    assert sum(len(run.moments) for run in runs) == len(found)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=() if c in DEFAULT else pytest.mark.slow) for c in ARRAY]
)
def test_ranks_have_the_bits_of_one(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Batches are alike. So a sum over 2 or 4 ranks is a product with 2 or 4, which is exact."""
    of = values(name)
    runs = [found[name] for found in like_of(of["ranks"], request, tmp_path_factory)]
    expected = plain(of["model"], **options(of))
    for run in runs:
        whole = replace(run, moments=moments_of_all(runs))
        assert_identical(whole, expected)
        assert run.norms == expected.norms


@pytest.fixture(scope="module")
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    tests = ("test_two_ranks_are_one_that_accumulates", "test_two_ranks_and_one_differ_by_rounding")
    names = [name for test in tests for name in json.loads(names_tested(request, test))]
    return ranks_once(f"{SUPPORT}:two_unlike", 2, tmp_path_factory, NAMES=json.dumps(names))


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_are_one_that_accumulates(name: str, unlike: list[Any]) -> None:
    """Batches differ, and what is called. A sum of two rounds once."""
    runs = [found[name] for found in unlike]
    expected = UNLIKE[name].train(None)
    losses = [
        loss for of_both in zip(*(run.losses for run in runs), strict=True) for loss in of_both
    ]
    for run in runs:
        assert_identical(replace(run, losses=losses, moments=moments_of_all(runs)), expected)
        assert run.norms == expected.norms


@pytest.mark.parametrize("name", CLOSE)
def test_two_ranks_and_one_differ_by_rounding(name: str, unlike: list[Any]) -> None:
    """Sums of more than two, in another order."""
    runs = [found[name] for found in unlike]
    expected = UNLIKE[name].train(None)
    assert runs[0].norms == runs[1].norms == pytest.approx(expected.norms, rel=1e-5)
    for name_of, weight in expected.weights.items():
        assert torch.equal(runs[0].weights[name_of], runs[1].weights[name_of])
        assert torch.allclose(runs[0].weights[name_of], weight, atol=2e-4)


def test_what_the_program_may_not_do_is_refused(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(f"{SUPPORT}:refused", 2, tmp_path)):
        assert "the program wrote into parameters of" in found["written"]
        assert f"different models: rank {rank} has" in found["another model"]
