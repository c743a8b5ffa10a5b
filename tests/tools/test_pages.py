"""Laws of the pages: their blocks of code run.

Commands of the README and of *Get started*: test_readme.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import stronghold
from stronghold.config.section import StrongholdConfig
from stronghold.tools import cli
from tests.support.documents import DOCS, PAGES, PERFORMED, ROOT, blocks_of, commands_of, name_of
from tests.support.published import published
from tests.tools.test_sft import COMMANDS as SFT_COMMANDS

# Pages whose Python another test runs.
RUN_ELSEWHERE = {"README.md", "adapters.md", "frameworks.md", "rollouts.md", "upstream.md"}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# -- blocks that run --------------------------------------------------------------------------
OTHER_PYTHON = [
    path
    for path in PAGES
    if path not in PERFORMED
    and name_of(path) not in RUN_ELSEWHERE
    and any(block.language == "python" for block in blocks_of(text_of(path)))
]
# Commands that other tests run: test_selftest, test_doctor, test_cli.
KNOWN = {"stronghold test", "stronghold doctor", "stronghold version"}


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "stronghold": {},
}


class Reader:
    """Follows a page in a folder that has what the pages name: DIR, trace.json, CHECKPOINTS.

    `names`: names that the page's Python may use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model().save_pretrained(folder / "DIR")
        tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
        batches = [{"input_ids": tokens, "labels": tokens}] * 3
        model = make_model()
        layers = list(model.model.layers.parameters())
        self.names: dict[str, Any] = {
            "stronghold": stronghold,
            "make_model": make_model,
            "batches": batches,
            "loader": batches,
            "model": model,
            "matrices": [weight for weight in layers if weight.ndim == 2],
            "vectors": [
                *(weight for weight in layers if weight.ndim == 1),
                model.model.norm.weight,
            ],
            "embedding": [model.model.embed_tokens.weight, model.lm_head.weight],
        }
        self.write_config(dict(CONFIG))

    def train(self) -> None:
        """Make an engine, CHECKPOINTS and trace.json."""
        model = self.names["model"]
        section = {"device": "emulated", "window": 2, "trace": "trace.json"}
        engine, *_ = stronghold.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={**CONFIG, "stronghold": section},
        )
        for batch in self.names["batches"]:
            engine.backward(engine(**batch).loss)
            engine.step()
        engine.save_checkpoint("CHECKPOINTS")
        self.names["engine"] = engine

    def follow(self, text: str) -> None:
        """Perform the blocks of a page in their order."""
        for block in blocks_of(text):
            if block.language == "json":
                self.write_config(json.loads(block.body))
            elif block.language == "python":
                exec(compile(block.body, "page", "exec"), self.names)
            elif block.language == "bash":
                for command in commands_of(block.body):
                    run_command(command)

    def write_config(self, config: dict[str, Any]) -> None:
        """Save the page's config, for the emulated device and for a folder that exists."""
        section = dict(config["stronghold"])
        StrongholdConfig.model_validate(section)
        if "nvme" in section:
            section["nvme"]["path"] = str(self.folder)
        config["stronghold"] = {"device": "emulated", "window": 2, **section}
        (self.folder / "ds_config.json").write_text(json.dumps(config))

    def close(self) -> None:
        """End the engine: the trace is complete."""
        if "engine" in self.names:
            self.names.pop("engine").destroy()


def make_model() -> nn.Module:
    """A tiny Llama in bf16, with the same weights each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def run_command(command: str) -> None:
    """Run a command of `stronghold`, and read the others as their own parsers do."""
    words, may_fail = (shlex.split(command.removesuffix(" || true")), command.endswith(" || true"))
    if command in KNOWN:
        return
    if words[0] == "stronghold":
        assert cli.main(words[1:]) in ((0, 1) if may_fail else (0,)), command
    elif words[0] == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        assert parse_args(words[1:]).user_script == "train.py"
    elif words[0] == "torchrun":
        from torch.distributed.run import parse_args as parse_torchrun

        assert parse_torchrun([word.replace("K", "1") for word in words[1:]])
    else:
        assert words[0] == "python", command
        if command not in SFT_COMMANDS:  # test_sft
            subprocess.run([sys.executable, *words[1:]], check=True)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ["CUBLAS_WORKSPACE_CONFIG"])
    made = Reader(tmp_path)
    yield made
    made.close()
    torch.use_deterministic_algorithms(False)


# CI has a step of its own for them
SLOW = {"how_to/full_8b_24gb.md", "how_to/quantised_bases.md"}
PAGES_TO_PERFORM = [
    pytest.param(path, id=name_of(path), marks=[pytest.mark.slow] if name_of(path) in SLOW else [])
    for path in PERFORMED
]


@pytest.mark.parametrize("path", PAGES_TO_PERFORM)
def test_a_how_to_page_is_performed(path: Path, reader: Reader) -> None:
    text = text_of(path)
    if re.search(r"engine\.(save|write)|CHECKPOINTS|trace\.json", text):
        reader.train()
    if "trace.json" in text:
        reader.close()  # which completes the file
    reader.follow(text)


@pytest.mark.slow
def test_the_least_gpu_memory_of_8b_is_the_pages_figure(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    page = text_of(DOCS / "how_to" / "full_8b_24gb.md")
    published("Llama-3.1-8B").save_pretrained(reader.folder / "DIR")
    (command,) = re.findall(r"^(stronghold plan .*) \|\| true$", page, re.MULTILINE)
    assert cli.main(shlex.split(command)[1:]) == 1
    (least,) = re.findall(r"it is \*\*(.* GiB)\*\*", page)
    assert f"gpu_memory to at least {least}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("path", OTHER_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs(path: Path, reader: Reader) -> None:
    for block in blocks_of(text_of(path)):
        if block.language == "python":
            body = block.body.replace("/mnt/nvme", str(reader.folder))
            exec(compile(body, path.name, "exec"), reader.names)


def test_every_config_of_the_pages_is_one() -> None:
    """A section of each JSON block has known keys and valid values."""
    sections = 0
    for path in PAGES:
        for block in blocks_of(text_of(path)):
            if block.language == "json" and '"stronghold"' in block.body:
                StrongholdConfig.model_validate(json.loads(block.body)["stronghold"])
                sections += 1
    assert sections > 5


def test_the_page_of_environment_variables_has_all_of_them() -> None:
    sources = [*(ROOT / "stronghold").rglob("*.py"), *(ROOT / "kernels" / "src").glob("*.cpp")]
    read = {name for path in sources for name in re.findall(r'"(STRONGHOLD_\w+)"', text_of(path))}
    listed = set(re.findall(r"`(STRONGHOLD_\w+)`", text_of(DOCS / "environment.md")))
    assert listed == read
