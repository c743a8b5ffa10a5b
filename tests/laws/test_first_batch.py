"""The plan is made for the first batch that trains, and stays. Later batches train with the bits of
a plain loop, or are refused before their forward. Where memory is counted, the device's memory ends
for activations, too.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

import stronghold
from stronghold.plan.memory import activation_bytes
from tests.conftest import MACHINE
from tests.models import MODELS, loss_of, token_batch
from tests.support.counted import CountedMemory, counted
from tests.support.profiles import use_slow_link
from tests.support.ranks import run_ranks
from tests.support.training import (
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train,
    train_plain,
    train_windowed,
)

SHORT, LONG = 64, 512  # tokens of a sequence, of which a batch has two
# Bytes of the counted device. The model in bf16 takes 0.42 MB whole; activations that are kept take
# 0.53 MB with short batches and 4.2 with long ones, of which 1.7 if they are computed again.
TIGHT, MIDDLE, AMPLE = 1_300_000, 3_000_000, 9_000_000


def section_of(total_bytes: int, **more: Any) -> dict[str, Any]:
    return {"gpu_memory": total_bytes, "cpu_threads": 1, **more}


@pytest.fixture(autouse=True)
def slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_slow_link(tmp_path, monkeypatch)


def budget_of(name: str, share: float) -> int:
    """A share of what the whole model takes on the device, with its optimizer's state."""
    model, _ = MODELS[name]()
    return int(share * 16 * sum(parameter.numel() for parameter in model.parameters()))


