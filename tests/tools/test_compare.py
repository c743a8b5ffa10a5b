"""Laws of the comparison: equal tasks, judged losses, and every way to end is a row."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stronghold.errors import BudgetError
from tests.support.reference import AdamHyper, adam_step

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import compare  # noqa: E402
from methods import METHODS, judge, process, resolve  # noqa: E402
from methods.base import clip  # noqa: E402
from methods.child import classify  # noqa: E402
from methods.model import build  # noqa: E402
from methods.plain import Plain  # noqa: E402
from methods.task import Data, Task, tflops_megatron  # noqa: E402

from tests.support.bench_rows import run_here  # noqa: E402

WRONG = "tests.support.wrong_method:LosesMicroBatches"
TASK = Task(
    layers=2, hidden=32, heads=2, vocab=128, seq=16, batch=2, accumulation=2, steps=3, warmup=1
)
TASK = dataclasses.replace(TASK, window=1, threads=1)
TIMEOUT_S = 120.0


def gpt_parameters(*, layers: int, hidden: int, vocab: int, seq: int) -> int:
    """Of a GPT with a tied head: Megatron-LM's count (Narayanan et al. 2021)."""
    return layers * (12 * hidden**2 + 13 * hidden) + vocab * hidden + seq * hidden + 2 * hidden


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    methods = ["plain", "l2l", "stronghold", "fsdp2-offload", WRONG]
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch, ["plain", "l2l", "stronghold", WRONG])
        return compare.compare(methods, TASK, TIMEOUT_S)


def row_of(result: dict[str, Any], method: str) -> dict[str, Any]:
    (row,) = (row for row in result["rows"] if row["method"] == method)
    assert row["status"] == "ok", row
    return row


def run(method: str, task: Task) -> dict[str, Any]:
    return compare.run_method(method, task, TIMEOUT_S)


# -- rows -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["plain", "l2l", "stronghold", "fsdp2-offload"])
def test_correct_methods_have_the_references_losses(result: dict[str, Any], method: str) -> None:
    row = row_of(result, method)
    assert len(row["losses"]) == TASK.num_steps
    assert row["verdict"] == "equal", row["loss_difference"]
    assert row["samples_per_s"] > 0.0
    assert row["num_parameters"] == gpt_parameters(layers=2, hidden=32, vocab=128, seq=16)


def test_a_method_with_other_losses_is_wrong_not_fast(result: dict[str, Any]) -> None:
    row = row_of(result, WRONG)
    assert row["verdict"] == "wrong"
    assert row["first_wrong_step"] == 2, "the first loss comes before the first update"
    assert "**wrong** from step 2" in compare.line(row)


def test_the_page_shows_every_method_and_the_loss_of_every_step(result: dict[str, Any]) -> None:
    lines = compare.table(result).splitlines()
    assert sum(line.startswith("| stronghold | ok") for line in lines) == 1
    losses = [line for line in lines if line.startswith(tuple(f"| {n} | " for n in range(1, 5)))]
    assert len(losses) == TASK.num_steps


def test_bytes_are_counted_where_the_table_says_so(result: dict[str, Any]) -> None:
    """plain moves nothing; a window of one layer fetches each block in forward and in backward of
    every micro-batch, but the one that is still there, and drains its gradients once."""
    block = 4 * (12 * 32**2 + 13 * 32)
    assert row_of(result, "plain")["link_bytes"] == 0
    fetched = TASK.accumulation * (2 * 2 - 1) * block
    assert row_of(result, "stronghold")["link_bytes"] >= fetched
    assert row_of(result, "fsdp2-offload")["link_bytes"] is None


