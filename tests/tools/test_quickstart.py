"""Laws of the quickstart: it ends in its time on any machine.

The steps of slow machines are those of this one under a clock that runs faster: what is fitted, and
what fits, is real.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stronghold.engine import planner
from stronghold.model.costs import count_costs
from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.json")
COMMAND_S = 240.0  # the first command, when pip has downloaded what it installs
TIMEOUT_S = 300


def module(name: str) -> ModuleType:
    """One of scripts/*.py."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module(name)


def faster(times: float) -> Callable[[], float]:
    return lambda: times * time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of the tiny model, with its output in a file."""

    status: int
    output: str
    summary: dict[str, Any]
    folder: Path

    @property
    def words(self) -> str:
        """The output without its line ends."""
        return " ".join(self.output.split())


def run(folder: Path, clock: Callable[[], float], *arguments: str) -> Ran:
    output = io.StringIO()
    given = ["--deepspeed_config", CONFIG, "--tiny", "--output", str(folder), *arguments]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = module("quickstart").main(given, clock=clock)
    summary = json.loads((folder / "summary.json").read_text())
    return Ran(status=status, output=output.getvalue(), summary=summary, folder=folder)


@pytest.mark.slow
def test_a_slow_machine_trains_fewer_steps_and_ends_in_time(tmp_path: Path) -> None:
    ran = run(tmp_path, faster(15.0))  # a step takes some seconds
    assert ran.status == 0, ran.output
    assert ran.summary["seconds"] < COMMAND_S
    steps = len(ran.summary["losses"])
    assert 2 <= steps < 250
    assert f"after {steps} steps in" in ran.words, "the held-out loss names its steps"
    config = json.loads((ran.folder / "config.json").read_text())
    assert config["scheduler"]["params"]["total_num_steps"] >= steps


@pytest.mark.slow
def test_a_machine_too_slow_for_the_model_says_so_and_takes_fewer_steps(tmp_path: Path) -> None:
    ran = run(tmp_path, faster(2000.0))
    assert ran.status == 0, ran.output
    assert "this machine is too slow" in ran.words
    assert ran.words.count("left out, it does not fit into the time") == 2
    assert len(ran.summary["plain_losses"]) == 1
    assert 1 <= len(ran.summary["losses"]) <= 2
    assert ran.summary["losses_equal"]


@pytest.mark.slow
def test_given_steps_are_taken_exactly_however_slow_the_machine(tmp_path: Path) -> None:
    ran = run(tmp_path, faster(2000.0), "--steps", "5", "--compare-steps", "3", "--no-timing")
    assert ran.status == 0, ran.output
    assert len(ran.summary["losses"]) == 5
    assert len(ran.summary["plain_losses"]) == 3
    assert ran.summary["windowed_losses"] == ran.summary["plain_losses"]
    assert ran.summary["held_out"][-1][0] == 5.0


@pytest.mark.slow
def test_a_training_whose_steps_become_slower_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock runs ten times faster when the training has begun."""
    quickstart, late = module("quickstart"), [0.0]
    train = quickstart.train

    def slower(*arguments: Any) -> Any:
        late[0] = time.perf_counter()
        return train(*arguments)

    def clock() -> float:
        now = time.perf_counter()
        return 15.0 * now + (135.0 * (now - late[0]) if late[0] else 0.0)

    monkeypatch.setattr(quickstart, "train", slower)
    ran = run(tmp_path, clock, "--no-timing")
    assert ran.status == 0, ran.output
    assert "steps became slower than they were measured" in ran.words
    steps = len(ran.summary["losses"])
    assert ran.summary["held_out"][-1][0] == steps
    assert f"ended after {steps} of" in ran.words


# -- the arithmetic -------------------------------------------------------------------------------
STEPS_S = [0.001, 0.03, 0.3, 1.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize("step_s", [*STEPS_S, 10.0, 30.0, 300.0])
def test_what_fits_keeps_to_the_time(step_s: float) -> None:
    pace = module("pace")
    watch = pace.Watch(150.0, clock=lambda: 15.0, begun_s=0.0)
    fitted = pace.fit(step_s, watch, measured_steps=2 if step_s < 5 else 1)
    training = fitted.training
    seconds = watch.elapsed_s() + fitted.seconds()
    assert seconds <= 150.0 or training.steps == pace.LEAST_TRAINED
    if step_s in STEPS_S:
        assert seconds <= 150.0
        assert training.steps >= pace.FEW or step_s > 3.0
    if step_s <= 0.03:  # a fast machine takes all there is
        assert (fitted.compared_steps, fitted.chunked_steps, training.steps) == (20, 40, 250)
        assert len(training.evaluated_after) == len(pace.EVALUATED_AT)
        assert seconds < 60.0
    assert training.evaluated_after[-1] == training.steps
    assert 1 <= training.held_out_batches <= 8


@pytest.mark.parametrize("step_s", [1.5, 2.0, 2.5, 3.0])
def test_two_slow_cores_have_time_for_every_part(step_s: float) -> None:
    pace = module("pace")
    watch = pace.Watch(150.0, clock=lambda: 20.0, begun_s=0.0)
    fitted = pace.fit(step_s, watch, measured_steps=2)
    assert fitted.compared_steps >= 3
    assert pace.fit_turns(2 * step_s, fitted.timed_s - 2 * step_s) is not None
    assert fitted.chunked_steps >= pace.LEAST_CHUNKED
    assert fitted.training.steps >= pace.FEW


def test_durations_in_words_claim_no_more_than_an_estimate_knows() -> None:
    in_words = module("pace").in_words
    words = ["1 s", "9 s", "10 s", "55 s", "1 min", "2 min 30 s", "5 min", "17 min"]
    assert [in_words(s) for s in (0.2, 9.4, 11.0, 54.0, 58.0, 148.0, 304.0, 1019.0)] == words


# -- progress -------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_file_is_a_line_every_ten_seconds_with_an_estimate() -> None:
    now, file = [100.0], io.StringIO()
    with module("progress").progress(20, "training", file=file, clock=lambda: now[0]) as bar:
        for step in range(1, 21):
            now[0] += 3.0
            bar.set_postfix_str(f"loss {step}", refresh=False)
            bar.update()
    lines = file.getvalue().splitlines()
    assert lines[0] == "training: 4 of 20, 00:48 left, loss 4"
    assert lines[1] == "training: 8 of 20, 00:36 left, loss 8"
    assert len(lines) == 5
    assert "\r" not in file.getvalue()


def test_steps_done_before_are_no_part_of_the_estimate() -> None:
    now, file = [0.0], io.StringIO()
    progress = module("progress").progress
    with progress(10, "later", done=4, file=file, clock=lambda: now[0]) as bar:
        now[0] = 12.0
        bar.update()
    assert file.getvalue() == "later: 5 of 10, 01:00 left\n"


def test_progress_that_ends_within_ten_seconds_has_no_line() -> None:
    now, file = [0.0], io.StringIO()
    with module("progress").progress(3, "short", file=file, clock=lambda: now[0]) as bar:
        for _ in range(3):
            now[0] += 3.0
            bar.update()
    assert file.getvalue() == ""


def test_progress_on_a_terminal_is_one_line_that_disappears() -> None:
    file = Terminal()
    with module("progress").progress(3, "training", file=file) as bar:
        for _ in range(3):
            bar.update()
            bar.refresh()
    assert "training: 3/3" in file.getvalue()
    assert "\n" not in file.getvalue()
    assert file.getvalue().rstrip("\r").rpartition("\r")[2].strip() == ""


# -- equal bits -----------------------------------------------------------------------------------
# Attention, and the way in which it is no kernel, but products and a softmax.
WRITTEN_OUT = {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"}


@pytest.mark.slow
def test_the_compared_loops_write_attention_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward of fused attention adds in any order on a GPU, unless it may raise an error. The
    count of the first batch's costs, over tensors without memory, computes nothing."""

    def count_unseen(*args: Any, **kwargs: Any) -> Any:
        operators.toggle_collection_dynamic(False, [ProfilerActivity.CPU])
        try:
            return count_costs(*args, **kwargs)
        finally:
            operators.toggle_collection_dynamic(True, [ProfilerActivity.CPU])

    monkeypatch.setattr(planner, "count_costs", count_unseen)
    quickstart = module("quickstart")
    given = ["--deepspeed_config", CONFIG, "--tiny", "--compare-steps", "2"]
    args = quickstart.parse_arguments([*given, "--output", str(tmp_path)])
    task = quickstart.prepare(args, module("pace").Watch(150.0))
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        _, numbers = quickstart.compare(args, task)
    names = {event.key for event in operators.key_averages()}
    assert numbers["losses_equal"]
    assert "aten::_softmax" in names or "aten::_safe_softmax" in names
    assert {name for name in names if "dot_product" in name} == WRITTEN_OUT
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["window", "plain"])
def test_losses_that_differ_are_a_bug_if_the_plain_loop_repeats_its_own(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`odd`: the side whose losses are of another model in its first run."""
    quickstart, name = module("quickstart"), f"run_with{'' if odd == 'window' else 'out'}_window"
    first = getattr(quickstart, name)

    def of_another_model(*arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            build = quickstart.Task.build
            patched.setattr(quickstart.Task, "build", lambda task: scaled(build(task)))
            return first(*arguments)

    monkeypatch.setattr(quickstart, name, of_another_model)
    given = ["--deepspeed_config", CONFIG, "--tiny", "--compare-steps", "2"]
    args = quickstart.parse_arguments([*given, "--output", str(tmp_path)])
    _, numbers = quickstart.compare(args, quickstart.prepare(args, module("pace").Watch(150.0)))
    assert not numbers["losses_equal"]
    verdict = " ".join(capsys.readouterr().out.split())
    assert ("repeats the first one's: this is a bug" in verdict) == (odd == "window")
    assert ("PyTorch does not repeat itself on this machine" in verdict) == (odd == "plain")


def scaled(model: Any) -> Any:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    return model


# -- as commands ----------------------------------------------------------------------------------
def environment(**more: str) -> dict[str, str]:
    """This one, without what a launcher sets."""
    launchers = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {key: value for key, value in os.environ.items() if key not in launchers} | more


@pytest.mark.slow
def test_it_runs_under_the_launcher_without_the_set_up(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    script = ["scripts/quickstart.py", "--deepspeed_config", CONFIG, "--output", str(tmp_path)]
    result = subprocess.run(
        [*launcher, *script, "--tiny", "--no-timing", "--steps", "2", "--compare-steps", "2"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "losses are equal, bit for bit" in result.stdout
    assert (tmp_path / "summary.json").stat().st_size > 0


@pytest.mark.slow
def test_ctrl_c_ends_the_training_and_keeps_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "scripts/quickstart.py", "--deepspeed_config", CONFIG]
    command += ["--tiny", "--no-timing", "--steps", "100000", "--compare-steps", "2"]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith("4. training"):
                time.sleep(2.0)  # the training begins
                process.send_signal(signal.SIGINT)
        status = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    assert status == 130, output
    assert "Traceback" not in output
    assert "of 100000 steps: Ctrl-C" in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"]
    assert len(summary["losses"]) >= 1
    assert summary["held_out"][-1][0] == len(summary["losses"])
    assert (tmp_path / "losses.png").stat().st_size > 0
