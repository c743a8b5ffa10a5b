"""Every file in configs/ is a config of ours, and one named after a size and a GPU fits them.

The planner runs on the real models' layouts, built on the meta device from their published shapes,
with the bytes of the card and of the RAM that the file's "_machine" names. What activations need is
not planned yet: of them the test counts only what is certainly there.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from stronghold.config import Settings, load, parse_bytes, source
from stronghold.model.layout import ModelLayout
from stronghold.optim.states import EXACT, StateKind
from stronghold.plan.cost import Demand
from stronghold.plan.plan import Plan, make_plan
from tests.support.layouts import laid_out
from tests.support.published import PUBLISHED, published
from tests.support.states import adam_states

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SEQUENCE = 2048
RAM_SHARE = 0.9  # the rest is the system's and the program's
GIB = 1 << 30  # RAM is sold in these; a GPU's "24 GB" has at least 24e9 bytes

CASES = [
    ("8b_24gb_ram", "Llama-3.1-8B"),
    ("8b_24gb_ram", "Qwen2.5-7B"),
    ("8b_24gb_ram", "Qwen3-8B"),
    ("8b_24gb_64gb_lean", "Llama-3.1-8B"),
    ("8b_24gb_64gb_lean", "Qwen3-8B"),
    ("14b_24gb_ram", "Qwen3-14B"),
    ("32b_80gb_ram", "Qwen3-32B"),
    ("32b_80gb_ram", "Qwen2.5-32B"),
]
NVME_CASES = [("32b_24gb_nvme", "Qwen3-32B"), ("32b_24gb_nvme", "Qwen2.5-32B")]
ADAPTER_CASES = {
    "70b_24gb_64gb_qlora": "Llama-3.3-70B",
    "gpt_oss_120b_24gb_lora": "gpt-oss-120b",
    "qwen3_235b_24gb_qlora": "Qwen3-235B-A22B",
    "30b_a3b_12gb_qlora": "Qwen3-30B-A3B",
}
RANK = 16  # of the adapters that the configs' comments name
# of a parameter, with its scales, at most
PACKED_BYTES = {"nf4": 0.56}
LOSS_CHUNK = 1024  # tokens of which logits exist at a time


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_every_config_loads_without_a_word(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.warn_once.cache_clear()  # what one file is told is news to the next
    with caplog.at_level(logging.WARNING, "stronghold"):
        settings = load(path)
    assert settings.optimizer is not None
    assert caplog.text == ""


def test_every_config_for_a_machine_is_planned_here() -> None:
    named = {path.stem for path in CONFIGS.glob("*.json")} - {"quickstart"}
    assert named == {config for config, _ in CASES + NVME_CASES} | {*ADAPTER_CASES}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """In bytes, as the config's name and its "_machine" say."""

    gpu: int
    ram: int


def machine(settings: Settings, config: str) -> Machine:
    (gpu, ram) = re.search(
        r"GPU of (\d+) GB with (\d+) GB of RAM", settings.original["_machine"]
    ).groups()
    assert f"_{gpu}gb_" in config
    return Machine(gpu=int(gpu) * 10**9, ram=int(ram) * GIB)


@cache
def sizes(model: str, kind: StateKind = EXACT) -> ModelLayout:
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(published(model), dtype=torch.bfloat16)
    found = laid_out(built, kind=kind)
    assert found.num_parameters == PUBLISHED[model][1]
    return found


def plan(settings: Settings, of: ModelLayout, ram: int, accumulation: int | None = None) -> Plan:
    """As the engine asks for it; BudgetError when it does not fit."""
    section = settings.stronghold
    steps = accumulation or settings.gradient_accumulation_steps
    assert settings.precision == "bf16"
    return make_plan(
        of,
        Demand(
            states=adam_states(torch.bfloat16, section.states),
            accumulate=steps > 1,
            gpu_budget_bytes=section.gpu_memory,
            host_budget_bytes=int(ram * RAM_SHARE),
            window=section.window,
            resident_layers=section.resident_layers,
            activations=section.activations,
            nvme=section.nvme is not None,
            spill=section.nvme.spill if section.nvme else None,
        ),
    )