# -- one plan --------------------------------------------------------------------------------------
@pytest.mark.sampled(6)
@pytest.mark.parametrize("clipping", [1.0, 0.0])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_plan_for_the_first_batch_changes_no_bit(name: str, clipping: float) -> None:
    """Whether the costs can be counted or not: the model's code runs for the count, and nothing of
    it stays."""
    section = section_of(max(1 << 18, budget_of(name, 0.9)), early_layers=None)
    plans: list[Any] = []
    run = train_windowed(
        MODELS[name],
        steps=3,
        settings=config(clipping=clipping, section=section),
        after=lambda engine, _: plans.append(engine.plan),
        inspect=lambda engine: plans.append(engine.memory_report()),
    )
    assert_identical(run, train_plain(MODELS[name], steps=3, clipping=clipping))
    *of_steps, report = plans
    assert all(plan is of_steps[0] for plan in of_steps)
    assert report.gpu_peak <= section["gpu_memory"]


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize(("name", "share"), [("llama", 0.3), ("llama", 0.9), ("uneven", 1.4)])
def test_the_peak_is_planned_also_where_the_plan_before_had_more_slots(
    name: str, share: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the third model, of which every block stays."""
    monkeypatch.setenv("STRONGHOLD_PROFILE", str(MACHINE))
    section = section_of(budget_of(name, share), chunk=chunk)
    model, make_batch = MODELS[name]()
    engine = initialized(model, config(section=section))
    train(engine, make_batch, range(2))
    report = engine.memory_report()
    engine.destroy()
    assert report.gpu_peak == report.gpu_planned <= section["gpu_memory"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_layers_move_once_before_the_first_gradient(accumulation: int) -> None:
    """Evaluation comes first, and needs no plan for a batch."""
    settings = config(accumulation=accumulation, section=section_of(budget_of("llama", 0.8)))
    model, make_batch = MODELS["llama"]()
    engine = initialized(model, settings)
    with torch.no_grad():
        engine(**make_batch(9))
    before = engine.plan
    assert before.window == 3
    train(engine, make_batch, range(1))
    planned = engine.plan
    assert planned.updated_on_gpu - before.updated_on_gpu
    train(engine, make_batch, range(1, 3))
    assert engine.plan is planned
    engine.destroy()


def test_the_predicted_step_stands_beside_the_measured_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, in the trace and in `engine.inspect()`. Not for steps of other sizes."""
    trace = tmp_path / "trace.json"
    section = section_of(budget_of("llama", 0.8), trace=str(trace))
    model, _ = MODELS["llama"]()
    engine = initialized(model, config(accumulation=2, section=section) | {"steps_per_print": 1})
    assert engine.inspect().predicted is None
    with caplog.at_level("INFO", logger="stronghold"):
        for length in (32, 32, 16):
            for _ in range(2):
                engine.backward(loss_of(engine(**token_batch(2, length=length))))
                engine.step()
    view = engine.inspect()
    engine.destroy()
    predicted_ms = view.predicted.step_s * 1e3
    assert predicted_ms > 0
    assert sum(view.predicted.shares.values()) == pytest.approx(1.0)
    assert view.last_step.predicted_s is None  # another size
    told = [line for line in caplog.messages if line.startswith("step ")]
    assert [f"(predicted {predicted_ms:,.0f})" in line for line in told] == [True, True, False]
    assert f"predicted: {view.predicted}" in caplog.messages
    assert f"predicted {view.predicted}" in str(view).splitlines()
    measured_ms = view.last_step.step_s * 1e3
    assert f"measured {measured_ms:,.0f} ms in step 3, " in str(view)
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    steps = [event["args"] for event in events if event["name"].startswith("step ")]
    assert [args.get("predicted_ms") for args in steps] == [predicted_ms, predicted_ms, None]


def test_a_pinned_plan_is_that_of_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is open")

    monkeypatch.setattr("stronghold.engine.planner.count_costs", refuse)
    pinned = {"window": 2, "activations": "keep", "resident_layers": 0}
    model, make_batch = MODELS["llama"]()
    engine = initialized(model, config(section=section_of(10**8, **pinned)))
    plan = engine.plan
    train(engine, make_batch, range(2))
    assert engine.plan is plan
    engine.destroy()


def test_training_goes_on_from_a_checkpoint_with_the_plan_for_the_first_batch(
    tmp_path: Path,
) -> None:
    """Masters and moments exist before the plan, and move with their layers."""
    section = section_of(budget_of("llama", 0.8))
    settings = config(section=section)
    expected = train_plain(MODELS["llama"], steps=4)
    run = Run()
    for steps in (range(2), range(2, 4)):
        torch.manual_seed(0)
        model, make_batch = MODELS["llama"]()
        engine = initialized(model, settings)
        if steps.start:
            engine.load_checkpoint(tmp_path)
        torch.manual_seed(1)
        for step in steps:
            loss = loss_of(engine(**make_batch(step)))
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.detach().clone())
        assert engine.plan.updated_on_gpu
        engine.save_checkpoint(tmp_path)
        run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        run.moments = moments_of(engine)
        engine.destroy()
    assert_identical(run, expected)


