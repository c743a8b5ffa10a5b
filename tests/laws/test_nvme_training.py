"""Laws of the third tier in training: where bytes lie never changes a bit, and costs what is
planned."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stronghold
from stronghold.checkpoint.files import TensorFile
from stronghold.plan.homes import FILE
from stronghold.predict import refine
from tests.models import MODELS, loss_of
from tests.support.pages import ENGINES, mounted
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
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", SMALLEST_PIECE)


def trained(name: str, section: dict[str, Any], **settings: Any) -> Run:
    return train_windowed(
        MODELS[name], steps=STEPS, settings=config(section={"window": 2, **section}, **settings)
    )


@functools.cache
def in_memory(name: str, precision: str, clipping: float, accumulation: int) -> Run:
    return trained(name, {}, precision=precision, clipping=clipping, accumulation=accumulation)


def spilling(path: Path, spill: str, **emulated: Any) -> dict[str, Any]:
    return {"nvme": {"path": str(path), "spill": spill}, "emulated": emulated}


@pytest.mark.parametrize("engine", ENGINES)
def test_several_disks_never_change_a_bit(engine: str, tmp_path: Path) -> None:
    """Blocks of a page: a piece, and a mapping, is of many blocks on both disks."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    nvme = {"path": [str(path) for path in paths], "spill": "weights", "block": 4096}
    run = trained("gpt", {"nvme": {**nvme, "engine": engine}}, precision="bf16", clipping=0.5)
    assert_identical(run, in_memory("gpt", "bf16", 0.5, 1))


def test_a_file_system_without_direct_transfers_never_changes_a_bit(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "tmpfs"):
        run = trained("gpt", spilling(tmp_path, "weights"), precision="bf16", clipping=0.5)
        assert_identical(run, in_memory("gpt", "bf16", 0.5, 1))


# -- weights at rest -------------------------------------------------------------------------------
def test_spilled_weights_are_real_between_steps(tmp_path: Path) -> None:
    """Every value, after every step, through the parameters; with transfers past the page cache
    between the reads."""
    found: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name, section in (("ram", {}), ("nvme", spilling(tmp_path, "weights", jitter_s=0.0003))):
        engine, make_batch = made({"window": 1, **section}, precision="bf16", clipping=0.5)
        shapes = {n: (p.shape, p.dtype, p.device) for n, p in engine.module.named_parameters()}
        found[name] = []
        for step in range(4):
            engine.backward(loss_of(engine(**make_batch(step))))
            engine.step()
            engine.synchronize()
            now = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
            found[name].append(now)
            assert shapes == {n: (p.shape, p.dtype, p.device) for n, p in now.items()}
        engine.destroy()
    for step, (here, there) in enumerate(zip(found["ram"], found["nvme"], strict=True)):
        for name, value in here.items():
            assert torch.equal(value, there[name]), (step, name)


