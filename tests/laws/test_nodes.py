"""Several nodes: ranks that share no memory, told apart by the environment or by namespaces."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.errors import ConfigError
from stronghold.optim.states import PAGE_BYTES
from stronghold.train.processes import mesh_of
from tests.conftest import free_port
from tests.laws import test_ranks
from tests.laws.test_ranks import FAILURES, interleaved
from tests.support import node_programs, rank_cases, rank_checkpoints, rank_programs
from tests.support.checkpoints import assert_same, stored_tensors
from tests.support.children import ROOT
from tests.support.ranks import Launch, names_tested, ranks_once, run_ranks
from tests.support.training import Run, assert_identical

PROGRAMS = "tests.support.node_programs"

pytestmark = pytest.mark.slow  # test_ranks has what one node and several have in common


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two nodes of one rank found in one launch."""
    bits = names_tested(request, "test_nodes_have_the_bits_of_one_rank_that_accumulates")
    return ranks_once(f"{PROGRAMS}:two_nodes", 2, tmp_path_factory, num_nodes=2, BITS=bits)


@pytest.mark.parametrize("name", node_programs.BITS)
def test_nodes_have_the_bits_of_one_rank_that_accumulates(name: str, two: list[Any]) -> None:
    """And so, by `test_ranks`, those of as many ranks of one node."""
    one = rank_cases.CASES[name]()
    losses = interleaved([found["bits"][name] for found in two])
    for found in two:
        run = found["bits"][name]
        assert_identical(Run(losses=losses, weights=run.weights), one)
        assert run.norms == pytest.approx(one.norms, rel=1e-12)


def test_host_bytes_are_the_plans_with_the_weights_on_every_node(two: list[Any]) -> None:
    """bf16 with held gradients: 2 bytes of weights, and 12 that all ranks share."""
    for found in two:
        report = found["memory"]
        assert report["host_peak"] == report["host_planned"]
        assert report["host_peak"] == (2 + 12 / 2) * report["padded_numel"] + PAGE_BYTES
        assert "x 2 ranks on 2 nodes, each with the weights" in report["plan"]


def test_the_wire_between_nodes_carries_weights_once_and_gradients_once(two: list[Any]) -> None:
    """Each layer's gradients go to its owner, and its weights come from there."""
    for found in two:
        traffic = found["traffic"]
        once = 4 * traffic["trained"]
        assert traffic["sent"]["reduce"] == traffic["sent"]["exchange"] == once


def test_a_rank_of_any_node_may_evaluate_alone(two: list[Any]) -> None:
    rank_cases.assert_trained_as_one(two)


@pytest.mark.parametrize("what", ["seeds", "new weights"])
def test_weights_of_the_first_node_hold(what: str, two: list[Any]) -> None:
    """Where the model, or a state dict, has other values on another node."""
    for name, weight in two[0][what].items():
        assert torch.equal(weight, two[1][what][name]), name
    if what == "new weights":
        assert all(bool((weight == 1.0).all()) for weight in two[1][what].values())


def test_each_node_divides_its_own_cores(two: list[Any]) -> None:
    for node, found in enumerate(two):
        cores = len(os.sched_getaffinity(0))
        assert found["cores"] == {"cores": cores, "node": node, "nodes": 2}


def test_nodes_take_one_plan_for_the_first_batch(two: list[Any]) -> None:
    test_ranks.test_ranks_take_one_plan_for_the_first_batch(two)


# -- checkpoints -----------------------------------------------------------------------------------
def test_what_nodes_save_resumes_to_the_bit(two: list[Any]) -> None:
    for found in two:
        saved = found["checkpoint"]
        assert saved["on"]["losses"] == saved["straight"]["losses"][2:]
        for name, weight in saved["straight"]["weights"].items():
            assert torch.equal(saved["on"]["weights"][name], weight), name


def test_one_rank_loads_what_two_nodes_saved_and_saves_the_same(
    two: list[Any], tmp_path: Path
) -> None:
    source = Path(two[0]["checkpoint"]["saved"])
    found = rank_checkpoints.session(tmp_path / "again", source, steps=0)
    for name, weight in two[0]["checkpoint"]["first"]["weights"].items():
        assert torch.equal(found["weights"][name], weight), name
    tensors = stored_tensors(source / "global_step2")
    assert_same(stored_tensors(tmp_path / "again" / "global_step2"), tensors)
    beside = Path(two[0]["checkpoint"]["beside"]) / "global_step2"
    assert_same(stored_tensors(beside), tensors)


