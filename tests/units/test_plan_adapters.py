"""Laws of `stronghold plan --lora`: adapters train alone. Frozen weights cost their bytes alone."""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import stronghold
from stronghold.errors import ConfigError
from stronghold.tools.estimate.adapters import Adapters
from stronghold.tools.estimate.estimate import Estimate, estimate
from stronghold.tools.estimate.model import from_config
from stronghold.tools.estimate.question import Question
from tests.support.forecasts import asked, run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

BLOCKS = 4
LLAMA = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=BLOCKS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=500,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)
RANK = 4


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    LLAMA.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def question_of(folder: Path, **changes: Any) -> Question:
    """A small GPU, so that blocks are streamed."""
    sizes = dict.fromkeys(("layers", "hidden", "heads", "vocab"))
    options: dict[str, Any] = {"lora": RANK, "gpu": "4MiB", "host": "100MB"}
    return asked(model=folder, **sizes, **options | changes)


def streamed_estimate(folder: Path, **changes: Any) -> Estimate:
    """Every block is streamed."""
    found = estimate(replace(question_of(folder, **changes), resident_layers=0))
    assert found.plan is not None
    return found


# -- what trains, and what it costs ----------------------------------------------------------------


def test_adapters_train_alone(llama: Path) -> None:
    """Two factors of a rank for each linear module of a block."""
    layout = from_config(llama, Adapters(rank=RANK)).layout
    hidden, inner, keys = 256, 512, 128
    shapes = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, inner)] * 3
    per_block = sum(RANK * (rows + columns) for rows, columns in shapes)
    assert layout.num_trained == BLOCKS * per_block
    plain = from_config(llama).layout
    assert layout.num_parameters - layout.num_trained == plain.num_parameters
    assert [layer.num_trained for layer in layout.layers if not layer.streamed] == [0, 0, 0]


# -- the command -----------------------------------------------------------------------------------


def test_the_page_and_the_json_name_what_trains(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--model", str(llama), "--machine", "rtx4090", "--lora", "4", "--seq", "64"]
    targets = ["--lora-targets", "q_proj", "v_proj"]
    status, page, _ = run(*call, *targets, capsys=capsys)
    assert status == 0
    said = " ".join(page.split())
    assert "with LoRA of rank 4 on q_proj, v_proj: " in said
    assert "B parameters in 4 blocks, of which" in said
    assert "B train" in said
    status, text, _ = run(*call, *targets, "--json", capsys=capsys)
    figures = json.loads(text)["asked"]
    assert status == 0
    assert figures["num_trained"] == BLOCKS * RANK * ((256 + 256) + (256 + 128))
    assert figures["num_parameters"] > figures["num_trained"]
    assert figures["adapters"]["rank"] == RANK
    assert figures["adapters"]["targets"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "0"], "--lora: got 0, expected a rank of at least 1"),
        (["--lora-targets", "q_proj"], "expected it with --lora RANK alone"),
        (["--lora", "4", "--lora-targets", "wq"], "--lora-targets: got 'wq', which is the end of"),
        (["--frozen", "nf4"], "--frozen: got nf4, expected it with --lora RANK alone"),
    ],
)
def test_a_wrong_adapter_is_refused_by_name(
    llama: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--model", str(llama), "--machine", "rtx4090", *options]
    status, _, error = run(*call, capsys=capsys)
    assert status == 2
    assert message in error
    assert error.splitlines()[-1].startswith("stronghold: ")


def test_an_unknown_target_is_refused_with_those_that_are_known(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"modules end with .*gate_proj.*q_proj"):
        question_of(llama, lora_targets=["query"])


def test_adapters_without_peft_name_the_package(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="pip install peft"):
        question_of(llama)


def test_adapters_of_fused_experts_are_counted_with_the_weights_that_they_add(
    tmp_path: Path,
) -> None:
    """PEFT computes weight + B A of all experts in each forward: two FLOPs per rank and element.

    It does so twice: torch tries a parametrization when it is registered.
    """
    settings = MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        num_local_experts=4,
    )
    settings.save_pretrained(tmp_path)
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    alone, both = (question_of(tmp_path, lora_targets=["q_proj", *more]) for more in ([], fused))
    forward = [
        sum(layer.forward_flops for layer in question.costs.layers) for question in (alone, both)
    ]
    elements = 2 * 4 * (64 * 128 + 64 * 64)  # of both layers' experts
    assert forward[1] - forward[0] == 2 * 2 * RANK * elements
    # PEFT takes the experts out of their module meanwhile. They are there for the next question.
    longer = both.model.costs_of(both.batch, 2 * both.seq, both.dtype)
    assert sum(layer.forward_flops for layer in longer.layers) > 1.9 * forward[1]


