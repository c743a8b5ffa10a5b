"""ZeRO stage 3 in the config, the commonest way to ask DeepSpeed for offload, trains as stage 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from stronghold import plugin as switch
from stronghold.engine import StrongholdEngine
from stronghold.errors import ConfigError
from tests.border.test_trainer import samples, tiny_llama, train
from tests.support import stock
from tests.support.frameworks import fresh_accelerate, plugin, reset_accelerate
from tests.support.training import config

pytestmark = pytest.mark.usefixtures("fresh_accelerate", "plugin")

__all__ = ["fresh_accelerate", "plugin"]

ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
BATCHES = dict.fromkeys(
    (
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ),
    "auto",
)
HALF = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
BUCKETS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
OURS = {"device": "emulated", "window": 1}


def offloaded(device: str, **more: Any) -> dict[str, Any]:
    part = {"device": device, "pin_memory": True, **more}
    return {"offload_optimizer": part, "offload_param": dict(part)}


# The examples of Transformers' and DeepSpeed's documentation, by what they offload to.
EXAMPLES: dict[str, dict[str, Any]] = {
    "cpu": {"stage": 3, **offloaded("cpu"), **BUCKETS},
    "nothing": {"stage": 3, **BUCKETS},
    "nvme": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
        },
        "offload_param": {
            "device": "nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        **BUCKETS,
    },
    "values": {
        "stage": 3,
        **offloaded("cpu"),
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "round_robin_gradients": True,
    },
    "a share": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3},
        "memory_efficient_linear": True,
    },
}


def example(name: str, folder: Path) -> dict[str, Any]:
    zero = copy.deepcopy(EXAMPLES[name])
    for part in (zero.get("offload_optimizer"), zero.get("offload_param")):
        if part is not None and part["device"] == "nvme":
            part["nvme_path"] = str(folder)
    settings = {"optimizer": ADAM, "scheduler": WARMUP, "zero_optimization": zero}
    settings |= {**BATCHES, **HALF}
    if name == "nvme":
        settings["aio"] = {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    return {**settings, "stronghold": OURS}


def stage_0(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k != "aio"} | {"zero_optimization": {"stage": 0}}


# -- Trainer, Accelerate, deepspeed.initialize -----------------------------------------------------
Trained = tuple[list[float], dict[str, torch.Tensor]]


def by_trainer(settings: dict[str, Any], folder: Path) -> Trained:
    before = copy.deepcopy(settings)
    trainer = train(folder, settings, num_train_epochs=1)
    assert settings == before
    engine = trainer.accelerator.deepspeed_engine_wrapped.engine
    assert isinstance(engine, StrongholdEngine)
    assert not is_deepspeed_zero3_enabled()
    trainer.save_model(str(folder / "saved"))
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    saved = LlamaForCausalLM.from_pretrained(folder / "saved").state_dict()
    assert all(torch.equal(saved[key], value) for key, value in weights.items())
    trainer.accelerator.free_memory()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], weights


def by_accelerate(settings: dict[str, Any], folder: Path) -> Trained:
    settings["gradient_accumulation_steps"] = 2
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    accelerator = Accelerator(cpu=False, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    model = tiny_llama()
    optimizer = DummyOptim(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(1, 8), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, _ = accelerator.prepare(
        model, optimizer, loader, DummyScheduler(optimizer, warmup_num_steps=2)
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.module_state_dict().items()}
    accelerator.free_memory()
    return losses, weights


def by_initialize(settings: dict[str, Any], folder: Path) -> Trained:
    zero = {k: v for k, v in settings["zero_optimization"].items() if v != "auto"}
    model = tiny_llama()
    engine, *_ = deepspeed.initialize(
        model=model,
        config=config(precision="bf16") | {"zero_optimization": zero},
        model_parameters=model.parameters(),
    )
    losses = []
    for row in samples(1, 3):
        loss = engine(**{k: v[None] for k, v in row.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.zero_optimization_stage() == zero["stage"]
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("run", [by_trainer, by_accelerate, by_initialize])
@pytest.mark.slow
def test_an_example_trains_as_stage_0(run: Callable[..., Trained], tmp_path: Path) -> None:
    expected = None
    for name in (None, *EXAMPLES):
        settings = example(name or "cpu", tmp_path)
        losses, weights = run(settings if name else stage_0(settings), tmp_path)
        reset_accelerate()
        if expected is None:
            expected = losses, weights
        assert losses == expected[0], name
        assert all(torch.equal(value, expected[1][key]) for key, value in weights.items()), name


# -- what partitions by itself ---------------------------------------------------------------------
def test_transformers_neither_partitions_nor_gathers(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    settings = example("cpu", tmp_path)
    kept = HfDeepSpeedConfig(settings)
    assert settings["zero_optimization"]["stage"] == 3  # the user's own is not changed
    assert not is_deepspeed_zero3_enabled()
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    model.resize_token_embeddings(70)
    assert all(p.numel() and not hasattr(p, "ds_id") for p in model.parameters())
    del settings["stronghold"]
    theirs = HfDeepSpeedConfig(settings)
    assert is_deepspeed_zero3_enabled()
    switch.disable()
    other = HfDeepSpeedConfig({**settings, "stronghold": OURS})
    assert is_deepspeed_zero3_enabled()
    assert all((kept, theirs, other))


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    with stock.one_rank(tmp_path):
        yield


def made_under_init(**options: Any) -> nn.Module:
    with deepspeed.zero.Init(dtype=torch.bfloat16, **options):
        return tiny_llama()


def test_a_model_made_under_zero_init_is_taken_over(gloo: None) -> None:
    """Its initial weights are its own: modules are partitioned as they are made."""
    model = made_under_init()
    assert all(p.numel() == 0 for p in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    identities = list(map(id, model.parameters()))
    settings = config(precision="bf16") | {"zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    assert list(map(id, model.parameters())) == identities
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    row = {k: v[None] for k, v in samples(1, 1)[0].items()}
    loss = engine(**row).loss
    engine.destroy()
    model.config.use_cache = False
    assert torch.equal(loss, model(**row).loss)
    assert all(vars(p) == {} for p in model.parameters())


def test_an_engine_that_is_made_inside_zero_init_has_its_own_dtypes(gloo: None) -> None:
    """`Init` makes every new tensor bf16. The engine's fp32 masters and losses are its own."""
    losses = []
    for is_inside in (False, True):
        torch.manual_seed(0)
        model = tiny_llama().float()
        options = {"dtype": torch.bfloat16, "enabled": is_inside}
        with deepspeed.zero.Init(**options):
            made, *_ = deepspeed.initialize(model=model, config=config())
            assert torch.zeros(1).dtype == (torch.bfloat16 if is_inside else torch.float32)
        losses.append([])
        for step in range(2):
            loss = made(**{k: v[None] for k, v in samples(step + 1, 1)[0].items()}).loss
            made.backward(loss)
            made.step()
            losses[-1].append(loss.item())
        made.destroy()
    assert losses[0] == losses[1]


def test_a_config_with_the_section_keeps_init_from_partitioning(gloo: None) -> None:
    settings = config() | {"zero_optimization": {"stage": 3}}
    model = made_under_init(config_dict_or_path=settings)
    assert all(p.numel() and not hasattr(p, "ds_id") for p in model.parameters())


def test_a_partition_that_is_not_the_whole_is_refused_with_the_way(gloo: None) -> None:
    model = made_under_init()
    weight = model.lm_head.weight
    weight.ds_tensor.data = weight.ds_tensor.data[: weight.ds_numel // 2]
    with pytest.raises(ConfigError, match=r"lm_head\.weight was partitioned.*import stronghold"):
        deepspeed.initialize(model=model, config=config())
    assert hasattr(model.model.norm.weight, "ds_id")  # nothing was undone
