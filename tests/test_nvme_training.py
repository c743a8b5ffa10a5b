"""Laws of the third tier in training: where bytes lie never changes a bit, and costs what is
planned."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from tests.models import MODELS, loss_of
from tests.training import Run, assert_identical, config, moments_of, train_windowed

torch.set_num_threads(1)
STEPS = 3
PAGE_NUMEL = 2048
# As few as hold a page of each array, so that every layer takes several pieces.
SMALLEST_PIECE = PAGE_NUMEL * 24


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.spills.PIECE_BYTES", SMALLEST_PIECE)


def trained(name: str, section: dict[str, Any], **settings: Any) -> Run:
    return train_windowed(
        MODELS[name], steps=STEPS, settings=config(section={"window": 2, **section}, **settings)
    )


@functools.cache
def in_memory(name: str, precision: str, clipping: float, accumulation: int) -> Run:
    return trained(name, {}, precision=precision, clipping=clipping, accumulation=accumulation)


def spilling(path: Path, spill: str, **emulated: Any) -> dict[str, Any]:
    return {"nvme": {"path": str(path), "spill": spill}, "emulated": emulated}


MODES = [(0.0, 1), (0.5, 1), (0.5, 2), (0.0, 2)]  # ring, held, accumulated


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("clipping", "accumulation"), MODES)
@pytest.mark.parametrize("spill", ["moments", "masters", "weights"])
def test_what_spills_never_changes_a_bit(
    spill: str, clipping: float, accumulation: int, precision: str, tmp_path: Path
) -> None:
    settings = {"precision": precision, "clipping": clipping, "accumulation": accumulation}
    section = spilling(tmp_path, spill, jitter_s=0.0005)
    run = trained("gpt", section, **settings)
    expected = in_memory("gpt", precision, clipping, accumulation)
    assert_identical(run, expected)
    assert run.norms == expected.norms


def test_a_run_resumes_on_other_tiers(tmp_path: Path) -> None:
    expected = in_memory("gpt", "bf16", 0.5, 1)
    sections = {
        "ram": {"window": 2},
        "nvme": {"window": 1, **spilling(tmp_path, "masters", jitter_s=0.0005)},
    }
    for first, second in (("ram", "nvme"), ("nvme", "ram"), ("nvme", "nvme")):
        saved = tmp_path / f"{first}-{second}"
        settings = config(precision="bf16", clipping=0.5, section=sections[first])
        resumed(saved, settings, steps=range(1), save=True)
        settings = config(precision="bf16", clipping=0.5, section=sections[second])
        run = resumed(saved, settings, steps=range(1, STEPS), save=False)
        run.losses[:0] = expected.losses[:1]
        assert_identical(run, expected)


def resumed(saved: Path, settings: dict[str, Any], *, steps: range, save: bool) -> Run:
    """`steps` of the training, after those that `saved` holds; at their end saved there."""
    torch.manual_seed(0)
    model, make_batch = MODELS["gpt"]()
    engine, _, _, _ = stronghold.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    run = Run()
    torch.manual_seed(1)
    if not save:
        engine.load_checkpoint(saved)
    for step in steps:
        loss = loss_of(engine(**make_batch(step)))
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.detach().clone())
    if save:
        engine.save_checkpoint(saved)
    run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    run.moments = moments_of(engine)
    engine.destroy()
    return run