# -- a reference made before -----------------------------------------------------------------------
def test_an_earlier_reference_counts_for_the_same_training_alone(
    result: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "reference.json"
    file.write_text(json.dumps(result))
    capped = dataclasses.replace(TASK, gpu_memory=10**9, window=2, activations="recompute")
    found = compare.earlier_reference(file, capped)
    assert found["losses"] == result["reference"]["losses"]
    assert "reference.json" in found["source"]
    for change in ({"lr": 1.0}, {"accumulation": 1}, {"precision": "bf16"}, {"clipping": 0.0}):
        with pytest.raises(SystemExit, match="another training"):
            compare.earlier_reference(file, dataclasses.replace(TASK, **change))


def test_a_comparison_that_is_cut_off_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come first, and are left as they come; the reference is run after them."""
    calls: list[str] = []

    def run_method(name: str, task: Task, timeout_s: float) -> dict[str, Any]:
        calls.append(name)
        if name == "plain":
            raise KeyboardInterrupt
        return {"method": name, "status": "ok", "losses": [1.0]}

    monkeypatch.setattr(compare, "run_method", run_method)
    kept: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        compare.compare(
            ["l2l", "stronghold"], TASK, TIMEOUT_S, None, lambda found: kept.append(str(found))
        )
    assert calls == ["l2l", "stronghold", "plain"]
    assert ["'stronghold'" in found for found in kept] == [False, True]
    assert "unchecked" in kept[-1]


def test_a_method_that_is_stuck_shows_its_stacks() -> None:
    program = (
        "import faulthandler, time; faulthandler.enable()\n"
        "def stands_still(): print('here', flush=True); time.sleep(60)\n"
        "stands_still()"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as stuck:
        assert stuck.stdout is not None
        stuck.stdout.readline()
        _, killed = process.watch(stuck, None, 0.0)
        process.end(stuck)
        said = stuck.stderr.read().decode() if stuck.stderr else ""
    assert killed == {"status": "failed", "reason": "did not end in time: killed"}
    assert "in stands_still" in said


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("out of memory", 0)])
def test_a_failed_method_is_a_failed_comparison(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"method": "plain", "status": status, "reason": ""}
    monkeypatch.setattr(compare.process, "run", lambda *_, **__: dict(row))
    monkeypatch.setattr(sys, "argv", ["compare.py", "--method", "plain", "--no-reference"])
    assert compare.main() == code


# -- out of memory --------------------------------------------------------------------------------
def test_passing_the_host_cap_is_a_row() -> None:
    row = run("plain", dataclasses.replace(TASK, host_memory=20 << 20))
    assert row["status"] == "out of memory"
    assert "the cap is 0.02" in row["reason"]


def test_what_the_environment_says_is_a_cap_for_every_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """References too, which run without the task's caps."""
    monkeypatch.setenv("STRONGHOLD_HOST_MEMORY", str(20 << 20))
    row = run("plain", TASK)
    assert row["status"] == "out of memory"
    assert "the cap is 0.02" in row["reason"]


def test_a_kill_by_the_kernel_is_out_of_memory() -> None:
    assert process.exit_result(-9)["status"] == "out of memory"
    assert process.exit_result(1)["status"] == "failed"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("x"), "out of memory"),
        (MemoryError(), "out of memory"),
        (BudgetError("the window does not fit"), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),
        (RuntimeError("shapes differ"), "failed"),
    ],
)
def test_what_went_wrong_is_told_apart(error: Exception, status: str) -> None:
    assert classify(error)["status"] == status
    wrapped = RuntimeError("a lane failed")
    wrapped.__cause__ = error
    assert classify(wrapped)["status"] == status


def test_every_method_exists_and_is_described() -> None:
    for name, entry in METHODS.items():
        assert entry.about
        assert resolve(name).__name__
    with pytest.raises(SystemExit, match="expected all, plain"):
        compare.method_names(["plane"])
    assert compare.method_names(["plain,l2l", "plain"]) == ["plain", "l2l"]


