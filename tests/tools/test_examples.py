"""Each program of `examples/` runs as its docstring says, and its loss falls."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "plan_to_timeline.ipynb"
OPTIONAL = {"trl_sft": "trl", "trl_dpo": "trl", "lightning_fit": "lightning"}
# Programs without a launcher and without a framework's global state run in this process.
IN_THIS_PROCESS = {"plain_loop", "lora", "qlora"}
# A launcher's words in front of the script, as this Python starts it.
LAUNCHERS = {"deepspeed": "deepspeed.launcher.runner", "torchrun": "torch.distributed.run"}
LAUNCHED_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# What runs instead of the program: DeepSpeed would compile a kernel that one rank does not need.
CHILD = "import sys; from tests.tools.test_examples import run_here; run_here(*sys.argv[1:])"
TIMEOUT_S = 300


def run_here(script: str, *arguments: str) -> None:
    """Run a program in this process, on a CPU too."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with ExitStack() as patches:
        patches.enter_context(patch.object(sys, "argv", [script, *arguments]))
        if Path(script).stem == "lightning_fit" and not torch.cuda.is_available():
            from tests.support.lightning_on_cpu import lightning_on_cpu

            patches.enter_context(lightning_on_cpu())
        runpy.run_path(script, run_name="__main__")


def lines_of(path: Path) -> list[str]:
    """The command lines of the docstring."""
    page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [line.strip() for line in page.splitlines() if line.startswith("    ")]


def losses_in(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", text, re.MULTILINE)]


def run(command: list[str], **variables: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHED_VARIABLES}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, (
        f"{shlex.join(command)}\n{result.stdout}\n{result.stderr[-4000:]}"
    )
    return result.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem in OPTIONAL:
        pytest.importorskip(OPTIONAL[path.stem])
    if path.stem in IN_THIS_PROCESS:
        run_here(str(path), "--steps", "6")
        losses = losses_in(capsys.readouterr().out)
        assert len(losses) == 6
        assert losses[-1] < losses[0]
        return
    command = [sys.executable, "-c", CHILD, str(path), "--steps", "6"]
    ranked = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables = {**ranked, "MASTER_PORT": str(free_port())}
    if lines_of(path)[0].startswith("python"):
        variables = {}
    if path.stem == "launcher":
        command += ["--deepspeed_config", "examples/ds_config.json"]
    losses = losses_in(run(command, **variables))
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.slow  # CI has a step of its own for it
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells are plain Python: no part of Jupyter is needed."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert "\nFITS\n" in capsys.readouterr().out
    losses = names["losses"]
    assert isinstance(losses, list)
    assert losses[-1] < losses[0]
    assert Path("timeline.png").stat().st_size > 0


@pytest.mark.slow
def test_the_launchers_line_trains_on_two_ranks() -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need two GPUs, or none")
    words = shlex.split(lines_of(ROOT / "examples" / "launcher.py")[0])
    module = LAUNCHERS[words[0]]
    port = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    output = run([sys.executable, "-m", module, *port, *words[1:], "--steps", "3"])
    losses = losses_in(output)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
