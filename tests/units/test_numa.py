"""NUMA, on pretended topologies: directories that look like sysfs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.devices import numa
from stronghold.devices.emulated import EmulatedDevice
from stronghold.distributed.process_groups import share_of_cores
from stronghold.tools.doctor.measure import effort, node_rates
from tests.support.topologies import CORES, GPU, affinities, needs_two_cores, topology
from tests.support.twin import twin


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The first of this process's cores is node 0, all others are node 1, where the GPU is."""
    others = ",".join(map(str, CORES[1:]))
    root = topology(tmp_path, {0: str(CORES[0]), 1: others}, gpu_node=1)
    monkeypatch.setattr(numa, "ROOT", root)
    yield root
    os.sched_setaffinity(0, CORES)


# -- the topology ----------------------------------------------------------------------------------
def test_the_topology_is_read_as_the_kernel_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = topology(tmp_path, {1: "16-31,48-63", 0: "0-15,32-47", 10: ""}, gpu_node=1)
    monkeypatch.setattr(numa, "ROOT", root)
    nodes = numa.memory_nodes()
    assert [node.number for node in nodes] == [0, 1, 10]
    assert nodes[0].cores == {*range(16), *range(32, 48)}
    assert nodes[2].cores == frozenset()
    assert nodes[0].memory_bytes == 65536 << 10
    assert numa.node_of_pci(GPU.upper()) == 1
    assert numa.node_of_pci("0000:01:00.0") is None
    assert numa.node_of_pci("") is None
    assert numa.parse_list("") == []
    assert numa.parse_list("3") == [3]


def test_an_unknown_node_and_a_system_without_nodes_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "ROOT", tmp_path)
    assert numa.memory_nodes() == ()
    assert numa.neighbourhood_of(0) is None
    monkeypatch.setattr(numa, "ROOT", topology(tmp_path, {0: "0"}))
    assert numa.node_of_pci(GPU) is None
    assert numa.neighbourhood_of(None) is None


@pytest.mark.parametrize(
    ("allowed", "node", "expected"),
    [
        ({0, 1, 2, 3}, 1, (2, 3)),
        ({0, 1, 2, 3}, 0, (0, 1)),
        ({1, 2}, 1, (2,)),
        ({2, 3}, 1, None),  # on the device's node alone already
        ({0, 1, 2, 3}, None, None),
        ({0, 1, 2, 3}, 7, None),
    ],
)
def test_a_neighbourhood_is_of_cores_that_the_process_may_use(
    allowed: set[int],
    node: int | None,
    expected: tuple[int, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa, "ROOT", topology(tmp_path, {0: "0-1", 1: "2-3"}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    near = numa.neighbourhood_of(node)
    assert (None if near is None else near.cores) == expected
    if near is not None:
        assert str(near) == f"NUMA node {node} of 2 ({len(near.cores)} cores)"


def test_a_process_far_from_the_device_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numa, "ROOT", topology(tmp_path, {0: "0-1", 1: "2-3"}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with caplog.at_level(logging.WARNING, logger="stronghold"):
        assert numa.neighbourhood_of(1) is None
    assert "numactl --cpunodebind=1" in caplog.text


def test_ranks_of_two_nodes_share_the_cores_of_their_own() -> None:
    allowed = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    shares = [share_of_cores(allowed, rank) for rank in range(4)]
    assert shares == [(0, 1), (2, 3), (4, 5), (6, 7)]


# -- threads ---------------------------------------------------------------------------------------
def tasks() -> dict[int, list[int]]:
    """The cores of all threads of this process, by number."""
    numbers = map(int, os.listdir("/proc/self/task"))
    return {number: sorted(os.sched_getaffinity(number)) for number in numbers}


@needs_two_cores
def test_lanes_and_update_threads_run_next_to_the_device(two_nodes: Path) -> None:
    near = CORES[1:]
    before = set(tasks())
    section = {"window": 1, "emulated": {"numa_node": 1}, "cpu_threads": 2}
    with twin(precision="bf16", section=section) as both:
        both.train(0)
        both.train(1)
        lanes = affinities("stronghold")
        assert len(lanes) >= 4
        assert all(cores == near for cores in lanes.values()), lanes
        started = {number: cores for number, cores in tasks().items() if number not in before}
        on_the_node = [cores for cores in started.values() if cores == near]
        assert len(on_the_node) > len(lanes), "update threads run there, too"
        assert sorted(os.sched_getaffinity(0)) == CORES, "the training thread is the program's"
        line = f"pinned memory on NUMA node 1 of 2 ({len(near)} cores), next to the gpu"
        assert line in str(both.engine.plan)
        assert both.engine.plan.demand.num_cores <= len(near)


@needs_two_cores
@pytest.mark.parametrize("section", [{"numa": "off", "emulated": {"numa_node": 1}}, {}])
def test_off_and_a_device_without_a_node_change_nothing(
    section: dict[str, Any], two_nodes: Path
) -> None:
    with twin(section={"window": 1, **section}) as both:
        both.train(0)
        assert all(cores == CORES for cores in affinities("stronghold").values())
        assert "numa" not in str(both.engine.plan)


def test_one_node_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = ",".join(map(str, CORES))
    monkeypatch.setattr(numa, "ROOT", topology(tmp_path, {0: cores}, gpu_node=0))
    with twin(section={"window": 1, "emulated": {"numa_node": 0}}) as both:
        both.train(0)
        assert all(cores == CORES for cores in affinities("stronghold").values())
        assert "numa" not in str(both.engine.plan)


@needs_two_cores
def test_a_thread_returns_to_its_cores_after_an_error() -> None:
    num_threads = torch.get_num_threads()
    with contextlib.suppress(ZeroDivisionError), numa.placing_on(CORES[:1]):
        assert sorted(os.sched_getaffinity(0)) == CORES[:1]
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert sorted(os.sched_getaffinity(0)) == CORES
    assert torch.get_num_threads() == num_threads
    with numa.placing_on(()):
        assert torch.get_num_threads() == num_threads


# -- the doctor ------------------------------------------------------------------------------------
@needs_two_cores
def test_the_doctor_measures_each_nodes_memory(two_nodes: Path) -> None:
    device = EmulatedDevice(poison=False, link_gbps=4.0)
    try:
        size = replace(effort(quick=True, available_bytes=1 << 28), copy_bytes=4 << 20, rounds=1)
        rates = node_rates(device, size, lambda _: None)
    finally:
        device.close()
    assert list(rates) == [0, 1]
    for fetch, offload in rates.values():
        assert 0.0 < fetch <= 4.1, "no faster than the link"
        assert 0.0 < offload <= 4.1
    assert sorted(os.sched_getaffinity(0)) == CORES