# -- storage formats -------------------------------------------------------------------------------
def packed_blocks(folder: Path, name: str) -> Estimate:
    return streamed_estimate(folder, frozen=name, gpu="6MiB")


def test_packed_weights_cost_the_bytes_of_their_format(llama: Path) -> None:
    """On the host, over the link and in a slot. Norms, embedding and head stay as they came."""
    found = packed_blocks(llama, "nf4")
    question, plan = found.question, found.plan
    assert plan is not None
    hidden, inner, keys = 256, 512, 128
    shapes = [(hidden, hidden)] * 2 + [(keys, hidden)] * 2 + [(inner, hidden)] * 2
    shapes.append((hidden, inner))
    packed = sum(rows * columns for rows, columns in shapes) * (1 / 2 + 4 / 64)
    trained = 2 * RANK * sum(rows + columns for rows, columns in shapes)
    norms = 2 * 2 * hidden
    blocks = [question.layout.layers[index] for index in question.layout.streamed]
    for layer in blocks:
        assert layer.weight_bytes == packed + trained + norms
    traffic = plan.traffic
    assert traffic.streamed_bytes == len(blocks) * (packed + trained + norms)
    assert traffic.trained_bytes == len(blocks) * trained
    assert (
        question.layout.num_parameters
        == from_config(llama, Adapters(rank=RANK)).layout.num_parameters
    )
    # Each product decodes its weight, in forward and in backward.
    plain = streamed_estimate(llama, gpu="6MiB").question
    decoded = 2 * sum(rows * columns for rows, columns in shapes)
    for index in question.layout.streamed:
        cost, dense = question.costs.layers[index], plain.costs.layers[index]
        for moved, before in ((cost.forward, dense.forward), (cost.backward, dense.backward)):
            assert moved.moved_bytes - before.moved_bytes == packed + decoded
        assert cost.passing_bytes - dense.passing_bytes == 2 * hidden * inner
    assert found.config is not None
    assert found.config["stronghold"]["frozen"] == "nf4"


def test_a_format_is_named_where_host_memory_is_short(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the format that it names the plan fits; an unpacked one does not."""
    call = ["--model", str(llama), "--machine", "rtx4090", "--lora", "4", "--seq", "64"]
    short = [*call, "--gpu", "4MiB", "--host", "2MB"]
    status, page, _ = run(*short, capsys=capsys)
    assert status == 1
    said = " ".join(page.split())
    assert 'set stronghold.frozen to "nf4", which rounds frozen weights and saves about' in said
    assert re.search(r"frozen: nf4 \(weights are rounded\) +fits: ", page)
    status, page, _ = run(*short, "--frozen", "nf4", capsys=capsys)
    assert status == 0
    assert "over nf4 weights" in " ".join(page.split())
    assert "frozen: " not in page.partition("What more would buy")[2].partition("Config")[0]
    shorter = [*call, "--gpu", "2MiB", "--host", "1MB", "--frozen", "nf4"]
    status, page, _ = run(*shorter, capsys=capsys)
    assert status == 1
    assert "host memory: the plan needs" in page
    assert "stronghold.frozen" not in page


# -- a run of the plan -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nf4", pytest.param(None, marks=pytest.mark.slow)])
def test_the_config_runs_the_adapters_as_it_was_planned(llama: Path, name: str | None) -> None:
    """On the emulated device: bytes of the GPU and of the host are those of the page."""
    found = streamed_estimate(llama, frozen=name, gpu="6MiB")
    written = json.loads(json.dumps(found.config))
    written["stronghold"]["device"] = "emulated"
    base = AutoModelForCausalLM.from_config(LLAMA)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear")
    engine, *_ = stronghold.initialize(model=peft.get_peft_model(base, settings), config=written)
    try:
        ids = torch.zeros(1, 64, dtype=torch.long)
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        report = engine.memory_report()
        (_, device), (_, host) = found.tiers["gpu"], found.tiers["host"]
        assert report.gpu_peak == report.gpu_planned == sum(device.values()) - device["activations"]
        assert report.host_peak == report.host_planned == sum(host.values()) - host["activations"]
    finally:
        engine.destroy()