# -- the reference --------------------------------------------------------------------------------
def test_the_reference_is_adam_by_its_formula() -> None:
    """Against fp64 Adam on autograd's gradients; fp32 rounding alone is between them."""
    task = dataclasses.replace(TASK, layers=1, steps=4, warmup=0)
    method, model = Plain(task), build(task, recompute=False)
    data, hyper = (Data(task), AdamHyper(lr=task.lr, beta2=0.95, weight_decay=0.1))
    values = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    moments = {n: (np.zeros_like(v), np.zeros_like(v)) for n, v in values.items()}
    for step in range(1, task.num_steps + 1):
        expected = []
        for batch in data.step(step - 1):
            loss = model(**batch).loss
            (loss / task.accumulation).backward()
            expected.append(loss.item())
        gradients = {n: p.grad.double().numpy() for n, p in model.named_parameters()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        scale = min(1.0, task.clipping / (norm + 1e-6))
        for name, parameter in model.named_parameters():
            p, m, v = adam_step(values[name], *moments[name], gradients[name] * scale, step, hyper)
            values[name], moments[name] = p, (m, v)
            parameter.data = torch.from_numpy(p).float()
        model.zero_grad()
        loss = method.step(data.step(step - 1)).item()
        assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-6)


def test_a_task_is_the_same_data_and_weights_on_every_call() -> None:
    for _ in range(2):
        torch.rand(7)  # global state must not matter
        models = [build(TASK, recompute=False) for _ in range(2)]
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)
    one, other = (Data(TASK).step(3) for _ in range(2))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, other, strict=True))
    assert Task.from_json(TASK.to_json()) == TASK


def test_the_published_figures_are_those_of_the_formulas() -> None:
    """The sizes of the paper's artifact in billions, and its TFLOPS from samples/s and k = 4."""
    for layers, billions in ((32, 1.717), (48, 2.522), (78, 4.033), (100, 5.141)):
        count = gpt_parameters(layers=layers, hidden=2048, vocab=50304, seq=1024)
        assert count / 1e9 == pytest.approx(billions, abs=6e-4)
    count = gpt_parameters(layers=32, hidden=2048, vocab=50304, seq=1024)
    assert tflops_megatron(count, 1024, 1 / 0.7496, True) == pytest.approx(10.54, abs=0.01)


def test_the_llama_is_built_from_sizes_alone() -> None:
    task = dataclasses.replace(TASK, family="llama", heads=4, kv_heads=2, intermediate=48)
    model = build(task, recompute=True)
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert sum(p.numel() for p in model.parameters()) == 2 * block + 2 * 128 * 32 + 32
    loss = model(**Data(task).step(0)[0]).loss
    loss.backward()
    assert math.log(128) - 0.5 < loss.item() < math.log(128) + 0.5
    assert all(p.grad is not None for p in model.parameters())


def test_the_norm_of_a_large_gradient_is_right_on_the_cpu() -> None:
    """torch's own is 8e-4 off for two million elements, which moves losses past the bound."""
    gradients = [torch.randn(2_000_003), torch.randn(17, 3)]
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    scaled = [g.clone() for g in gradients]
    clip(scaled, 1.0)
    for before, after in zip(gradients, scaled, strict=True):
        assert torch.allclose(after, before / (exact + 1e-6), rtol=2e-6, atol=0.0)
    unchanged = [g.clone() for g in gradients]
    clip(unchanged, 2.0 * exact)
    clip(unchanged, 0.0)
    assert all(map(torch.equal, unchanged, gradients))


# -- the judge ------------------------------------------------------------------------------------
def test_the_bound_is_what_another_order_of_summation_does() -> None:
    reference, other = [2.0, 1.0, 1.0], [2.0, 1.0 + 1e-4, 1.0]
    allowed = judge.bounds(reference, other, "fp32")
    assert allowed == pytest.approx([1e-5, 8e-4, 8e-4], rel=1e-3)
    assert judge.verdict([2.0, 1.0, 1.0 + 7e-4], reference, allowed)[0] == "equal"
    assert judge.verdict([2.0, 1.0, 1.0 + 9e-4], reference, allowed)[::2] == ("wrong", 3)
    assert judge.verdict([2.0001, 1.0, 1.0], reference, allowed)[::2] == ("wrong", 1)
    assert judge.verdict([2.0, math.nan, 1.0], reference, allowed)[0] == "wrong"
    assert judge.verdict([2.0, 1.0], reference, allowed)[0] == "wrong"
    assert judge.verdict([2.0], None, [])[0] == "unchecked"
