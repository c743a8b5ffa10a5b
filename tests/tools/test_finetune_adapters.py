"""Laws of scripts/finetune --lora: it trains adapters as a plain loop of PEFT's model does, stops,
goes on, and leaves them in PEFT's format."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stronghold.model.adapter_targets import split_targets
from tests.support.finetuning import SCRIPTS, byte_tokenizer, jsonl, tiny_llama
from tests.support.frameworks import fresh_accelerate, plugin, reset_accelerate
from tests.support.training import KernelOptimizer

import finetune as program  # isort: skip
import finetune_adapters as adapters  # isort: skip
import finetune_training as training  # isort: skip
import peft  # isort: skip

__all__ = ["fresh_accelerate", "plugin"]

RUN = ["--sequence", "48", "--accumulation", "2", "--log-every", "1", "--eval-every", "6"]
RATE = 1e-2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer)).save_pretrained(folder)
    return folder


def arguments(model: Path, folder: Path, *more: str, section: Any = None) -> Any:
    settings = json.loads((SCRIPTS.parent / "configs" / "8b_24gb_ram.json").read_text())
    settings["optimizer"]["params"]["lr"] = RATE
    settings["stronghold"] = {"device": "emulated", "window": 1, **(section or {})}
    config, file = folder / "config.json", folder / "a.jsonl"
    config.write_text(json.dumps(settings))
    sums = [(a, 3 * a % 29) for a in range(30)]
    jsonl(file, *({"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in sums))
    given = ["--model", model, "--data", file, "--config", config, "--output", folder / "out"]
    return program.parse_arguments([*map(str, given), *RUN, *more])


def losses(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.usefixtures("fresh_accelerate", "plugin")
def test_a_run_learns_resumes_as_if_uninterrupted_and_leaves_adapters(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--lora", "4", "--max-steps", "12", "--save-every", "6"]
    args = arguments(model_dir, tmp_path, *run)
    whole = training.finetune(args)
    assert "docs/adapters.md shows how to merge" in capsys.readouterr().out
    assert losses(whole, "eval_loss")[-1] < losses(whole, "eval_loss")[0] - 0.05
    described = json.loads((args.output / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(model_dir)
    assert (described["r"], described["lora_alpha"]) == (4, 8)
    assert not list(args.output.glob("model*.safetensors"))
    trained = load_file(args.output / "adapter_model.safetensors")
    assert {name.rsplit(".", 3)[1] for name in trained} == {
        *(f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down"))
    }
    # Every checkpoint has its adapters, and no weight of the base.
    for step in (6, 12):
        kept = args.output / f"checkpoint-{step}"
        assert load_file(kept / "adapter_model.safetensors").keys() == trained.keys()
        stored = json.loads((kept / f"global_step{step}" / "manifest.json").read_text())
        assert all("lora_" in one["name"] for one in stored["manifest"]["tensors"])

    shutil.rmtree(args.output / "checkpoint-12")
    reset_accelerate()
    with pytest.raises(training.NotPossible, match=r"adapters was .*'rank': 4.* is None"):
        training.finetune(arguments(model_dir, tmp_path, *run[2:], "--resume"))
    resumed = training.finetune(arguments(model_dir, tmp_path, *run, "--resume"))
    assert losses(resumed) == losses(whole)
    again = load_file(args.output / "adapter_model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in trained.items())


@pytest.mark.usefixtures("fresh_accelerate", "plugin")
def test_the_adapters_are_those_of_a_plain_loop(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same initial values, rows, clipping and kernel of Adam, without an engine."""
    batches: list[dict[str, torch.Tensor]] = []

    class Recording(training.Collator):  # type: ignore[name-defined, misc]
        def __call__(self, rows: Any) -> Any:
            batch = super().__call__(rows)
            batches.append({name: value.clone() for name, value in batch.items()})
            return batch

    monkeypatch.setattr(training, "Collator", Recording)
    steps = 4
    given = ["--lora", "2", "--lora-targets", "q_proj", "mlp.up_proj", "--lora-alpha", "3"]
    given += ["--max-steps", str(steps), "--accumulation", "1", "--validation", "0"]
    args = arguments(model_dir, tmp_path, *given, "--schedule", "constant", "--warmup", "0")
    run = training.finetune(args)

    base = AutoModelForCausalLM.from_pretrained(model_dir, use_cache=False)
    model = adapters.add_adapters(args, base).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert len(parameters) == 3 * 2 * 2
    configured = json.loads(args.config.read_text())["optimizer"]["params"]
    adam = KernelOptimizer(torch.optim.AdamW(parameters, **configured))
    expected = []
    for batch in batches[:steps]:
        num_items = (batch["labels"] != -100).sum()
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        expected.append(loss.item())
        adam.step({p: p.grad for p in parameters}, 1.0)
        model.zero_grad()
    # The log has four digits after the point.
    assert losses(run) == pytest.approx(expected, abs=1e-4)
    saved = load_file(args.output / "adapter_model.safetensors")
    assert len(saved) == len(parameters)
    weights = peft.get_peft_model_state_dict(model)
    for name, value in saved.items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lora", "0"], "at least 1"),
        (["--lora", "4", "--lora-alpha", "-1"], "a number above 0"),
        (["--lora-targets", "q_proj"], "--lora-targets: needs --lora RANK"),
        (["--lora-alpha", "2"], "--lora-alpha: needs --lora RANK"),
        (["--frozen", "nf4"], "--frozen: needs --lora RANK"),
        (["--lora", "4", "--frozen", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_arguments_of_adapters_are_refused_at_once(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ["--model", "m", "--data", "d", "--output", "o", "--config", "8b_24gb_ram", *given]
    with pytest.raises(SystemExit, match="2"):
        program.parse_arguments(whole)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.usefixtures("fresh_accelerate", "plugin")
def test_a_target_that_the_model_does_not_have_is_refused(model_dir: Path, tmp_path: Path) -> None:
    args = arguments(model_dir, tmp_path, "--lora", "4", "--lora-targets", "q_proj", "query")
    with pytest.raises(training.NotPossible, match=r"'query', which is the end of no.* q_proj,"):
        training.finetune(args)


def test_a_name_of_a_parameter_is_one_of_fused_experts() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=1, vocab_size=61)
    model = Qwen3MoeForCausalLM(config)
    chosen = split_targets(["q_proj", "mlp.experts.down_proj"], model)
    assert chosen == (["q_proj"], ["mlp.experts.down_proj"])
    assert split_targets(None, model) == ("all-linear", None)


@pytest.mark.usefixtures("fresh_accelerate", "plugin")
def test_the_storage_format_reaches_the_config(model_dir: Path, tmp_path: Path) -> None:
    args = arguments(model_dir, tmp_path, "--lora", "4", "--frozen", "nf4")
    section = training.read_setup(args).config["stronghold"]
    assert (section["frozen"], section["dtypes"]) == ("nf4", "own")
    args = arguments(
        model_dir, tmp_path, "--lora", "4", "--frozen", "nf4", section={"enabled": False}
    )
    with pytest.raises(training.NotPossible, match=r'--frozen: .* has no enabled "stronghold"'):
        training.read_setup(args)
