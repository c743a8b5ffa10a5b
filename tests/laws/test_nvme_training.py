"""Laws of the third tier in training: where bytes lie never changes a bit, and costs what is
planned."""

from __future__ import annotations

import functools
import gc
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from tests.models import MODELS, loss_of
from tests.support.pages import mounted
from tests.support.training import (
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train_plain,
    train_windowed,
)

STEPS = 3
PAGE_NUMEL = 2048
# As few as hold a page of each array, so that every layer takes several pieces.
SMALLEST_PIECE = PAGE_NUMEL * 24


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", SMALLEST_PIECE)


def trained(name: str, section: dict[str, Any], **settings: Any) -> Run:
    return train_windowed(
        MODELS[name], steps=STEPS, settings=config(section={"window": 2, **section}, **settings)
    )


@functools.cache
def in_memory(name: str, precision: str, clipping: float, accumulation: int) -> Run:
    return trained(name, {}, precision=precision, clipping=clipping, accumulation=accumulation)


def spilling(path: Path, spill: str, **emulated: Any) -> dict[str, Any]:
    return {"nvme": {"path": str(path), "spill": spill}, "emulated": emulated}


def test_several_disks_never_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page: a piece, and a mapping, is of many blocks on both disks."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr("stronghold.train.files.BLOCK_BYTES", 4096)
    monkeypatch.setattr("stronghold.train.files.UNIT_BYTES", 8192)
    nvme = {"path": [str(path) for path in paths], "spill": "weights"}
    run = trained("gpt", {"nvme": nvme}, precision="bf16", clipping=0.5)
    assert_identical(run, in_memory("gpt", "bf16", 0.5, 1))


def test_a_file_system_without_direct_transfers_never_changes_a_bit(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "tmpfs"):
        run = trained("gpt", spilling(tmp_path, "weights"), precision="bf16", clipping=0.5)
        assert_identical(run, in_memory("gpt", "bf16", 0.5, 1))
        gc.collect()  # the model, whose weights are still mapped


# -- weights at rest -------------------------------------------------------------------------------


def test_a_forward_only_engine_spills_its_weights(tmp_path: Path) -> None:
    model, make_batch = MODELS["gpt"]()
    expected = loss_of(model(**make_batch(0)))
    settings = config(section={"window": 1, **spilling(tmp_path, "weights")})
    del settings["optimizer"]
    engine, _, _, _ = stronghold.initialize(model=model, config=settings)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(loss_of(engine(**make_batch(0))), expected)
    report = engine.memory_report()
    assert report.host_peak == report.host_planned == engine.plan.staging.nbytes
    engine.destroy()
    assert torch.equal(loss_of(model(**make_batch(0))), expected)


def made(section: dict[str, Any], **settings: Any) -> Any:
    torch.manual_seed(0)
    model, make_batch = MODELS["gpt"]()
    return initialized(model, config(section=section, **settings)), make_batch


# -- checkpoints -----------------------------------------------------------------------------------
def test_a_checkpoint_beside_training_is_of_its_step(tmp_path: Path) -> None:
    """Its files are read on the io lane while the next steps load, update and spill."""
    expected = in_memory("gpt", "bf16", 0.5, 1)
    spill = spilling(tmp_path, "weights", jitter_s=0.002)
    section = {"window": 1, "async_checkpoint": True, **spill}
    settings = config(precision="bf16", clipping=0.5, section=section)
    engine, make_batch = made(section, precision="bf16", clipping=0.5)
    for step in range(STEPS):
        engine.backward(loss_of(engine(**make_batch(step))))
        engine.step()
        if step == 0:
            engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    run = resumed(tmp_path / "saved", settings, range(1, STEPS))
    run.losses[:0] = expected.losses[:1]
    assert_identical(run, expected)


def test_files_that_hold_nothing_leave_early_updates_to_the_rules(tmp_path: Path) -> None:
    """Every layer stays on the gpu. The plan is made again for the first batch."""
    section = {"resident_layers": "all", "resident_updates": "gpu", "activations": "recompute"}
    section |= {"early_layers": None, "host_memory": 1 << 30}
    settings = config(section=section | spilling(tmp_path, "moments"), clipping=0.0)
    run = train_windowed(MODELS["gpt"], steps=STEPS, settings=settings)
    assert_identical(run, train_plain(MODELS["gpt"], steps=STEPS, clipping=0.0))


def test_deepspeed_keys_ask_for_the_same(tmp_path: Path) -> None:
    settings = config(precision="bf16", clipping=0.5, section={"window": 2})
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings["zero_optimization"] = {"stage": 2, "offload_optimizer": offload}
    plans: list[Any] = []
    run = train_windowed(
        MODELS["gpt"],
        steps=STEPS,
        settings=settings,
        inspect=lambda engine: plans.append(engine.plan),
    )
    assert_identical(run, in_memory("gpt", "bf16", 0.5, 1))
    assert set(chain(*plans[0].in_files)) == {"exp_avg", "exp_avg_sq", "low"}


def resumed(saved: Path, settings: dict[str, Any], steps: range) -> Run:
    """`steps` of the training, after those that `saved` holds."""
    torch.manual_seed(0)
    model, make_batch = MODELS["gpt"]()
    engine = initialized(model, settings)
    run = Run()
    torch.manual_seed(1)
    engine.load_checkpoint(saved)
    for step in steps:
        loss = loss_of(engine(**make_batch(step)))
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.detach().clone())
    run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    run.moments = moments_of(engine)
    engine.destroy()
    return run
