"""Several ranks on one node: processes over gloo, each with its share of the state."""

from __future__ import annotations

import filecmp
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.optim.states import PAGE_BYTES
from tests.models import MODELS, loss_of
from tests.support import rank_cases, rank_checkpoints, rank_models, rank_programs
from tests.support.checkpoints import BESIDE_TAGS, assert_same, stored_tensors
from tests.support.ranks import Launch, names_tested, ranks_once, run_ranks
from tests.support.scheduler import hostile_scheduler
from tests.support.training import DTYPES, Run, assert_identical, config

PROGRAMS = "tests.support.rank_programs"


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks found in one launch: processes take seconds to start."""
    tests = {
        "BITS": "test_ranks_have_the_bits_of_one_that_accumulates",
        "CLOSE": "test_ranks_and_one_rank_differ_by_rounding",
        "FILES": "test_files_of_each_rank_never_change_a_bit",
    }
    names = {key: names_tested(request, test) for key, test in tests.items()}
    return ranks_once(f"{PROGRAMS}:two_ranks", 2, tmp_path_factory, **names)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", rank_cases.CASES)
def test_ranks_have_the_bits_of_one_that_accumulates(name: str, two: list[Any]) -> None:
    """In fp32 with 2 or 4 ranks: halves are exact, and sums come in the order of the ranks. The
    norm differs by its own rounding, since a parameter's squares are added in parts."""
    one = rank_cases.CASES[name]()
    losses = interleaved([found["bits"][name] for found in two])
    for found in two:
        run = found["bits"][name]
        assert_identical(Run(losses=losses, weights=run.weights), one)
        assert run.norms == pytest.approx(one.norms, rel=1e-12)
        assert run.norms == two[0]["bits"][name].norms


def interleaved(runs: list[Run]) -> list[torch.Tensor]:
    """The losses of all ranks in the order of their micro-batches."""
    return [loss for of_all in zip(*(run.losses for run in runs), strict=True) for loss in of_all]


@pytest.mark.parametrize("name", rank_cases.CLOSE)
def test_ranks_and_one_rank_differ_by_rounding(name: str, two: list[Any]) -> None:
    """Clipping multiplies by a number that is rounded differently in its last bit, and 16-bit
    gradients are rounded once more, after the mean. Adam's first steps turn a gradient of any size
    into one of the size of the learning rate, 1e-2: there the bound is of the loss."""
    one = rank_cases.CLOSE[name]()
    losses = interleaved([found["close"][name] for found in two])
    tolerance = 1e-5 if name == "clipped" else 2e-2
    for loss, expected in zip(losses, one.losses, strict=True):
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    norms = [found["close"][name].norms for found in two]
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(one.norms, rel=1e-6 if name == "clipped" else 2e-2)


def test_host_bytes_are_the_plans_and_half_of_one_ranks(two: list[Any]) -> None:
    for found in two:
        for report in (found["memory"], found["memory without gate"]):
            assert report["host_peak"] == report["host_planned"]
            assert report["gpu_peak"] == report["gpu_planned"]
            assert "x 2 ranks" in report["plan"]
            # bf16: 14 bytes a parameter with its pending gradient, and a page of counters.
            assert report["host_peak"] == (14 * report["padded_numel"] + PAGE_BYTES) // 2
            assert "gradients: pending until the clip barrier" in report["plan"]


@pytest.mark.parametrize("name", rank_cases.FILES)
def test_files_of_each_rank_never_change_a_bit(name: str, two: list[Any]) -> None:
    """Against the same ranks in memory; all but weights spills, layers take several pieces. Ranges
    in files end at pages: a parameter's squares are added in other parts."""
    for found in two:
        on_files, in_memory = found["files"][name]
        assert_identical(on_files, in_memory)
        assert on_files.norms == pytest.approx(in_memory.norms, rel=1e-12)


def test_bytes_of_files_are_the_plans_and_half_of_one_ranks(two: list[Any]) -> None:
    """bf16 with held gradients: weights and those in memory, moments and masters in files."""
    for found in two:
        report = found["memory on files"]
        assert report["host_peak"] == report["host_planned"]
        in_memory = (4 * report["padded_numel"] + PAGE_BYTES) // 2
        assert report["host_peak"] == in_memory + report["staging"]
        assert report["nvme_peak"] == report["nvme_planned"] == 10 * report["padded_numel"] // 2
        # The first step's reads and writes; nothing is read or written to make the files.
        assert report["moved"] == report["traffic"]