class Noting(nn.Module):
    """Counts its calls, draws random numbers of three generators, and keeps what it has seen."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls = 0
        self.drawn: list[float] = []
        self.lengths: dict[str, set[int]] = {"seen": set()}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.drawn += [random.random(), float(np.random.rand()), float(torch.rand([]))]
        self.lengths["seen"] = {*self.lengths["seen"], input_ids.size(1)}
        return loss_of(self.model(input_ids=input_ids, labels=labels))


def test_the_count_leaves_no_trace_in_the_program() -> None:
    def run(make_engine: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model, make_batch = MODELS["llama"]()
        noting, seen = Noting(model), []
        noting.model.register_forward_hook(lambda *_: seen.append(1))
        settings = config(section=section_of(budget_of("llama", 0.8)))
        engine = initialized(noting, settings) if make_engine else noting
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        for step in range(2):
            loss = engine(**make_batch(step))
            if make_engine:
                engine.backward(loss)
                engine.step()
        found = noting.calls, noting.drawn, noting.lengths, len(seen)
        if make_engine:
            assert engine.plan.updated_on_gpu
            engine.destroy()
        return found

    assert run(make_engine=True) == run(make_engine=False)


# -- batches that differ ---------------------------------------------------------------------------
def llama(lengths: list[int]) -> Any:
    """Makes a model, and micro-batches of these lengths."""

    def factory() -> Any:
        model, _ = MODELS["llama"]()
        return model, lambda micro: token_batch(micro, length=lengths[micro])

    return factory


def trained(
    lengths: list[int], settings: dict[str, Any], monkeypatch: Any
) -> tuple[Run, list[int], list[str]]:
    """The run of the batches that have room, their lengths, and the refusals of the others."""
    run, taken, refusals = Run(), list[int](), list[Exception]()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        for micro in range(len(lengths)):
            try:
                loss = loss_of(engine(**make_batch(micro)))
            except stronghold.OutOfMemoryError as error:
                refusals.append(error)
                continue
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.detach().clone())
            taken.append(micro)
            del loss
        run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        if taken:
            run.moments = moments_of(engine)
    assert all(map(should_reduce_batch_size, refusals))
    return run, taken, [str(refusal) for refusal in refusals]


SEQUENCES = {
    "grow": [SHORT, SHORT, 80, 96, LONG, SHORT],
    "shrink": [LONG, 200, SHORT, 8, 2],
    "alternate": [SHORT, LONG, SHORT, LONG],
    "few tokens first": [2, SHORT, LONG, 2],
}


@pytest.mark.parametrize("total_bytes", [TIGHT, MIDDLE, AMPLE])
@pytest.mark.parametrize("order", SEQUENCES)
def test_batches_that_differ_train_or_are_refused_before_their_forward(
    order: str, total_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch never runs out of memory: what is not refused has room."""
    lengths = SEQUENCES[order]
    settings = config(precision="bf16", section=section_of(total_bytes))
    run, taken, refusals = trained(lengths, settings, monkeypatch)
    assert len(taken) + len(refusals) == len(lengths)
    for refusal in refusals:
        assert "emulated would be out of memory" in refusal
    if total_bytes == AMPLE:
        assert not refusals
    if total_bytes == TIGHT:
        assert all(lengths[micro] < LONG for micro in taken)
        assert refusals
    batches = [token_batch(micro, length=lengths[micro]) for micro in taken]
    plain = train_plain(
        lambda: (MODELS["llama"]()[0], batches.__getitem__), steps=len(taken), precision="bf16"
    )
    assert_identical(run, plain)


