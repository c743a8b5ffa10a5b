"""Laws of the distance to the physical limit: what a task must move, and whose share is whose."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import limits  # noqa: E402
from methods.task import Task, gpt_parameters  # noqa: E402

from stronghold.plan.machine import MachineProfile  # noqa: E402

TASK = Task(layers=6, hidden=256, heads=4, vocab=512, seq=128, batch=2, precision="bf16")
MACHINE = MachineProfile.load("h200")


def test_the_load_is_the_formula_of_a_gpt() -> None:
    """6 P T and 6 l h s T per micro-batch; positions are looked up, not multiplied."""
    load, flops = limits.load_of(TASK, streamed=True)
    blocks = TASK.layers * (12 * 256**2 + 13 * 256)
    assert load.streamed_bytes == load.trained_bytes == 2 * blocks
    assert load.layer_bytes == 2 * blocks // 6
    matrices = gpt_parameters(layers=6, hidden=256, vocab=512, seq=128) - 128 * 256 - 2 * 256
    tokens = TASK.batch * TASK.seq
    forward = 2 * matrices * tokens + 2 * 6 * 256 * 128 * tokens
    assert flops["forward_flops"] == pytest.approx(forward)
    again = dataclasses.replace(TASK, activations="recompute")
    recomputed = limits.load_of(again, streamed=True)[1]["recomputed_flops"]
    assert recomputed == pytest.approx(forward - 2 * 512 * 256 * tokens)


def test_streaming_is_never_faster_than_residence() -> None:
    for batch in (1, 64):
        task = dataclasses.replace(TASK, batch=batch)
        streaming = limits.limit_of(task, MACHINE, streamed=True)
        resident = limits.limit_of(task, MACHINE, streamed=False)
        assert streaming.seconds > resident.seconds
        assert resident.bound == "compute"


def test_shares_are_of_methods_whose_losses_are_right() -> None:
    row = {"status": "ok", "verdict": "equal", "wall_s": 2.0, "method": "ours"}
    rows = [row, row | {"method": "bad", "verdict": "wrong"}, {"status": "failed", "method": "x"}]
    judged = limits.judge({"task": dataclasses.asdict(TASK), "rows": rows}, MACHINE)
    assert list(judged["shares"]) == ["ours"]
    share = judged["shares"]["ours"]
    assert share["step_s"] == 2.0 / TASK.steps
    assert share["of_streaming_limit"] == pytest.approx(
        judged["streaming"]["seconds"] / share["step_s"]
    )
    assert "| ours |" in limits.table(judged)


def test_the_faster_of_two_measurements_counts() -> None:
    slow = dataclasses.replace(
        MACHINE,
        fetch_gbps=1.0,
        flops={name: rate * 2 for name, rate in MACHINE.flops.items()},
        nvme_read_gbps=None,
    )
    best = limits.faster(slow, MACHINE)
    assert best.fetch_gbps == MACHINE.fetch_gbps
    assert best.flops == slow.flops
    assert best.nvme_read_gbps == MACHINE.nvme_read_gbps
    assert best.memory_gbps == MACHINE.memory_gbps
