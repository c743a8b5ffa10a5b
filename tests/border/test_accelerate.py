"""An unmodified Accelerate loop: with a "stronghold" section in its DeepSpeed config it trains as
plain PyTorch does, and every member of the engine that frameworks touch answers.

The second half walks the sources of the installed accelerate and transformers, so that
docs/frameworks.md cannot miss a use of theirs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.test_utils import RegressionDataset, RegressionModel
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader

from stronghold.config import source
from stronghold.engine import StrongholdEngine
from stronghold.errors import ConfigError
from tests.conftest import free_port
from tests.models import MODELS, loss_of, token_batch
from tests.support import accelerate_program
from tests.support.children import ROOT
from tests.support.frameworks import (
    BOUND,
    LOSS_BOUND,
    RANK,
    fresh_accelerate,
    plugin,
    reset_accelerate,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate", "plugin")

__all__ = ["fresh_accelerate", "plugin"]

LEARNING_RATE = 1e-2
EPOCHS, BATCHES, ACCUMULATION = 2, 7, 3  # the last step of an epoch has one micro-batch


def ds_config(**changed: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 0},
        "stronghold": {"device": "emulated", "window": 1},
        **changed,
    }


@dataclasses.dataclass(kw_only=True)
class Loop:
    """What one run of the user's loop leaves."""

    losses: list[float] = dataclasses.field(default_factory=list)
    evaluated: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    accelerator: Any = None
    model: Any = None  # as `prepare` returned it


