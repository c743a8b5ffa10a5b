"""docs/adapters.md: its commands and its programs run, in its order, with a tiny base."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.documents import fenced
from tests.support.finetuning import SCRIPTS, byte_tokenizer, jsonl, tiny_llama
from tests.support.frameworks import fresh_accelerate, plugin, reset_accelerate

import finetune as program  # isort: skip
import finetune_training as training  # isort: skip
import peft  # isort: skip

__all__ = ["fresh_accelerate", "plugin"]

ROOT = SCRIPTS.parent
PAGE = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
# What makes a run short.
SHORT = ["--sequence", "32", "--accumulation", "1", "--save-every", "2", "--log-every", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the page's BASE and FILE, and a config for a tiny model."""
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained("BASE")
    tiny_llama(len(tokenizer)).save_pretrained("BASE")
    jsonl(Path("FILE.jsonl"), *({"prompt": f"{a}+1=", "completion": f"{a + 1}"} for a in range(40)))
    settings = json.loads((ROOT / "configs" / "8b_24gb_ram.json").read_text())
    settings["stronghold"] = {"device": "emulated", "window": 1}
    Path("tiny.json").write_text(json.dumps(settings))
    return tmp_path


def commands() -> list[list[str]]:
    lines = "".join(fenced(PAGE, "bash")).splitlines()
    return [shlex.split(line) for line in lines]


def finetune(command: list[str], steps: int) -> Any:
    here = {"FILE": "FILE.jsonl", "8b_24gb_ram": "tiny.json"}
    given = [here.get(word, word) for word in command[1:]]
    reset_accelerate()
    args = program.parse_arguments([*given, *SHORT, "--max-steps", str(steps)])
    return training.finetune(args)


@pytest.mark.usefixtures("fresh_accelerate", "plugin", "folder")
def test_the_commands_lead_from_a_base_to_a_merged_model() -> None:
    first, again, packed = commands()
    assert first == [word for word in again if word != "--resume"]
    finetune(first, steps=3)
    assert Path("ADAPTERS/adapter_model.safetensors").exists()
    finetune(again, steps=4)
    assert Path("ADAPTERS/checkpoint-4/adapter_model.safetensors").exists()
    trainer = finetune(packed, steps=2)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert Path("PACKED_ADAPTERS/adapter_model.safetensors").exists()
    merge, *_ = fenced(PAGE, "python")
    exec(compile(merge, "docs/adapters.md", "exec"), {})
    tokens = torch.arange(10)[None]
    merged = AutoModelForCausalLM.from_pretrained("MERGED")
    base = AutoModelForCausalLM.from_pretrained("BASE")
    before = base(tokens).logits
    expected = peft.PeftModel.from_pretrained(base, "ADAPTERS").merge_and_unload()
    assert torch.equal(merged(tokens).logits, expected(tokens).logits)
    assert not torch.equal(merged(tokens).logits, before)


@pytest.mark.usefixtures("folder")
def test_the_programs_of_the_page_run_one_after_the_other() -> None:
    # as bases are published
    tiny_llama(len(byte_tokenizer())).bfloat16().save_pretrained("BASE")
    (config,) = fenced(PAGE, "json")
    section = {"device": "emulated", "window": 1}
    settings = json.loads(config)
    settings["stronghold"] |= section  # the smallest window, for the smallest model
    Path("ds_config.json").write_text(json.dumps(settings))
    tokens = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"loader": [{"input_ids": tokens, "labels": tokens}] * 3}
    _, train, save, compare, quantised = fenced(PAGE, "python")
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