@pytest.mark.parametrize(("config", "model"), CASES)
def test_the_model_fits_the_machine_that_the_config_is_for(config: str, model: str) -> None:
    settings = load(CONFIGS / f"{config}.json")
    has, kind = machine(settings, config), settings.stronghold.states
    of = sizes(model, kind)
    planned = plan(settings, of, has.ram)
    numel = sum(layer.trained_numel for layer in of.layers)
    largest = max(layer.trained_numel for layer in of.layers)
    if planned.accumulates:
        # weight, rest of the master, two moments, fp32 sum; two bf16 gradients on their way to it
        expected = (2 + 2 + 8 + 4) * numel + 2 * 2 * largest
    else:
        # The last two: the gradient, held for the norm.
        states = adam_states(torch.bfloat16, kind)
        expected = (2 + states.low_bytes + states.moment_bytes + 2) * numel
    assert planned.host_total_bytes == expected
    outside = sum(layer.trained_numel for layer in of.layers if not layer.streamed)
    slots = planned.window + planned.gradient_slots
    largest_streamed = max(layer.trained_numel for layer in of.layers if layer.streamed)
    assert planned.gpu_total_bytes == 2 * (slots * largest_streamed + 2 * outside)
    assert planned.gpu_total_bytes <= settings.stronghold.gpu_memory
    # Two layers are on their way while one computes, and an offload runs beside the next backward.
    assert planned.window >= 3
    assert planned.gradient_slots == 2


@pytest.mark.parametrize(("config", "model"), NVME_CASES)
def test_the_model_fits_the_ram_and_the_disk_that_the_config_is_for(
    config: str, model: str
) -> None:
    settings = load(CONFIGS / f"{config}.json")
    has, of = machine(settings, config), sizes(model)
    planned = plan(settings, of, has.ram)
    numel = sum(layer.trained_numel for layer in of.layers)
    assert planned.nvme_bytes["moments"] == 8 * numel
    assert planned.nvme_bytes["master remainder"] == 2 * numel
    # RAM is full but for less than one layer: of the weights no more spill than must.
    left = int(has.ram * RAM_SHARE) - planned.host_total_bytes
    assert 0 <= left < 2 * max(layer.trained_numel for layer in of.layers)
    assert planned.nvme_bytes["weights"] < 2 * 0.6 * numel
    free, moved = (
        int(found) * 10**9
        for found in re.search(
            r"(\d+) GB free on NVMe disks, which read and write (\d+) GB",
            settings.original["_machine"],
        ).groups()
    )
    assert planned.nvme_total_bytes <= free
    # Weights are read for both passes, and for the update.
    read = planned.traffic.nvme_read_bytes - 2 * planned.nvme_bytes["weights"]
    assert read == planned.traffic.nvme_written_bytes == pytest.approx(moved, rel=0.05)
    assert planned.window >= 3
    assert planned.gradient_slots == 2


@pytest.mark.parametrize(("config", "model"), CASES + NVME_CASES)
def test_the_gpu_has_room_for_activations(config: str, model: str) -> None:
    """What is certainly there in one forward and backward with recomputation: the input of every
    layer in bf16, logits in bf16 and fp32, and their fp32 gradient."""
    settings = load(CONFIGS / f"{config}.json")
    shape: Any = published(model)
    assert settings.stronghold.activations == "recompute"
    tokens = settings.deepspeed.train_micro_batch_size_per_gpu * SEQUENCE
    inputs = tokens * shape.num_hidden_layers * shape.hidden_size * 2
    logits = tokens * shape.vocab_size * (2 + 4 + 4)
    left = machine(settings, config).gpu - settings.stronghold.gpu_memory
    assert inputs + logits <= 0.75 * left, "a layer that is recomputed and CUDA need the rest"