def batches(first: int, number: int) -> DataLoader[Any]:
    def join(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    rows = []
    for seed in range(first, first + number):
        both = token_batch(seed)
        rows += [{name: value[k] for name, value in both.items()} for k in range(2)]
    return DataLoader(rows, batch_size=2, collate_fn=join)


Parts = tuple[Any, Any]  # optimizer, schedule


def torch_parts(model: nn.Module) -> Parts:
    norms = [p for p in model.parameters() if p.ndim < 2]
    others = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def dummy_parts(model: nn.Module) -> Parts:
    optimizer = DummyOptim(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    return optimizer, DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)


def user_loop(deepspeed: dict[str, Any] | None, parts: Callable[[nn.Module], Parts]) -> Loop:
    """The loop of Accelerate's own examples; `deepspeed` is all that differs."""
    reset_accelerate(ranked=deepspeed is not None)
    settings = {} if deepspeed is None else {"hf_ds_config": deepspeed}
    accelerator = Accelerator(
        cpu=deepspeed is None,
        deepspeed_plugin=DeepSpeedPlugin(**settings) if settings else None,
        gradient_accumulation_steps=ACCUMULATION,
    )
    model, _ = MODELS["gpt"]()
    optimizer, schedule = parts(model)
    model, optimizer, schedule, train, evaluation = accelerator.prepare(
        model, optimizer, schedule, batches(0, BATCHES), batches(100, 2)
    )
    run = Loop(accelerator=accelerator, model=model)
    for _ in range(EPOCHS):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = loss_of(model(**batch))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    run.norms.append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.losses.append(loss.item())
            run.rates.append(optimizer.param_groups[0]["lr"])
        model.eval()
        with torch.no_grad():
            run.evaluated += [loss_of(model(**batch)).item() for batch in evaluation]
    return run


@pytest.fixture
def loop() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def run(*given: Any) -> Loop:
        made.append(user_loop(*given))
        return made[-1]

    yield run
    for one in made:
        one.accelerator.free_memory()


def assert_same_weights(streamed: Loop, plain: Loop) -> None:
    expected = streamed.accelerator.get_state_dict(streamed.model)
    weights = plain.accelerator.get_state_dict(plain.model)
    assert expected.keys() == weights.keys()
    total = sum((weights[name] - expected[name]).abs().sum().item() for name in weights)
    mean = total / sum(weight.numel() for weight in weights.values())
    assert mean <= BOUND * len(plain.norms) * LEARNING_RATE


def test_an_unmodified_loop_trains_as_without_deepspeed(loop: Any) -> None:
    streamed, plain = loop(ds_config(), torch_parts), loop(None, torch_parts)
    assert isinstance(streamed.model, StrongholdEngine)
    assert not isinstance(plain.model, StrongholdEngine)
    assert len(plain.norms) == EPOCHS * 3
    assert streamed.losses == pytest.approx(plain.losses, abs=LOSS_BOUND)
    assert streamed.evaluated == pytest.approx(plain.evaluated, abs=LOSS_BOUND)
    assert streamed.norms == pytest.approx(plain.norms, rel=1e-4)
    assert max(plain.norms) > 0.5, "no step was clipped: the test would not see clipping"
    assert streamed.rates == plain.rates
    assert_same_weights(streamed, plain)


def test_optimizer_and_schedule_of_the_config(loop: Any) -> None:
    auto = {"lr": "auto", "weight_decay": "auto"}
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    streamed = loop(
        ds_config(
            optimizer={"type": "AdamW", "params": auto},
            scheduler={
                "type": "WarmupDecayLR",
                "params": {**warmup, "total_num_steps": "auto", "warmup_type": "linear"},
            },
        ),
        dummy_parts,
    )
    engine = streamed.model
    assert "auto" not in str(engine.config)
    # DeepSpeed's linear warmup over 2 steps, then down to 0 at step 6; it begins to count at 0.
    expected = [LEARNING_RATE * min(step / 2, (6 - step) / 4) for step in range(EPOCHS * 3)]
    seen = [streamed.rates[k] for k in (2, 5, 6, 9, 12, 13)]
    assert seen == pytest.approx(expected)
    assert streamed.losses[-1] < streamed.losses[0]


def test_the_model_comes_back_as_it_went_in(loop: Any, tmp_path: Path) -> None:
    streamed = loop(ds_config(), torch_parts)
    accelerator, engine = streamed.accelerator, streamed.model
    raw = accelerator.unwrap_model(engine)
    assert raw is engine.module
    accelerator.save_model(engine, str(tmp_path))
    fresh, _ = MODELS["gpt"](seed=1)
    import safetensors.torch

    safetensors.torch.load_model(fresh, tmp_path / "model.safetensors")
    for name, weight in raw.state_dict().items():
        assert torch.equal(weight, fresh.state_dict()[name]), name
    accelerator.free_memory()
    assert accelerator.deepspeed_engine_wrapped is None
    with pytest.raises(ConfigError, match="this engine was destroyed"):
        engine.step()


def test_bf16_training_in_a_loop(loop: Any) -> None:
    streamed = loop(ds_config(bf16={"enabled": True}), torch_parts)
    assert {p.dtype for p in streamed.model.parameters()} == {torch.bfloat16}
    assert streamed.losses[-1] < streamed.losses[0]


def test_a_saved_state_is_the_state_again(loop: Any, tmp_path: Path) -> None:
    first = loop(ds_config(), torch_parts)

    def go_on(run: Loop) -> list[float]:
        losses = []
        for batch in batches(50, ACCUMULATION * 2):
            with run.accelerator.accumulate(run.model):
                loss = loss_of(run.model(**batch))
                run.accelerator.backward(loss)
            losses.append(loss.item())
        return losses

    first.accelerator.save_state(str(tmp_path))
    expected = go_on(first)
    first.accelerator.load_state(str(tmp_path))
    assert go_on(first) == expected
    second = loop(ds_config(stronghold={"device": "emulated", "window": 2}), torch_parts)
    go_on(second)
    second.accelerator.load_state(str(tmp_path))
    assert go_on(second) == expected


def test_two_accelerators_have_an_engine_each(loop: Any) -> None:
    policy = loop(ds_config(), torch_parts)
    reference, _ = MODELS["gpt"]()
    reference.requires_grad_(False)
    import deepspeed

    settings = ds_config(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    engine, *_ = deepspeed.initialize(model=reference, config=settings)  # as TRL does
    batch = token_batch(5)
    before = loss_of(engine(**batch))
    policy.accelerator.backward(loss_of(policy.model(**batch)))
    assert torch.equal(loss_of(engine(**batch)), before)
    engine.destroy()


def test_keys_without_effect_are_named_after_what_accelerate_warns_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With two engines of one Accelerator: a program reads its first warning of `prepare`."""
    source.warn_once.cache_clear()
    reset_accelerate(ranked=True)
    plugins = {
        name: DeepSpeedPlugin(
            hf_ds_config=ds_config(
                zero_optimization={"stage": 0, key: True},
                optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
            )
        )
        for name, key in (("policy", "overlap_comm"), ("reference", "contiguous_gradients"))
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    policy, _ = MODELS["gpt"]()
    policy, *_ = accelerator.prepare(policy, dummy_parts(policy)[0], batches(0, 1))
    accelerator.state.select_deepspeed_plugin("reference")
    reference, _ = MODELS["gpt"]()
    reference.requires_grad_(False)

    def warnings(logger: str) -> list[str]:
        records = [r for r in caplog.records if r.name == logger and r.levelno >= logging.WARNING]
        return [record.getMessage() for record in records]

    reference = accelerator.prepare(reference)
    assert "A wrapped DeepSpeed engine reference" in warnings("accelerate.accelerator")[-1]
    assert warnings("stronghold") == []
    for engine in (policy, reference, policy, reference):
        engine(**token_batch(0))
    assert warnings("stronghold") == [
        f"config keys without effect under stronghold: zero_optimization.{key}"
        for key in ("overlap_comm", "contiguous_gradients")
    ]
    accelerator.free_memory()
    for engine in (policy, reference):
        engine.destroy()


def test_without_a_launcher_what_is_gathered_is_the_process_own() -> None:
    """As the Trainer gathers each loss that it logs."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    reset_accelerate(ranked=False)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config()))
    model, _ = MODELS["gpt"]()
    accelerator.prepare(model, torch_parts(model)[0], batches(0, 1))
    accelerator.wait_for_everyone()
    losses = torch.arange(3.0)
    assert torch.equal(accelerator.gather_for_metrics(losses), losses)
    accelerator.free_memory()
    torch.distributed.destroy_process_group()


def test_a_surviving_auto_in_the_section_is_refused_by_accelerate() -> None:
    """Why docs/config.md says to leave a key out instead."""
    reset_accelerate(ranked=True)
    settings = ds_config(stronghold={"device": "emulated", "window": "auto"})
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    model, _ = MODELS["gpt"]()
    with pytest.raises(ValueError, match=r"stronghold\.window"):
        accelerator.prepare(model, torch_parts(model)[0], batches(0, 1))


def plain_scalars(rows_per_step: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms and weights of a plain loop over the same rows."""
    model = RegressionModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=accelerate_program.LEARNING_RATE)
    data = RegressionDataset(length=accelerate_program.ROWS, seed=0)
    norms = []
    for rows in DataLoader(data, batch_size=rows_per_step):
        (model(rows["x"]) - rows["y"]).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.slow  # test_plugin.py has a launcher of Accelerate's in the default run
@pytest.mark.parametrize("num_processes", [1, 2])
def test_accelerates_own_check_of_a_machine_passes(num_processes: int, tmp_path: Path) -> None:
    """`accelerate test` is `accelerate launch` of its script, which trains nothing with DeepSpeed:
    two scalars, which are no repeated blocks, are trained after it."""
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}},
        "stronghold": {"device": "emulated"},
    }
    template = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False},
        "num_machines": 1,
        "num_processes": num_processes,
        "machine_rank": 0,
        "main_process_port": free_port(),
        "use_cpu": True,
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings), encoding="utf-8")
    # JSON is YAML
    (tmp_path / "machine.yaml").write_text(json.dumps(template), encoding="utf-8")
    launched = ["accelerate.commands.launch", "--config_file", "machine.yaml"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", *launched, "--module", "stronghold.run"),
            *(accelerate_program.__file__, str(tmp_path)),
        ],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name not in RANK},
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = [line for line in done.stderr.splitlines() if "no repeated blocks found in" in line]
    assert len(said) == 1
    norms, weights = plain_scalars(num_processes * accelerate_program.BATCH)
    for rank in range(num_processes):
        found = torch.load(tmp_path / f"found-{rank}")
        assert found["engine"] == "stronghold.engine.engine.StrongholdEngine"
        assert found["processes"] == num_processes
        # Gradients of two halves are added in another order.
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        for name, weight in found["weights"].items():
            assert weight.item() == pytest.approx(weights[name].item(), rel=1e-5), name
