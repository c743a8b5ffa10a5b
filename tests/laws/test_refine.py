"""The plan is refined between two steps: faster, and not one bit or byte is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from stronghold.plan.plan import make_plan
from stronghold.plan.rules import fastest_plan
from stronghold.predict.refine import TRACED_STEPS, WARM_UP_STEPS
from tests.models import MODELS, loss_of
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import SleepingModel
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

SHARE = 0.8  # the model does not fit whole
REFINED = WARM_UP_STEPS + TRACED_STEPS  # steps
# so that whatever stays on the device pays
SLOW = {"link_gbps": 0.003, "update_gbps": 0.015}


def budget_of(factory: Any, share: float) -> int:
    """A share of what the whole model takes on the device, with its optimizer's state."""
    model, _ = factory()
    return int(share * 16 * sum(p.numel() for p in model.parameters()))


@pytest.mark.parametrize(
    ("clipping", "accumulation", "precision"),
    [(1.0, 1, "fp32"), (0.0, 1, "bf16"), (1.0, 3, "bf16")],
    ids=["held", "ring", "accumulated"],
)
@law_of_time
def test_a_refined_plan_goes_on_with_the_same_bits(
    clipping: float, accumulation: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = MODELS["llama"]
    section = {"gpu_memory": budget_of(factory, SHARE), "cpu_threads": 1, "emulated": dict(SLOW)}
    settings = config(
        clipping=clipping, accumulation=accumulation, precision=precision, section=section
    )
    seen: dict[str, Any] = {}

    def inspect(engine: Any) -> None:
        seen["plan"], seen["report"] = engine.plan, engine.memory_report()

    search = Mock(wraps=fastest_plan)
    monkeypatch.setattr("stronghold.predict.refine.fastest_plan", search)
    run = train_windowed(factory, steps=REFINED + 2, settings=settings, inspect=inspect)
    search.assert_called_once()
    assert seen["report"].gpu_peak <= section["gpu_memory"]
    assert seen["report"].gpu_peak <= seen["report"].gpu_planned
    expected = train_plain(
        factory,
        steps=REFINED + 2,
        clipping=clipping,
        accumulation=accumulation,
        precision=precision,
    )
    assert_identical(run, expected)
    # What was measured decides: not vacuous where the paced lanes were the slow ones.
    on_time(bool(seen["plan"].updated_on_gpu), "the search left every layer on the host")


@pytest.mark.parametrize("taken", [False, True])
def test_a_plan_that_finds_no_room_is_not_changed_to(taken: bool) -> None:
    """What others take before the change does not end the training."""
    factory = MODELS["llama"]
    section = {"gpu_memory": budget_of(factory, SHARE), "cpu_threads": 1, "window": 1}
    seen: list[bool] = []

    def change(engine: Any, step: int) -> None:
        if step != 1:
            return
        now = engine.inspect()
        demand = replace(now.demand, window=None, resident_layers=None, resident_updates="gpu")
        if taken:
            now.device.memory.budget_bytes = now.device.memory.allocated_bytes
        seen.append(engine.replan(make_plan(now.layout, demand)))

    run = train_windowed(factory, steps=REFINED + 3, settings=config(section=section), after=change)
    assert seen == [not taken]
    assert_identical(run, train_plain(factory, steps=REFINED + 3))


@law_of_time
def test_a_refined_plan_is_faster_and_the_trace_is_gone() -> None:
    model = SleepingModel([(1 << 14, 0.001, 0.002)] * 4)
    numel = sum(p.numel() for p in model.parameters())
    section = {"gpu_memory": 10 * numel, "cpu_threads": 1, "emulated": {**SLOW, "poison": False}}
    engine = initialized(model, config(section=section))
    before, x, seconds = engine.plan, torch.ones(1, 1 << 10), []
    for _ in range(REFINED + 3):
        begun = time.perf_counter()
        engine.backward(engine(x))
        engine.step()
        seconds.append(time.perf_counter() - begun)
    after, spans = engine.plan, engine.inspect().operations
    engine.destroy()
    assert not spans
    on_time(after != before, "the plan stayed as it was")
    on_time(min(seconds[REFINED:]) < 0.8 * min(seconds[WARM_UP_STEPS:REFINED]), seconds)


def test_a_pinned_plan_stays() -> None:
    section = {
        "gpu_memory": 10**8,
        "window": 2,
        "activations": "keep",
        "resident_layers": 0,
        "emulated": dict(SLOW),
    }
    model, make_batch = MODELS["llama"]()
    engine = initialized(model, config(section=section))
    plan = engine.plan
    for step in range(REFINED + 1):
        train(engine, make_batch, range(step, step + 1))
        assert engine.plan is plan
    engine.destroy()


def test_the_peak_is_one_plans_and_not_of_two() -> None:
    """What the slots of the first plan had is not added to what the second one keeps in torch."""
    model, make_batch = MODELS["llama"]()
    section = {
        "resident_layers": "all",
        "resident_updates": "gpu",
        "activations": "recompute",
        "cpu_threads": 1,
    }
    engine = initialized(model, config(section=section))
    now = engine.inspect()
    assert not now.plan.whole
    whole = make_plan(now.layout, replace(now.demand, activations="keep"))
    assert whole.whole
    for micro in range(2):
        engine.backward(loss_of(engine(**make_batch(micro))))
        engine.step()
        report = engine.memory_report()
        assert report.gpu_peak == report.gpu_planned
        if micro == 0:
            engine.replan(whole)
    engine.destroy()


# whole
THERE = {"resident_layers": "all", "resident_updates": "gpu", "activations": "keep"}
# one after the other: layers go to the device and come back
PLACES: list[dict[str, Any]] = [
    {"resident_layers": 0, "resident_updates": "host", "activations": "recompute"},
    THERE,
    {"resident_layers": 1, "resident_updates": "gpu", "activations": "keep"},
    {"resident_layers": 0, "resident_updates": "host", "activations": "keep"},
    {**THERE, "activations": "recompute"},
    {"resident_layers": 1, "resident_updates": "host", "activations": "recompute"},
]


def replaced(engine: Any, place: dict[str, Any]) -> None:
    """Go on with a plan in which layers are at `place`."""
    now, wanted = engine.inspect(), dict(place)
    if wanted["resident_layers"] == "all":
        wanted["resident_layers"] = len(now.layout.streamed)
    assert engine.replan(make_plan(now.layout, replace(now.demand, window=None, **wanted)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama", "gpt_tied", "frozen", "uneven"])
@pytest.mark.parametrize(
    ("clipping", "accumulation", "precision"),
    [(1.0, 1, "bf16"), (0.0, 1, "fp32"), (1.0, 3, "bf16"), (0.0, 4, "fp32"), (1.0, 3, "lean")],
)
def test_layers_come_back_from_the_device_with_all_that_they_have(
    name: str, clipping: float, accumulation: int, precision: str
) -> None:
    """Also in the middle of a step, whose sums come with them."""
    factory, steps = MODELS[name], 7
    section = {**PLACES[0], "window": 1, "cpu_threads": 1, "gpu_memory": 1 << 30}
    settings = config(
        clipping=clipping, accumulation=accumulation, precision=precision, section=section
    )
    torch.manual_seed(0)
    model, make_batch = factory()
    engine, run = initialized(model, settings), Run()
    torch.manual_seed(1)
    moved = 0
    for micro in range(steps * accumulation):
        replaced(engine, PLACES[micro % len(PLACES)])
        moved += len(engine.plan.updated_on_gpu)
        report = engine.memory_report()
        assert report.gpu_peak <= report.gpu_planned
        loss = loss_of(engine(**make_batch(micro)))
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.detach().clone())
    run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    run.moments = moments_of(engine)
    engine.destroy()
    assert moved
    assert_identical(
        run,
        train_plain(
            factory, steps=steps, clipping=clipping, accumulation=accumulation, precision=precision
        ),
    )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_many_micro_batches_are_told_what_chunks_would_take(
    accumulation: int, caplog: pytest.LogCaptureFixture
) -> None:
    factory = MODELS["llama"]
    budget = budget_of(factory, 0.3)
    section = {"gpu_memory": budget, "cpu_threads": 1, "emulated": dict(SLOW)}
    settings = config(accumulation=accumulation, section=section)
    with caplog.at_level("INFO", logger="stronghold"):
        train_windowed(factory, steps=REFINED + 1, settings=settings)
    told = [r.getMessage() for r in caplog.records if "in chunks they are" in r.getMessage()]
    assert len(told) == (accumulation > 1)
    if told:
        assert "train_micro_batch_size_per_gpu by 4" in told[0]


def test_where_every_block_stays_training_goes_on() -> None:
    """There is no window of which anything could be said."""
    section = {"resident_layers": "all", "resident_updates": "host", "gpu_memory": 1 << 24}
    settings = config(accumulation=4, section=section)
    run = train_windowed(MODELS["gpt"], steps=4 * (REFINED + 1), settings=settings)
    assert_identical(run, train_plain(MODELS["gpt"], steps=4 * (REFINED + 1), accumulation=4))