@pytest.mark.parametrize(("config", "model"), CASES)
def test_what_the_comment_says_of_accumulation_is_so(config: str, model: str) -> None:
    settings = load(CONFIGS / f"{config}.json")
    comment = settings.original["_machine"]
    of = sizes(model, settings.stronghold.states)
    has = machine(settings, config)
    more = re.search(r"With (\d+) GB gradient_accumulation_steps can be more", comment)
    if more:
        planned = plan(settings, of, parse_bytes(f"{more[1]}GiB"), accumulation=2)
        said = 14 + float(re.search(r"for ([\d.]+) bytes more", comment)[1])
    else:
        planned = plan(settings, of, has.ram)
        said = float(re.search(r"([\d.]+) bytes of it per parameter", comment)[1])
    assert planned.host_total_bytes <= said * of.num_parameters + 1e8
    once = plan(settings, of, has.ram, accumulation=1)
    each = {"exact": 14, "lean": 7.125}[settings.stronghold.states]
    assert once.host_total_bytes / of.num_parameters == pytest.approx(each, abs=0.01)


# -- adapters on a packed base ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Base:
    """Numbers of parameters: of one block and of all blocks those that are packed and the others,
    outside the blocks, and of adapters of rank `RANK` on the linear modules."""

    block_packed: int
    packed: int
    blocks: int
    outside: int
    adapters: int


@cache
def base_of(config: str) -> Base:
    shape, expected = PUBLISHED[ADAPTER_CASES[config]]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    total = sum(p.numel() for p in model.parameters())
    assert total == expected
    block_packed = adapters = 0
    for module in model.model.layers[0].modules():
        for name, parameter in module.named_parameters(recurse=False):
            fused = parameter.ndim == 3
            if fused or (isinstance(module, nn.Linear) and name == "weight"):
                block_packed += parameter.numel()
        if isinstance(module, nn.Linear):
            adapters += RANK * (module.in_features + module.out_features)
    blocks = sum(p.numel() for p in model.model.layers.parameters())
    number = shape.num_hidden_layers
    return Base(
        block_packed=block_packed,
        packed=number * block_packed,
        blocks=blocks,
        outside=total - blocks,
        adapters=number * adapters,
    )


@pytest.mark.parametrize("config", ADAPTER_CASES)
def test_adapters_and_their_packed_base_fit_the_machine(config: str) -> None:
    """By the bytes of the formats. Everything that is not packed is bf16; an adapter has an fp32
    weight, two moments and a gradient, which is summed over micro-batches."""
    settings = load(CONFIGS / f"{config}.json")
    has, base = machine(settings, config), base_of(config)
    section = settings.stronghold
    assert section.frozen is not None
    assert section.dtypes == "own"
    assert base.packed > 0.98 * base.blocks
    packed = PACKED_BYTES[section.frozen]
    plain = 2 * (base.blocks - base.packed + base.outside)
    on_host = packed * base.packed + plain + 16 * base.adapters
    assert on_host <= RAM_SHARE * has.ram
    # Three packed slots, one decoded block, and the weights outside the blocks, which have no
    # gradients.
    on_gpu = (3 * packed + 2) * base.block_packed + 2 * base.outside
    assert on_gpu <= section.gpu_memory
    comment = settings.original["_machine"]
    assert f"{packed} bytes per parameter" in comment
    decoded = re.search(r"One decoded block takes ([\d.]+) GB", comment)
    if decoded:
        assert float(decoded[1]) == pytest.approx(2 * base.block_packed / 1e9, rel=0.05)


@pytest.mark.parametrize("config", ADAPTER_CASES)
def test_the_gpu_has_room_for_activations_of_adapters(config: str) -> None:
    """As `test_the_gpu_has_room_for_activations`, but logits exist for some tokens at a time."""
    settings = load(CONFIGS / f"{config}.json")
    shape: Any = published(ADAPTER_CASES[config])
    assert settings.stronghold.activations == "recompute"
    tokens = settings.deepspeed.train_micro_batch_size_per_gpu * SEQUENCE
    assert 4 * tokens * shape.vocab_size >= GIB, "logits are whole below"
    inputs = tokens * shape.num_hidden_layers * shape.hidden_size * 2
    logits = LOSS_CHUNK * shape.vocab_size * (2 + 4 + 4)
    left = machine(settings, config).gpu - settings.stronghold.gpu_memory
    assert inputs + logits <= 0.75 * left
