"""TRL's `sft` script under `python -m stronghold.run`, as the pages and `configs/` have it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import stronghold.run
from tests.support.documents import DOCS, ROOT, commands_of, fenced
from tests.support.frameworks import fresh_accelerate, plugin, reset_accelerate
from tests.support.tiny_text import TEMPLATE, byte_tokenizer, jsonl, tiny_llama

__all__ = ["fresh_accelerate", "plugin"]

ADAPTERS = (DOCS / "adapters.md").read_text(encoding="utf-8")
PAGES = [*map(DOCS.joinpath, ("your_model.md", "how_to/full_8b_24gb.md", "adapters.md"))]
COMMANDS = [
    command
    for page in PAGES
    for body in fenced(page.read_text(encoding="utf-8"), "bash")
    for command in commands_of(body)
    if "trl.scripts.sft" in command
]
FULL, AGAIN, LORA = COMMANDS
CONFIGS = sorted(set((ROOT / "configs").glob("*.json")) - {ROOT / "configs" / "quickstart.json"})
# On a CPU the Trainer computes in fp32, and on the device that the engine chooses.
ON_CPU = ["--bf16", "False", "--use_cpu", "False", "--dataloader_pin_memory", "False"]
QUIET = ["--report_to", "none", "--disable_tqdm", "True", "--logging_steps", "1"]
SUMS = [(a, 7 * a % 10) for a in range(40)]
DATA: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in SUMS],
    "text": [{"text": f"{a}+{b}={a + b}"} for a, b in SUMS],
    "chats": [
        {
            "messages": [
                {"role": "user", "content": f"{a}+{b}="},
                {"role": "assistant", "content": f"{a + b}"},
            ]
        }
        for a, b in SUMS
    ],
}

pytestmark = pytest.mark.usefixtures("fresh_accelerate", "plugin", "folder")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory has what the pages name: BASE, DIR, configs/, ds_config.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)  # `run` gives the program its own
    tokenizer = byte_tokenizer()
    for name in ("BASE", "DIR"):
        tokenizer.save_pretrained(name)
        tiny_llama(len(tokenizer)).save_pretrained(name)
    (config,) = fenced(ADAPTERS, "json")
    write_config(Path("ds_config.json"), json.loads(config))
    Path("configs").mkdir()
    for path in CONFIGS:
        write_config(Path("configs") / path.name, json.loads(path.read_text()))
    write_data("prompts")


def write_config(path: Path, config: dict[str, Any], **section: Any) -> None:
    """Write a config of the pages for a tiny model on a CPU."""
    kept = {k: v for k, v in config["stronghold"].items() if k in ("dtypes", "frozen", "nvme")}
    if "nvme" in kept:
        kept["nvme"] |= {"path": str(path.parent.absolute())}
    config |= {"bf16": {"enabled": False}}
    config["stronghold"] = {"device": "emulated", "window": 1, **kept, **section}
    path.write_text(json.dumps(config))


def write_data(kind: str) -> None:
    Path("DATA").mkdir(exist_ok=True)
    jsonl(Path("DATA/train.jsonl"), *DATA[kind])


def run(command: str, *arguments: str) -> None:
    """Run a page's command in this process, on a CPU."""
    python, dash, module, *words = shlex.split(command)
    assert (python, dash, module) == ("python", "-m", "stronghold.run")
    reset_accelerate(ranked=False)
    stronghold.run.main([*words, *ON_CPU, *QUIET, *arguments])