@pytest.mark.parametrize("chunk", [None, 1])
def test_a_batch_is_counted_while_a_graph_and_gradients_wait(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forwards, then two backwards, in each step. The second batch of a step is larger than any
    before."""
    lengths = [SHORT, SHORT, SHORT, 96, SHORT, LONG]
    section = section_of(AMPLE, chunk=chunk)
    settings = config(precision="bf16", accumulation=2, section=section)
    run = Run()
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        for first in range(0, len(lengths), 2):
            losses = [loss_of(engine(**make_batch(first + number))) for number in range(2)]
            run.losses += [loss.detach().clone() for loss in losses]
            for loss in losses:
                engine.backward(loss)
                engine.step()
            del losses, loss
        assert any(known.size.length >= LONG for known in engine._planner._levels)
        run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    chunks = (lambda model: list(model.model.layers), chunk) if chunk else None
    plain = train_plain(llama(lengths), steps=3, accumulation=2, precision="bf16", chunks=chunks)
    plain.moments = {}
    assert_identical(run, plain)


def test_room_for_the_largest_batch_is_left_by_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the first batch's plan fills the device, and layers move again for the long batch.
    With it the long batch keeps nothing that can be computed again."""
    monkeypatch.setenv("STRONGHOLD_PROFILE", str(MACHINE))  # on which recomputation costs time
    lengths = [SHORT, LONG, SHORT]
    section = section_of(2_600_000)
    _, taken, _ = trained(lengths, config(precision="bf16", section=section), monkeypatch)
    assert taken == [0, 1, 2]
    section |= {"batch_tokens": 2 * LONG}
    run, taken, _ = trained(lengths, config(precision="bf16", section=section), monkeypatch)
    assert taken == [0, 1, 2]
    assert_identical(run, train_plain(llama(lengths), steps=3, precision="bf16"))


def test_a_first_batch_may_leave_no_room_for_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the config asks for the room."""
    section = section_of(2_100_000)
    _, taken, _ = trained([LONG], config(precision="bf16", section=section), monkeypatch)
    assert taken == [0]
    section |= {"batch_tokens": 3 * LONG}
    _, taken, (refusal,) = trained([LONG], config(precision="bf16", section=section), monkeypatch)
    assert not taken
    assert "lower stronghold.batch_tokens" in refusal


def spares(engine: Any) -> bool:
    """True if the last forward kept less than the plan says."""
    return tuple(layer.level for layer in engine._job.layers) != engine.plan.activations


def test_a_batch_that_would_fill_the_last_tenth_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator's fragments need it."""
    monkeypatch.setenv("STRONGHOLD_PROFILE", str(MACHINE))
    monkeypatch.setattr("stronghold.engine.planner.CHECKED_AHEAD", 1.0)
    section = section_of(MIDDLE, resident_layers=0, resident_updates="host")
    lengths = list(range(SHORT, LONG, 40))
    settings = config(precision="bf16", section=section)
    spared: list[bool] = []
    with counted(llama(lengths), settings, monkeypatch) as (engine, make_batch):
        layout, plan = engine.inspect().layout, None
        for micro in range(len(lengths)):
            loss = loss_of(engine(**make_batch(micro)))
            if plan is None:
                plan = engine.plan
                share = plan.activation_bytes / lengths[0]  # bytes are proportional to the length
            spared.append(spares(engine))
            kept_bytes = plan.gpu_total_bytes + share * lengths[micro]
            if kept_bytes < 0.88 * MIDDLE:
                assert not spared[-1]
            elif kept_bytes > 0.92 * MIDDLE:
                assert spared[-1]
            engine.backward(loss)
            engine.step()
            del loss
    assert layout.streamed
    assert {*spared} == {True, False}


def test_the_budget_of_the_config_counts_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(precision="bf16", section=section_of(160_000))
    with counted(llama([SHORT]), settings, monkeypatch, AMPLE) as (engine, make_batch):
        train(engine, make_batch, range(1))
        assert 80_000 < engine.plan.gpu_total_bytes <= 160_000 < engine.plan.activation_bytes


def test_layers_with_files_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme = {"path": str(tmp_path), "spill": "moments"}
    section = section_of(AMPLE, nvme=nvme, early_layers=None)
    settings = config(precision="bf16", clipping=0.0, section=section)
    with counted(llama([SHORT]), settings, monkeypatch) as (engine, make_batch):
        before = engine.plan
        train(engine, make_batch, range(1))
        after = engine.plan
        assert (after.resident, after.in_files) == (before.resident, before.in_files)
        assert after.window == before.window == 3  # all blocks


@pytest.mark.parametrize("length", [96, 4096])
def test_a_larger_batch_of_an_evaluation_runs_or_is_refused(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(precision="bf16", section=section_of(TIGHT))
    with counted(llama([SHORT]), settings, monkeypatch) as (engine, make_batch):
        train(engine, make_batch, range(1))
        with torch.no_grad():
            if length == 96:
                engine(**token_batch(1, length=length))
            else:
                with pytest.raises(stronghold.OutOfMemoryError, match="would be out of memory"):
                    engine(**token_batch(1, length=length))
        assert engine.inspect().device.memory.used_bytes < TIGHT


def test_a_first_batch_that_no_plan_can_hold_is_refused_with_the_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config(precision="bf16", section=section_of(600_000))
    with counted(llama([LONG, SHORT]), settings, monkeypatch) as (engine, make_batch):
        with pytest.raises(stronghold.OutOfMemoryError, match="shorten the sequences") as raised:
            engine(**make_batch(0))
        assert "with 1,024 tokens in a micro-batch needs" in str(raised.value)
        train(engine, make_batch, range(1, 2))
        assert engine.plan.demand.tokens == 2 * SHORT  # the plan is for the first that has room


# -- when an estimate is too low -------------------------------------------------------------------
class Hiding(nn.Module):
    """Takes its batch in an object: nobody sees from outside how large it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        return loss_of(self.model(**vars(batch)))


def hidden(lengths: list[int]) -> Any:
    def made() -> Any:
        model, make_batch = llama(lengths)()
        return Hiding(model), lambda micro: {"batch": SimpleNamespace(**make_batch(micro))}

    return made


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("total_bytes", "call"), [(2_500_000, "engine.forward"), (4_300_000, "engine.backward")]
)
def test_what_runs_out_of_memory_trains_when_it_is_tried_again(
    total_bytes: int, call: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step begins again where it ended in a backward; after a forward it goes on."""
    monkeypatch.setenv("STRONGHOLD_PROFILE", str(MACHINE))  # on which recomputation costs time
    lengths = [SHORT] * accumulation + [LONG] * accumulation
    section = section_of(total_bytes, resident_layers=0, resident_updates="host")
    settings = config(precision="bf16", accumulation=accumulation, section=section)
    run, errors = Run(), list[tuple[bool, str]]()
    with counted(hidden(lengths), settings, monkeypatch) as (engine, make_batch):
        while (micro := engine.micro_steps) < len(lengths):
            assert len(errors) < 3, errors
            del run.losses[micro:]
            try:
                loss = engine(**make_batch(micro))
                engine.backward(loss)
            except stronghold.OutOfMemoryError as error:
                errors.append((should_reduce_batch_size(error), str(error)))
                loss = None
                continue
            engine.step()
            run.losses.append(loss.detach().clone())
            del loss
        run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        run.moments = moments_of(engine)
    ((is_known, text),) = errors
    assert is_known
    assert f"It was in {call}" in text
    assert "from now on backward computes again what it can" in text
    plain = train_plain(hidden(lengths), steps=2, accumulation=accumulation, precision="bf16")
    assert_identical(run, plain)


# -- the estimate ----------------------------------------------------------------------------------
class Peak(CountedMemory):
    """Knows the most bytes of tensors so far."""

    peak_used_bytes = 0

    def take(self, nbytes: int) -> None:
        super().take(nbytes)
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)


@pytest.mark.parametrize("level", ["keep", "recompute"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "phi3", "mixtral"])
def test_the_estimate_of_activations_is_what_a_step_takes(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The margin of a plan, a tenth of the device, is more than the error."""
    monkeypatch.setattr("tests.support.counted.CountedMemory", Peak)
    section = section_of(1 << 30, resident_layers=0, resident_updates="host", activations=level)
    settings = config(precision="bf16", section=section)
    batch = token_batch(0, length=256)
    with counted(MODELS[name], settings, monkeypatch) as (engine, _):
        memory = engine.inspect().device.memory
        for _ in range(2):
            memory.peak_used_bytes = before = memory.used_bytes
            loss = loss_of(engine(**batch))
            engine.backward(loss)
            del loss
            engine.step()
        plan = engine.plan
        measured = memory.peak_used_bytes - before
        planned = activation_bytes(engine.inspect().layout, plan.activations, plan.demand)
    assert planned == plan.activation_bytes
    assert 0.9 * measured <= planned <= 1.1 * measured


# -- several ranks ---------------------------------------------------------------------------------
@pytest.mark.slow
def test_ranks_plan_for_the_longest_of_their_batches(tmp_path: Path) -> None:
    found = run_ranks("tests.support.rank_programs:longer", 2, tmp_path)
    losses = [loss for pair in zip(*(f["losses"] for f in found), strict=True) for loss in pair]

    def factory() -> Any:
        model, _ = MODELS["llama"]()
        return model, lambda micro: token_batch(micro, length=(64, 256)[micro % 2])

    one = train_plain(factory, steps=3, accumulation=2, clipping=0.0)
    for of_rank in found:
        assert of_rank["tokens"] == 2 * 256
        assert of_rank["plan"] == found[0]["plan"]
        assert_identical(
            Run(losses=losses, weights=of_rank["weights"]),
            Run(losses=one.losses, weights=one.weights),
        )
