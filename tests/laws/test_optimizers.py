"""Several optimizers in one engine: a group names its own, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from stronghold.optim.adam import Adam
from stronghold.optim.lion import Lion
from stronghold.optim.sgd import SGD
from tests.models import MODELS, loss_of, without_caches
from tests.support.training import DTYPES, KernelOptimizer, Run, assert_identical, config

STEPS = 4
PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    "recompute": {"window": 2, "activations": "recompute"},
    "offload": {"window": 2, "activations": "offload"},
    "half on the gpu": {"window": 2, "resident_layers": 1, "resident_updates": "gpu"},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
    "moments": {"window": 2, "nvme": {"spill": "moments"}},
    "weights": {"window": 1, "nvme": {"spill": "weights"}},
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices by Adam, vectors by Lion, embedding by SGD, the head by SGD with momentum."""
    named = dict(model.named_parameters())
    special = [named.pop("embedding.weight"), named.pop("head.weight")]
    return [
        {"params": [p for p in named.values() if p.dim() > 1]},
        {"params": [p for p in named.values() if p.dim() <= 1], "optimizer": "Lion", "lr": 1e-3},
        {"params": special[:1], "optimizer": "SGD", "lr": 0.05, "weight_decay": 0.0},
        {"params": special[1:], "optimizer": "sgd", "lr": 0.02, "momentum": 0.9},
    ]


PLAIN = (Adam(), Lion(), SGD(), SGD(has_momentum=True))
HYPER: tuple[dict[str, Any], ...] = (
    {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    {**SGD.defaults, "lr": 0.05},
    {**SGD.defaults, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
)


def plain(precision: str, clipping: float, accumulation: int) -> Run:
    torch.manual_seed(0)
    model, make_batch = MODELS["gpt"]()
    without_caches(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[precision])
    made = [
        {**hyper, "params": group["params"]}
        for hyper, group in zip(HYPER, groups(model), strict=True)
    ]
    kind = "lean" if precision == "lean" else "exact"
    optimizer = KernelOptimizer(torch.optim.Optimizer(made, {}), kind, PLAIN)
    run = Run()
    for step in range(STEPS):
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for micro in range(step * accumulation, (step + 1) * accumulation):
            loss = loss_of(model(**make_batch(micro)))
            run.losses.append(loss.detach().clone())
            (loss / accumulation if accumulation > 1 else loss).backward()
            for parameter in model.parameters():
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None and accumulation > 1:
                    gradient = gradient.float()
                    before = sums.get(parameter)
                    sums[parameter] = gradient if before is None else before + gradient
                elif gradient is not None:
                    sums[parameter] = gradient
        run.norms.append(optimizer.step(sums, clipping))
    run.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return run


def windowed(
    section: dict[str, Any],
    precision: str,
    clipping: float,
    accumulation: int,
    saved: Path | None = None,
    there: dict[str, Any] | None = None,
) -> Run:
    """The engine's run; with `saved` it stops after two steps and goes on elsewhere, `there`."""
    run = Run()
    parts = [(range(STEPS), section)]
    if saved is not None:
        parts = [(range(2), section), (range(2, STEPS), there or section)]
    for steps, here in parts:
        torch.manual_seed(0)
        model, make_batch = MODELS["gpt"]()
        settings = config(
            section=here, precision=precision, clipping=clipping, accumulation=accumulation
        )
        engine, *_ = stronghold.initialize(
            model=model, config=settings, model_parameters=groups(model)
        )
        try:
            if steps.start:
                engine.load_checkpoint(saved)
            for micro in range(steps.start * accumulation, steps.stop * accumulation):
                loss = loss_of(engine(**make_batch(micro)))
                engine.backward(loss)
                engine.step()
                run.losses.append(loss.detach().clone())
                if engine.was_step_applied():
                    run.norms.append(engine.get_global_grad_norm())
            if steps.stop < STEPS:
                engine.save_checkpoint(saved)
            report = engine.memory_report()
            assert report.host_peak == report.host_planned
            assert report.gpu_peak <= report.gpu_planned
            run.weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        finally:
            engine.destroy()
    return run


def section_of(place: str, folder: Path) -> dict[str, Any]:
    section = dict(PLACES[place])
    if "nvme" in section:
        section["nvme"] = {**section["nvme"], "path": str(folder)}
    return section


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("precision", "clipping", "accumulation"),
    [("fp32", 0.5, 1), ("bf16", 0.0, 1), ("bf16", 0.5, 2), ("lean", 0.5, 1)],
)
def test_each_group_has_its_own_optimizer(
    place: str, precision: str, clipping: float, accumulation: int, tmp_path: Path
) -> None:
    expected = plain(precision, clipping, accumulation)
    run = windowed(section_of(place, tmp_path), precision, clipping, accumulation)
    assert_identical(run, expected)
    assert run.norms == expected.norms


@pytest.mark.parametrize("precision", ["bf16", "lean"])
def test_a_run_goes_on_elsewhere(precision: str, tmp_path: Path) -> None:
    expected = plain(precision, 0.5, 1)
    there = section_of("moments", tmp_path)
    run = windowed({"window": 1}, precision, 0.5, 1, tmp_path / "saved", there)
    assert_identical(run, expected)


def test_states_have_torchs_names() -> None:
    model, make_batch = MODELS["gpt"]()
    engine, *_ = stronghold.initialize(
        model=model, config=config(section={"window": 1}), model_parameters=groups(model)
    )
    try:
        engine.backward(loss_of(engine(**make_batch(0))))
        engine.step()
        named = dict(model.named_parameters())
        assert safe_get_full_optimizer_state(named["head.weight"], "momentum_buffer").any()
        with pytest.raises(ConfigError, match=r"'exp_avg' not found: expected one of \[\]"):
            safe_get_full_optimizer_state(named["embedding.weight"], "exp_avg")
    finally:
        engine.destroy()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    for name, fails in (("lion", False), ("adamw", True)):
        model, make_batch = MODELS["gpt"]()
        settings = config(section={"window": 1}, optimizer=name)
        engine, *_ = stronghold.initialize(
            model=model, config=settings, model_parameters=model.parameters()
        )
        try:
            if fails:
                with pytest.raises(ConfigError, match=r"updated by Lion.*load_optimizer_states"):
                    engine.load_checkpoint(tmp_path)
                engine.load_checkpoint(tmp_path, load_optimizer_states=False)
            engine.backward(loss_of(engine(**make_batch(0))))
            engine.step()
            engine.save_checkpoint(tmp_path)
        finally:
            engine.destroy()


def test_a_group_that_names_no_optimizer_of_ours_is_refused() -> None:
    model, _ = MODELS["gpt"]()
    wrong = [{"params": list(model.parameters()), "optimizer": "Muon"}]
    with pytest.raises(
        ConfigError, match=r"model_parameters\[0\]\.optimizer: got .Muon., expected"
    ):
        stronghold.initialize(model=model, config=config(), model_parameters=wrong)