def test_the_nodes_weights_are_there_once(two: list[Any]) -> None:
    """Proportional set size: a page that two processes map counts half in each."""
    sizes = [found["memory"]["weights_pss"] for found in two]
    whole = two[0]["memory"]["weights_bytes"]
    assert sum(sizes) == pytest.approx(whole, rel=0.05)


def test_one_rank_may_evaluate_alone(two: list[Any]) -> None:
    """And read the weights: nothing of it meets the other, and training goes on as without it."""
    rank_cases.assert_trained_as_one(two)


def test_ranks_load_what_they_made_of_their_weights_and_write_none_in_place(two: list[Any]) -> None:
    for found in two:
        assert all(found["halved"]["equal"])
        assert all(said is True for said in found["halved"]["refused"]), found["halved"]


def test_what_the_engine_says_of_ranks(two: list[Any]) -> None:
    for rank, found in enumerate(two):
        assert found["surface"] == {
            "local_rank": rank,
            "global_rank": rank,
            "world_size": 2,
            "dp_world_size": 2,
            "train_batch_size": 12,
            "gradient_accumulation_steps": 3,
            "samples": found["surface"]["samples"],
        }
    seen = [sorted(found["surface"]["samples"]) for found in two]
    assert sorted(seen[0] + seen[1]) == list(range(8))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_read_whole_on_every_rank(precision: str, two: list[Any]) -> None:
    """The mean of what each rank's batch gives in plain PyTorch."""
    sums: list[torch.Tensor] = []
    for batch in range(2):
        model, make_batch = MODELS["gpt"]()
        model.to(DTYPES[precision])
        loss_of(model(**make_batch(batch))).backward()
        sums = [p.grad + s for p, s in zip(model.parameters(), sums or [0] * 99, strict=False)]
    norm = torch.stack([s.float().norm() for s in sums]).norm().item()
    for found in (of_rank["gradients"][precision] for of_rank in two):
        for read, twice, s in zip(found["read"], found["twice"], sums, strict=True):
            assert torch.equal(read, (s / 2).float())
            assert torch.equal(twice, s.float())
        assert found["norm"] == pytest.approx(norm, rel=1e-2)


def test_each_micro_batch_has_turns_of_its_own(two: list[Any]) -> None:
    """Gradients are reduced once in each, and none comes after its turn."""
    for sent, once in (found["accumulated"] for found in two):
        assert sent["reduce"] == 6 * once
        assert "late" not in sent


@pytest.mark.parametrize("how", ["load", "drop"])
def test_gradients_of_one_rank_are_thrown_away_by_all(how: str, two: list[Any]) -> None:
    for runs in (found["thrown away"] for found in two):
        assert_identical(runs[how], runs[""])


def test_an_overflow_on_one_rank_skips_the_step_on_all(two: list[Any]) -> None:
    expected = {"skipped": 1, "norm": float("inf"), "scale": 128.0, "unchanged": True}
    for found in two:
        assert found["overflow"] == expected


def test_what_several_ranks_cannot_do_yet_is_refused(two: list[Any]) -> None:
    for found in two:
        refused = found["refused"]
        assert "resident_updates" in refused["gpu"]
        assert "stronghold.nvme.spill" in refused["nvme"]
        assert "the ranks have different models" in refused["model"]


def test_a_disk_that_refuses_one_rank_ends_all(two: list[Any]) -> None:
    said = [found["refused"]["disk"] for found in two]
    assert "rank 1 has failed: BudgetError: stronghold.nvme.path: what lies in files" in said[0]
    assert said[1].startswith("BudgetError: stronghold.nvme.path: what lies in files")


def test_nothing_is_left_of_an_engine(two: list[Any]) -> None:
    """Its model is each process's own, its threads have ended, and no file remains; also of one
    that could not be made."""
    for rank, found in enumerate(two):
        assert found["life"] == {"sevens": rank == 0, "threads": [], "groups": [], "files": []}


