"""Laws of the third tier in bytes: peaks equal the plan on all tiers, host bytes per parameter are
what is promised, nothing spills that RAM holds, and what cannot fit is refused with what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import BudgetError
from tests.models import MODELS
from tests.models.families import llama_of
from tests.support.sizes import named_size
from tests.support.training import config, initialized, train

PAGE_NUMEL = 2048


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", PAGE_NUMEL * 24)


def engine_of(model: nn.Module, path: Path, section: dict[str, Any], **settings: Any) -> Any:
    nvme = {"path": str(path), **section.pop("nvme", {})}
    section = {"window": 2, **section, "nvme": nvme}
    return initialized(model, config(section=section, **settings))


def test_a_step_moves_the_planned_bytes(tmp_path: Path) -> None:
    """Law 7 for the disk: what an update needs is read once and written once, weights are read for
    each fetch."""
    for spill, clipping, accumulation in (
        ("moments", 0.0, 1),
        ("masters", 1.0, 1),
        ("weights", 1.0, 1),
        ("weights", 1.0, 3),
    ):
        model, make_batch = MODELS["gpt"](num_layers=4)
        settings = {"clipping": clipping, "accumulation": accumulation, "precision": "bf16"}
        engine = engine_of(model, tmp_path, {"window": 1, "nvme": {"spill": spill}}, **settings)
        moved = []
        for step in range(4):
            train(engine, make_batch, range(step, step + 1))
            engine.synchronize()
            for layer in engine.inspect().layers:
                layer.wait()
            traffic = engine.inspect().traffic
            moved.append((traffic.read_bytes, traffic.written_bytes))
        read, written = (late - early for early, late in zip(moved[2], moved[3], strict=True))
        plan = engine.plan
        engine.destroy()
        assert written == plan.traffic.nvme_written_bytes
        assert read <= plan.traffic.nvme_read_bytes
        # a window keeps what the turn needs
        assert read >= 0.7 * plan.traffic.nvme_read_bytes


@pytest.mark.parametrize(
    ("spill", "clipping", "accumulation", "most"),
    [("moments", 0.0, 1, 6.5), ("weights", 1.0, 1, 2.5), ("weights", 1.0, 2, 4.5)],
)
def test_host_bytes_per_parameter_are_few(
    spill: str, clipping: float, accumulation: int, most: float, tmp_path: Path
) -> None:
    settings = {"precision": "bf16", "clipping": clipping, "accumulation": accumulation}
    engine = engine_of(
        llama_of(128, 352, 8, 4, 4, 256), tmp_path, {"nvme": {"spill": spill}}, **settings
    )
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2 * accumulation):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    report, plan = engine.memory_report(), engine.plan
    rings = sum(size for name, size in plan.host_bytes.items() if "ring (" in name)
    assert report.host_peak == report.host_planned
    assert (report.host_peak - rings) / plan.num_parameters <= most
    assert report.nvme_peak == report.nvme_planned
    engine.destroy()


def test_state_of_three_times_the_host_budget_trains(tmp_path: Path) -> None:
    """What is kept in RAM is what the budget holds, and the losses are those of RAM alone."""
    from tests.support.training import assert_identical, train_windowed

    def factory() -> Any:
        return MODELS["gpt"](num_layers=48)

    settings = {"precision": "bf16", "clipping": 1.0}
    found: list[Any] = []

    def inspect(engine: Any) -> None:
        found.append((engine.memory_report(), engine.plan))

    section = {"window": 2}
    run = train_windowed(
        factory, steps=3, settings=config(section=section, **settings), inspect=inspect
    )
    state = found[0][0].host_peak
    for budget in (state, state // 2, state // 3):
        nvme = {"path": str(tmp_path)}
        here = config(section={**section, "host_memory": budget, "nvme": nvme}, **settings)
        assert_identical(train_windowed(factory, steps=3, settings=here, inspect=inspect), run)
        report, plan = found[-1]
        assert report.host_peak == report.host_planned <= budget
        assert report.nvme_peak == report.nvme_planned
        assert bool(plan.nvme_total_bytes) == (budget < state)
        kept = [not arrays for arrays in plan.in_files]
        assert kept == sorted(kept, reverse=True), "the first layers stay"
    assert 3 * found[-1][0].host_peak <= state


def test_what_does_not_fit_is_refused_with_what_helps(tmp_path: Path) -> None:
    model, _ = MODELS["gpt"](num_layers=24)

    def refusal(section: dict[str, Any]) -> str:
        settings = config(precision="bf16", section={"window": 2, **section})
        with pytest.raises(BudgetError) as caught:
            stronghold.initialize(model=model, config=settings, model_parameters=model.parameters())
        assert list(tmp_path.iterdir()) == []
        return str(caught.value)

    nvme = {"path": str(tmp_path)}
    assert "stronghold.nvme.path" in refusal({"host_memory": 600_000})
    told = refusal({"host_memory": 600_000, "nvme": {**nvme, "spill": "moments"}})
    assert 'leave stronghold.nvme.spill ("moments") out' in told
    told = refusal({"host_memory": 600_000, "nvme": {**nvme, "capacity": 4096}})
    need = named_size(told, r"stronghold\.nvme\.capacity: what spills needs")
    told = refusal({"host_memory": 100_000, "nvme": nvme})
    least = named_size(told, "at least")
    for section in (
        {"host_memory": 600_000, "nvme": {**nvme, "capacity": need}},
        {"host_memory": least, "nvme": nvme},
    ):
        engine_of(model, tmp_path, section, precision="bf16").destroy()
