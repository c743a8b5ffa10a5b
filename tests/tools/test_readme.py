"""Checks README.md and docs/: commands run, code runs, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stronghold.telemetry import trace
from stronghold.tools import cli
from tests.support.children import FOREIGN
from tests.support.documents import PAGES, PERFORMED, commands_of, fenced, name_of
from tests.tools.test_sft import COMMANDS as SFT_COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 300
SEARCH_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

# Each command of these pages, and a shorter run of it; None: another test runs it.
QUICK = ["--tiny", "--steps", "3", "--compare-steps", "2", "--no-timing"]
PLAN = (
    "stronghold plan --layers 32 --hidden 4096 --heads 32 --vocab 50304 --machine rtx4090 --batch 8"
)
FAST_VARIANTS = {
    "scripts/quickstart": ["scripts/quickstart", "--text", "README.md", *QUICK],
    "scripts/quickstart --tiny --steps 20": None,  # the same
    "scripts/quickstart --text corpus.txt --steps 1000": None,
    "pip install .": None,  # test_wheel
    "stronghold test": None,  # test_selftest
    # test_plugin
    "deepspeed --module stronghold.run train.py --deepspeed ds_config.json": None,
    **dict.fromkeys(SFT_COMMANDS, None),  # test_sft
    "stronghold trace trace.json -o timeline.png": None,  # run where the trace is made
    "stronghold doctor": None,  # a minute; run in test_doctor, for less
    "stronghold version": None,  # test_cli
    # test_plan_adapters plans for such a model.
    "stronghold plan --model DIR --machine rtx4090 --host 64GiB --batch 8 --accumulation 2 "
    "--lora 16 --frozen nf4": None,
    "scripts/test": None,  # below, with an argument of its own
    PLAN: shlex.split(PLAN.replace("--layers 32", "--layers 4")),
}


def blocks(language: str) -> list[str]:
    """Fenced blocks of the README in a language."""
    return fenced(README, language)


def commands() -> set[str]:
    """Commands in `bash` blocks of the README and of docs/. test_pages performs the others."""
    texts = [path.read_text(encoding="utf-8") for path in PAGES if path not in PERFORMED]
    bodies = [body for text in texts for body in fenced(text, "bash")]
    return {command for body in bodies for command in commands_of(body)}


def run(command: list[str], folder: Path = ROOT, *, is_quiet: bool = False) -> str:
    """What a command prints. `is_quiet`: no other package is heard."""
    environment = {**os.environ, "PATH": SEARCH_PATH}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        # a launcher's, which the command would take for its own
        environment.pop(name, None)
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    assert not (is_quiet and FOREIGN.search(result.stderr)), result.stderr
    return result.stdout


needs_set_up = pytest.mark.skipif(
    not (ROOT / ".venv" / "stronghold.stamp").exists(), reason="scripts/_setup has not been run"
)


def test_every_command_of_the_pages_is_known_here() -> None:
    assert sorted(commands()) == sorted(FAST_VARIANTS)


@needs_set_up
def test_the_quickstart_learns_compares_and_leaves_its_pictures(tmp_path: Path) -> None:
    command = FAST_VARIANTS["scripts/quickstart"]
    before = set(Path("/dev/shm").glob("deepspeed_*")) if Path("/dev/shm").exists() else set()
    output = run([*command, "--output", str(tmp_path)], is_quiet=True)
    assert "losses are equal, bit for bit" in output
    assert "every peak is what was planned" in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["losses_equal"] is True
    assert summary["windowed_losses"] == summary["plain_losses"]
    assert (len(summary["losses"]), len(summary["plain_losses"])) == (3, 2)
    assert 2 * summary["gpu_budget_bytes"] < summary["weight_bytes"]
    assert summary["memory"]["gpu_peak"] <= summary["gpu_budget_bytes"]
    chunked = summary["chunked"]
    assert len(chunked["losses"]) == 3
    assert (chunked["batch"], chunked["chunk"]) == (16, 4)
    assert chunked["memory"]["gpu_peak"] == chunked["memory"]["gpu_planned"]
    for name in ("losses.png", "timeline.png", "trace.json", "config.json", "log.txt"):
        assert (tmp_path / name).stat().st_size > 0
    lanes = {span.lane for span in trace.read(tmp_path / "trace.json")}
    assert {"step", "compute", "fetch", "offload", "update"} <= lanes
    if Path("/dev/shm").exists():
        assert set(Path("/dev/shm").glob("deepspeed_*")) <= before


@needs_set_up
def test_the_test_command_hands_its_arguments_to_pytest() -> None:
    command = ["env", "STRONGHOLD_CHECKED=1", "scripts/test", "--version"]
    assert f"pytest {pytest.__version__}" in run(command)


def test_the_code_of_the_readme_trains_and_its_trace_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's Python with its own JSON; a small model stands for the one it downloads."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=4, num_key_value_heads=2, **sizes)
    small = LlamaForCausalLM(config).to(torch.bfloat16)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: small)
    monkeypatch.chdir(tmp_path)
    (code,), (section,) = blocks("python"), blocks("json")
    Path("ds_config.json").write_text(section)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.arange(32, device=device).view(2, 16)
    before = small.lm_head.weight.detach().clone()
    names = {"loader": [{"input_ids": tokens, "labels": tokens}] * 3}
    exec(compile(code, "README.md", "exec"), names)
    assert names["engine"].global_steps == 3
    assert not torch.equal(small.lm_head.weight.cpu(), before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    (command,) = [shlex.split(line) for line in commands() if line.startswith("stronghold trace")]
    if shutil.which(command[0], path=SEARCH_PATH) is None:
        pytest.skip("the command is not in PATH")
    run(command, folder=tmp_path)
    assert Path("timeline.png").stat().st_size > 0


def test_the_packages_page_is_the_readme_without_links_that_lead_nowhere() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "long_description.py"))["dynamic_metadata"]({}, {})
    page = made["readme"]["text"]
    assert re.findall(r"\]\((?!https?://)", README), "there is something to leave out"
    assert not re.findall(r"\]\((?!https?://)", page)
    assert "need one line, `import stronghold.plugin`" in page
    assert page.splitlines()[0] == README.splitlines()[0]


def test_the_measurements_of_the_readme_are_those_of_the_results() -> None:
    (link,) = re.findall(r"\]\((benchmarks/results/h200[^)]*)\)", README)
    runs = json.loads((ROOT / link).with_suffix(".json").read_text())["runs"]
    section = README.partition("## How fast")[2].partition("\n## ")[0]
    named = re.findall(r"\b\d{1,2},\d{3}\b", section)
    measured = {f"{run['tokens_per_s']:,.0f}" for run in runs.values()}
    assert len(named) == 5
    assert [rate for rate in named if rate not in measured] == []


def test_the_plan_of_the_readme_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    command = FAST_VARIANTS[PLAN]
    assert cli.main(command[1:]) == 0
    assert "\nFITS\n" in capsys.readouterr().out


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    missing = []
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            missing.append(target)
    assert missing == []


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}