def test_each_rank_has_a_trace_of_its_own(two: list[Any]) -> None:
    for found in two:
        assert found["traces"] == {"trace.json": {0}, "trace.rank1.json": {1}}


@pytest.mark.slow
def test_reductions_hide_behind_compute(tmp_path: Path) -> None:
    """Where compute takes longest, a step takes little more: the fill and drain of one layer."""
    for busy in run_ranks("tests.support.rank_looks:overlap", 2, tmp_path):
        bound = max(seconds for lane, seconds in busy.items() if lane != "step")
        assert bound == busy["compute"], busy
        assert busy["step"] <= 1.15 * bound, busy
        hidden = busy["fetch"] + busy["reduce"] + busy["offload"]
        assert hidden > 0.5 * bound, busy  # not vacuous


def test_a_backward_that_fails_on_one_rank_ends_all(two: list[Any]) -> None:
    """And neither goes on."""
    for text in two[0]["broken"].split(" | "):
        assert "rank 1 has failed: ZeroDivisionError: division by zero" in text
    assert two[1]["broken"].startswith("division by zero | ")
    assert "this rank has failed: ZeroDivisionError" in two[1]["broken"]


# -- checkpoints -----------------------------------------------------------------------------------
def test_what_ranks_save_resumes_to_the_bit(two: list[Any]) -> None:
    for found in two:
        saved = found["checkpoint"]
        assert saved["on"]["losses"] == saved["straight"]["losses"][2:]
        for name, weight in saved["straight"]["weights"].items():
            assert torch.equal(saved["on"]["weights"][name], weight), name


def test_what_ranks_save_in_memory_resumes_on_files_and_the_other_way(two: list[Any]) -> None:
    for found in two:
        saved = found["checkpoint"]
        assert saved["on files"]["losses"] == saved["on"]["losses"]
        assert [*saved["on files"]["losses"], *saved["off files"]["losses"]] == (
            saved["straight on"]["losses"]
        )
        for name, weight in saved["straight on"]["weights"].items():
            assert torch.equal(saved["off files"]["weights"][name], weight), name


def test_a_save_beside_training_writes_the_same_files(two: list[Any]) -> None:
    saved, beside = (
        Path(two[0]["checkpoint"][which]) / "global_step2" for which in ("saved", "beside")
    )
    names = sorted(path.name for path in saved.iterdir())
    assert names == sorted(path.name for path in beside.iterdir())
    assert filecmp.cmpfiles(saved, beside, names, shallow=False) == (names, [], [])


def test_one_rank_loads_what_two_saved(two: list[Any], tmp_path: Path) -> None:
    """And saves the same tensors."""
    source = Path(two[0]["checkpoint"]["saved"])
    found = rank_checkpoints.session(tmp_path / "again", source, steps=0)
    assert_same_save(found, two[0]["checkpoint"]["first"], source, tmp_path / "again", steps=2)


def assert_same_save(
    found: dict[str, Any], expected: dict[str, Any], source: Path, again: Path, *, steps: int
) -> None:
    """Loaded from `source` and saved in `again`: the weights, and every array in the files."""
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name
    tag = f"global_step{steps}"
    assert_same(stored_tensors(source / tag), stored_tensors(again / tag))


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(two: list[Any]) -> None:
    said = [found["full disk"]["error"] for found in two]
    assert said[0].startswith(
        "CheckpointError: the checkpoint failed on rank 1: OSError: [Errno 28]"
    )
    assert said[1].startswith("OSError: [Errno 28]")
    for found in two:
        assert found["full disk"]["left"] == []
        assert found["full disk"]["then"] == sorted(["two", *BESIDE_TAGS])


def test_ranks_never_load_two_saves_of_one_tag(two: list[Any]) -> None:
    for found in two:
        assert found["replaced"].startswith("CheckpointError: ")
        assert "rank 1 on " in found["replaced"]
        assert "has opened another save of it than rank 0" in found["replaced"]


@pytest.mark.parametrize("spill", [None, "weights"])
def test_one_rank_loads_what_two_saved_from_files(
    spill: str | None, two: list[Any], tmp_path: Path
) -> None:
    source = Path(two[0]["checkpoint"]["from files"])
    section: dict[str, Any] = {}
    if spill:
        section["nvme"] = {"path": str(tmp_path), "spill": spill}
    found = rank_checkpoints.session(tmp_path / "again", source, steps=0, **section)
    assert_same_save(found, two[0]["checkpoint"]["on files"], source, tmp_path / "again", steps=4)


