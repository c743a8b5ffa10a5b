"""Laws of the `stronghold` command."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from stronghold.telemetry.trace import Trace
from stronghold.tools import cli


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    lanes, begun_s = Trace(), time.perf_counter()
    lanes.record("compute", "forward 0", begun_s, begun_s + 0.01)
    lanes.record("step", "step 1", begun_s, begun_s + 0.01)
    lanes.write(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_trace_draws_beside_the_file_and_prints_where(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", str(trace_file)]) == 0
    assert capsys.readouterr().out == f"{trace_file.with_suffix('.png')}\n"
    assert trace_file.with_suffix(".png").stat().st_size > 0


def test_trace_draws_where_it_is_told(trace_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a" / "b.png"
    assert cli.main(["trace", str(trace_file), "-o", str(picture), "--step", "1"]) == 0
    assert picture.stat().st_size > 0


def test_a_mistake_is_one_line_on_stderr_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (str(tmp_path / "absent.json"), "."):
        assert cli.main(["trace", file]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert f"trace {file}: cannot be read" in captured.err


def test_a_picture_that_cannot_be_written_is_a_mistake_of_one_line(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", str(trace_file), "-o", "/dev/null/a.png"]) == 2
    assert "/dev/null/a.png: the picture cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_the_installed_command_knows_its_version(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "stronghold.tools.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, *others = result.stdout.splitlines()
    name, version = first.split()
    assert name == "stronghold"
    assert version[0].isdigit()
    if arguments == ["version"]:  # what a bug report needs
        assert f"torch {metadata.version('torch')}" in others
        assert f"deepspeed {metadata.version('deepspeed')}" in others


@pytest.mark.parametrize("arguments", [[], ["trce"], ["trace"]])
def test_a_wrong_call_shows_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: stronghold" in capsys.readouterr().err
