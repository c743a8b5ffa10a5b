"""Each program of `examples/` runs as its docstring says, and its loss falls."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "plan_to_timeline.ipynb"
# Programs without a launcher and without a framework's global state run in this process.
IN_THIS_PROCESS = {"plain_loop", "lora", "qlora"}
# A launcher's words in front of the script, as this Python starts it.
LAUNCHERS = {"deepspeed": "deepspeed.launcher.runner", "torchrun": "torch.distributed.run"}
LAUNCHED_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# What each group of programs needs is imported once: a fork of that process runs each of them.
IMPORTS = {
    ("accelerate_loop", "launcher", "trainer"): ("accelerate", "peft"),
    ("lightning_fit", "trl_dpo", "trl_sft"): ("trl", "lightning"),
}
TIMEOUT_S = 300


def run_here(script: str, *arguments: str) -> None:
    """Run a program in this process, on a CPU too."""
    import deepspeed

    # DeepSpeed would compile a kernel that one rank does not need.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with ExitStack() as patches:
        patches.enter_context(patch.object(sys, "argv", [script, *arguments]))
        if Path(script).stem == "lightning_fit" and not torch.cuda.is_available():
            from tests.support.lightning_on_cpu import lightning_on_cpu

            patches.enter_context(lightning_on_cpu())
        runpy.run_path(script, run_name="__main__")


def run_forked(folder: str, imports: str, commands: str) -> None:
    """Run each command (JSON: script, arguments, environment) in a fork of this process.

    What it prints goes to a file of the script's name in `folder`. This process only imports: it
    has no thread that a fork would lack.
    """
    for name in [*imports.split(), "stronghold.engine"]:
        importlib.import_module(name)
    for script, arguments, environment in json.loads(commands):
        child = os.fork()
        if child == 0:
            with open(Path(folder) / Path(script).stem, "wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ.update(environment)
            try:
                run_here(script, *arguments)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


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


@pytest.mark.parametrize("name", sorted(IN_THIS_PROCESS))
def test_an_example_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(str(ROOT / "examples" / f"{name}.py"), "--steps", "6")
    assert_learns(capsys.readouterr().out)


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES} == IN_THIS_PROCESS.union(*IMPORTS)


@pytest.mark.parametrize(
    "names",
    [
        names if "trl_sft" not in names else pytest.param(names, marks=pytest.mark.slow)
        for names in IMPORTS
    ],
    ids=str,
)
def test_the_examples_of_frameworks_train(names: tuple[str, ...], tmp_path: Path) -> None:
    commands = []
    for path in (path for path in EXAMPLES if path.stem in names):
        arguments, variables = ["--steps", "6"], {}
        if not lines_of(path)[0].startswith("python"):  # a launcher starts it
            variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if path.stem == "launcher":
            arguments += ["--deepspeed_config", "examples/ds_config.json"]
        commands.append((str(path), arguments, variables))
    imports = " ".join(IMPORTS[names])
    call = f"run_forked({str(tmp_path)!r}, {imports!r}, {json.dumps(commands)!r})"
    run([sys.executable, "-c", f"from tests.tools.test_examples import run_forked; {call}"])
    for script, *_ in commands:
        assert_learns((tmp_path / Path(script).stem).read_text())


def assert_learns(printed: str) -> None:
    losses = losses_in(printed)
    assert len(losses) == 6, printed[-4000:]
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
    planned = next(cell for cell in cells if cell["cell_type"] == "code")["outputs"][0]["text"]
    assert "".join(planned) in capsys.readouterr().out  # the page that it shows is today's
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