def test_ranks_take_one_plan_for_the_first_batch(two: list[Any]) -> None:
    one = rank_models.train("gpt", config(clipping=0.0), steps=3)
    losses = interleaved([found["planned"]["run"] for found in two])
    for found in two:
        assert found["planned"]["stays"]
        assert found["planned"]["resident"] > 2  # not only the layers outside the blocks
        assert found["planned"]["plan"] == two[0]["planned"]["plan"]
        assert_identical(Run(losses=losses, weights=found["planned"]["run"].weights), one)


@pytest.mark.slow
def test_four_ranks_load_what_one_saved_and_what_two_saved(two: list[Any], tmp_path: Path) -> None:
    one = rank_checkpoints.session(tmp_path / "one", None, steps=2)
    for source, expected in (
        (tmp_path / "one", one),
        (Path(two[0]["checkpoint"]["saved"]), two[0]["checkpoint"]["first"]),
    ):
        folder = tmp_path / source.name / "four"
        four = run_ranks(
            "tests.support.rank_checkpoints:load_elsewhere", 4, folder, CHECKPOINT=str(source)
        )
        for rank, found in enumerate(four):
            for name, weight in expected["weights"].items():
                assert torch.equal(found["weights"][name], weight), name
            assert found["trained"]["losses"] == two[rank % 2]["checkpoint"]["on"]["losses"][:1]
        alone = rank_checkpoints.session(None, folder / "again", steps=1)
        assert alone["losses"] == [of["checkpoint"]["on"]["losses"][0] for of in two]
        again = folder / "again" / "global_step2"
        assert_same(stored_tensors(source / "global_step2"), stored_tensors(again))


@pytest.mark.slow
def test_four_ranks_have_the_bits_of_one_that_accumulates(tmp_path: Path) -> None:
    four = run_ranks(f"{PROGRAMS}:four_ranks", 4, tmp_path)
    for name, run in rank_programs.four_ranks(tmp_path).items():
        losses = interleaved([found[name] for found in four])
        for found in four:
            assert_identical(Run(losses=losses, weights=found[name].weights), run)
            assert found[name].norms == pytest.approx(run.norms, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nothing_depends_on_which_thread_comes_first(seed: int, tmp_path: Path) -> None:
    with (
        Launch(run=f"{PROGRAMS}:two_ranks", num_ranks=2, folder=tmp_path) as launch,
        hostile_scheduler([process.pid for process in launch.processes], seed),
    ):
        ended = launch.finish(timeout_s=900)
    assert [status for status, _ in ended] == [0, 0], ended


# -- failures --------------------------------------------------------------------------------------
FAILURES = {
    "kill": "rank 1 has ended",
    "raise": "rank 1 has ended",
    "stop": "rank 1 does not come",
    "disk": "rank 1 has failed: ",
}


@pytest.mark.parametrize(
    "how",
    ["kill", *(pytest.param(how, marks=pytest.mark.slow) for how in ("raise", "stop", "disk"))],
)
def test_a_rank_that_is_lost_is_named_and_the_others_end(how: str, tmp_path: Path) -> None:
    environment = {"HOW": how}
    run = f"{PROGRAMS}:fail"
    with Launch(run=run, num_ranks=2, folder=tmp_path, environment=environment) as launch:
        status = launch.processes[0].wait(timeout=120)
        seconds = time.time() - float((tmp_path / "failing").read_text())
        assert FAILURES[how] in launch.output(0)
        assert "Start all ranks again, from the last checkpoint" in launch.output(0)
        if how == "disk":
            assert "No space left on device" in launch.output(1)
    assert status != 0
    assert not list((tmp_path / "disk").iterdir())
    assert seconds < 30  # the time-out of collectives is 8 s in this program


def test_the_first_rank_measures_the_machine_for_all(two: list[Any]) -> None:
    (machine, measured), (same, measured_too) = (found["machine"] for found in two)
    assert machine == same
    assert machine.adam_gbps != machine.adam_thread_gbps  # of both ranks, and of one thread
    assert (measured, measured_too) == (1, 0)