def test_a_folder_that_the_nodes_do_not_share_is_refused_before_it_is_written(
    two: list[Any],
) -> None:
    for found in two:
        apart = found["apart"]
        assert "rank 1 on node 1 does not see" in apart["save"]
        assert "is not the same folder on every node" in apart["save"]
        assert "of-node-1/global_step2: no such checkpoint" in apart["load"]
        assert apart["left"] == "False"


# -- failures --------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["kill", "raise", "stop"])
def test_a_rank_that_is_lost_on_another_node_is_named(how: str, tmp_path: Path) -> None:
    """By its closed connection, or because it does not come."""
    with Launch(
        run="tests.support.rank_programs:fail",
        num_ranks=2,
        num_nodes=2,
        folder=tmp_path,
        environment={"HOW": how},
    ) as launch:
        status = launch.processes[0].wait(timeout=120)
        seconds = time.time() - float((tmp_path / "failing").read_text())
        expected = "a rank of another node does not come" if how == "stop" else FAILURES[how]
        assert expected in launch.output(0)
    assert status != 0
    assert seconds < 30


# -- places ----------------------------------------------------------------------------------------
def test_nodes_with_unequal_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unequally over 2 nodes \(2 on a, 1 on b\)"):
        mesh_of([("a", 1), ("b", 1), ("a", 1)])


# -- two nodes of two ranks ------------------------------------------------------------------------
def test_two_nodes_of_two_ranks(two: list[Any], tmp_path: Path) -> None:
    """Bits, bytes, and a checkpoint of two nodes of one rank."""
    source = Path(two[0]["checkpoint"]["saved"])
    four = run_ranks(f"{PROGRAMS}:four_ranks", 4, tmp_path, num_nodes=2, CHECKPOINT=str(source))
    for name, run in rank_programs.four_ranks(tmp_path).items():
        losses = interleaved([found["bits"][name] for found in four])
        for found in four:
            assert_identical(Run(losses=losses, weights=found["bits"][name].weights), run)
            assert found["bits"][name].norms == pytest.approx(run.norms, rel=1e-12)
    sent = [found["traffic"]["sent"].get("exchange", 0) for found in four]
    assert sum(sent) == 2 * 4 * four[0]["traffic"]["trained"]  # from each owner to its peer
    for found in four:
        report, traffic = found["memory"], found["traffic"]
        assert report["host_peak"] == report["host_planned"]
        in_memory = (2 / 2 + 12 / 4) * report["padded_numel"]
        assert report["host_peak"] == in_memory + PAGE_BYTES / 2
        assert traffic["sent"]["reduce"] == 4 * traffic["trained"]
        for name, weight in two[0]["checkpoint"]["first"]["weights"].items():
            assert torch.equal(found["elsewhere"]["weights"][name], weight), name
    again = tmp_path / "again" / "global_step2"
    assert_same(stored_tensors(source / "global_step2"), stored_tensors(again))


# -- machines of their own -------------------------------------------------------------------------
UNSHARE = ["unshare", "--uts", "--pid", "--fork", "--mount-proc"]
AGENT = (
    'hostname "$1" && exec "$2" -m torch.distributed.run --nnodes 2 --node_rank "$3" '
    '--nproc_per_node 1 --master_addr 127.0.0.1 --master_port "$4" '
    '--module tests.support.node_programs "$5"'
)


def test_two_machines_under_torchrun(tmp_path: Path) -> None:
    """Namespaces of their own: neither sees the other's processes."""
    tried = subprocess.run([*UNSHARE, "hostname", "elsewhere"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"unshare: {tried.stderr.strip()}")
    port, agents = str(free_port()), []
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "1"}
    for node, host in enumerate(("alpha", "beta")):
        words = [host, sys.executable, str(node), port, str(tmp_path)]
        with open(tmp_path / f"log-{node}", "w") as log:
            agents.append(
                subprocess.Popen(
                    [*UNSHARE, "bash", "-c", AGENT, "agent", *words],
                    cwd=ROOT,
                    env={**os.environ, **environment},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for node, agent in enumerate(agents):
            log = (tmp_path / f"log-{node}").read_text
            assert agent.wait(timeout=240) == 0, log(errors="replace")[-6000:]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    found = [pickle.loads((tmp_path / f"result-{rank}").read_bytes()) for rank in range(2)]
    assert found[0]["processes"] != found[1]["processes"]
    one = rank_cases.CASES["gpt"]()
    for rank, of_rank in enumerate(found):
        assert of_rank["host"] == ("alpha", "beta")[rank]
        assert of_rank["nodes"] == 2
        losses = interleaved([each["run"] for each in found])
        assert_identical(Run(losses=losses, weights=of_rank["run"].weights), one)
    again = rank_checkpoints.session(None, tmp_path / "saved", steps=0)
    assert again["steps"] == 1