@pytest.mark.parametrize("spill", ["moments", "masters", "weights"])
def test_loaded_weights_are_trained(spill: str, tmp_path: Path) -> None:
    """`load_state_dict` writes through the file's pages, which the next transfers must see; and
    masters become these weights, also if what the last step made of them is still on its way."""
    other, _ = MODELS["gpt"](seed=7)
    runs, masters = [], []
    for section in ({}, spilling(tmp_path, spill)):
        engine, make_batch = made({"window": 2, **section}, precision="bf16", clipping=0.5)
        late(engine)
        losses = []
        for step in range(4):
            if step == 2:
                engine.module.load_state_dict(other.state_dict())
                late_writes_end(engine)
                masters.append(masters_of(engine))
            loss = loss_of(engine(**make_batch(step)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
        state = {n: v.clone() for n, v in engine.module_state_dict().items()}
        runs.append(Run(losses=losses, weights=state, moments=moments_of(engine)))
        engine.destroy()
    assert_identical(runs[1], runs[0])
    for expected, found in zip(*masters, strict=True):
        assert torch.equal(expected, found)


def masters_of(engine: Any) -> list[torch.Tensor]:
    layers = engine.inspect().layers
    return [layer.master(part) for layer in layers for part in layer.layout.slices]


def late_writes_end(engine: Any) -> None:
    for layer in engine.inspect().layers:
        layer.wait()


def late(engine: Any) -> None:
    """Let the spill lane write late."""
    store, caller = engine.inspect().files, threading.current_thread()
    submit = store.submit

    def sleep_and_submit(verb: str, *what: Any) -> Any:
        if verb == "write" and threading.current_thread() is not caller:
            time.sleep(0.01)
        return submit(verb, *what)

    store.submit = sleep_and_submit


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


def test_the_weights_alone_are_saved_from_where_they_lie(tmp_path: Path) -> None:
    engine, make_batch = made({"window": 2, **spilling(tmp_path, "weights")}, precision="bf16")
    engine.backward(loss_of(engine(**make_batch(0))))
    engine.step()
    for name in ("model.safetensors", "model.bin"):
        engine.save_16bit_model(tmp_path / "saved", name)
    expected = {n: v.clone() for n, v in engine.module_state_dict().items()}
    engine.destroy()
    found = torch.load(tmp_path / "saved/model.bin", weights_only=True)
    file = TensorFile(tmp_path / "saved/model.safetensors")
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert torch.equal(file.read(name), value)


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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_layers_that_are_updated_on_the_gpu_never_spill(accumulation: int, tmp_path: Path) -> None:
    section = {
        "resident_layers": 1,
        "resident_updates": "gpu",
        **spilling(tmp_path, "weights", jitter_s=0.0005),
    }
    settings = {"precision": "bf16", "clipping": 0.5, "accumulation": accumulation}
    plans: list[Any] = []
    run = train_windowed(
        MODELS["gpt"],
        steps=STEPS,
        settings=config(section=section, **settings),
        inspect=lambda engine: plans.append((engine.plan, engine.memory_report())),
    )
    run.moments = {}  # of layers on the gpu they are there
    expected = in_memory("gpt", "bf16", 0.5, accumulation)
    assert_identical(run, dataclasses.replace(expected, moments={}))
    plan, report = plans[0]
    assert plan.updated_on_gpu
    assert not any(plan.homes.staged(i) for i in plan.updated_on_gpu)
    assert plan.homes.staged_homes == (FILE,)
    assert report.host_peak == report.host_planned
    assert report.gpu_peak == report.gpu_planned
    assert report.nvme_peak == report.nvme_planned


def test_a_plan_whose_layers_all_stay_on_the_gpu_is_refined(tmp_path: Path) -> None:
    """Files were asked for, and hold nothing: what is left open is which updates are early."""
    section = {"resident_layers": "all", "resident_updates": "gpu", "activations": "recompute"}
    section |= {"early_layers": None, "host_memory": 1 << 30}
    steps = refine.WARM_UP_STEPS + refine.TRACED_STEPS + 1
    settings = config(section=section | spilling(tmp_path, "moments"), clipping=0.0)
    run = train_windowed(MODELS["gpt"], steps=steps, settings=settings)
    assert_identical(run, train_plain(MODELS["gpt"], steps=steps, clipping=0.0))


def test_deepspeed_keys_ask_for_the_same(tmp_path: Path) -> None:
    settings = config(precision="bf16", clipping=0.5, section={"window": 2})
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings["zero_optimization"] = {"stage": 2, "offload_optimizer": offload}
    settings["aio"] = {"queue_depth": 4, "block_size": 8192}
    plans: list[Any] = []
    run = train_windowed(
        MODELS["gpt"],
        steps=STEPS,
        settings=settings,
        inspect=lambda engine: plans.append(engine.plan),
    )
    assert_identical(run, in_memory("gpt", "bf16", 0.5, 1))
    assert plans[0].homes.named(FILE) == {"exp_avg", "exp_avg_sq", "low"}


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