def losses(checkpoint: Path) -> list[float]:
    log = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save fails that copies the model: a second copy would not fit the RAM of these configs."""

    def copies(*_: Any) -> None:
        raise AssertionError("the model is copied to save it")

    monkeypatch.setattr("deepspeed.checkpoint.utils.clone_tensors_for_torch_save", copies)


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "chats" else pytest.param(kind, marks=pytest.mark.slow) for kind in DATA],
)
def test_all_weights_train_and_a_resumed_run_is_the_uninterrupted_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FULL == AGAIN
    without_copies(monkeypatch)
    write_data(kind)
    short = ["--max_steps", "6", "--save_steps", "3", "--max_length", "48"]
    run(FULL, *short)
    first = losses(Path("OUT/checkpoint-6"))
    assert len(first) == 6
    expected = weights_of(Path("OUT"))
    before = weights_of(Path("DIR"))
    assert not any(torch.equal(weight, before[name]) for name, weight in expected.items())
    assert AutoTokenizer.from_pretrained("OUT").chat_template == TEMPLATE
    run(FULL, *short, "--resume_from_checkpoint", "OUT/checkpoint-3")
    assert losses(Path("OUT/checkpoint-6")) == first
    for name, weight in weights_of(Path("OUT")).items():
        assert torch.equal(weight, expected[name]), name


def test_adapters_train_resume_and_are_merged_as_the_page_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_copies(monkeypatch)
    short = ["--max_steps", "4", "--save_steps", "2", "--max_length", "48"]
    run(LORA, *short)
    first = losses(Path("ADAPTERS/checkpoint-4"))
    saved = Path("ADAPTERS/adapter_model.safetensors").read_bytes()
    run(LORA, *short, "--resume_from_checkpoint", "ADAPTERS/checkpoint-2")
    assert losses(Path("ADAPTERS/checkpoint-4")) == first
    assert Path("ADAPTERS/adapter_model.safetensors").read_bytes() == saved
    assert not list(Path("ADAPTERS").glob("**/model*.safetensors"))
    merge, *_ = fenced(ADAPTERS, "python")
    exec(compile(merge, "docs/adapters.md", "exec"), {})
    tokens = torch.arange(10)[None]
    merged = AutoModelForCausalLM.from_pretrained("MERGED")
    base = AutoModelForCausalLM.from_pretrained("BASE")
    before = base(tokens).logits
    expected = peft.PeftModel.from_pretrained(base, "ADAPTERS").merge_and_unload()
    assert torch.equal(merged(tokens).logits, expected(tokens).logits)
    assert not torch.equal(merged(tokens).logits, before)


def test_adapters_of_a_packed_base_train(monkeypatch: pytest.MonkeyPatch) -> None:
    without_copies(monkeypatch)
    config = json.loads(Path("ds_config.json").read_text())
    write_config(Path("ds_config.json"), config, frozen="nf4")
    run(LORA, "--max_steps", "3")
    assert len(losses(Path("ADAPTERS/checkpoint-3"))) == 3
    adapters = load_file("ADAPTERS/adapter_model.safetensors")
    second = [weight for name, weight in adapters.items() if "lora_B" in name]
    assert second
    assert all(weight.any() for weight in second)  # they begin as zeros


def test_the_programs_of_the_page_run_one_after_the_other() -> None:
    # as bases are published
    tiny_llama(len(byte_tokenizer())).bfloat16().save_pretrained("BASE")
    (config,) = fenced(ADAPTERS, "json")
    settings = json.loads(config)
    settings["stronghold"] |= {"device": "emulated", "window": 1}
    Path("ds_config.json").write_text(json.dumps(settings))
    tokens = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"loader": [{"input_ids": tokens, "labels": tokens}] * 3}
    _, train, save, compare, quantised = fenced(ADAPTERS, "python")
    for code in (train, save, compare):
        exec(compile(code, "docs/adapters.md", "exec"), names)
    assert names["engine"].global_steps == 3
    base = AutoModelForCausalLM.from_pretrained("BASE", dtype=torch.bfloat16)
    assert torch.equal(names["reference"], base(tokens).logits)
    opened = peft.PeftModel.from_pretrained(base, "ADAPTERS_OF_A_PROGRAM")
    written = peft.get_peft_model_state_dict(opened)
    trained = peft.get_peft_model_state_dict(names["model"])
    assert all(torch.equal(value, trained[name]) for name, value in written.items())
    names["engine"].destroy()
    exec(compile(quantised, "docs/adapters.md", "exec"), names)
    engine = names["engine"]
    loss = engine(**names["loader"][0]).loss
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_trains(path: Path) -> None:
    """With TRL's own values where the file has none: a value that differs would be refused."""
    config = json.loads(path.read_text())
    batch, steps, rate = (
        config["train_micro_batch_size_per_gpu"],
        config["gradient_accumulation_steps"],
        config["optimizer"]["params"]["lr"],
    )
    command = LORA if "lora" in path.stem else FULL
    words: Sequence[str] = command.split()
    changed = {"--deepspeed": f"configs/{path.name}", "--output_dir": "OUT"}
    words = [
        changed.get(before, word) for before, word in zip(["", *words[:-1]], words, strict=True)
    ]
    run(
        shlex.join(words),
        *("--per_device_train_batch_size", str(batch), "--learning_rate", str(rate)),
        *("--gradient_accumulation_steps", str(steps), "--max_steps", "1"),
    )
    assert len(losses(Path("OUT/checkpoint-1"))) == 1
