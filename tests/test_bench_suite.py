"""Laws of benchmarks/gpu_suite.sh that need no GPU: its syntax, pieces, check and state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "benchmarks" / "gpu_suite.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def suite(*arguments: str, state: Path, python: Path | None = None) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "STRONGHOLD_GPU_STATE": str(state),
        "PYTHON": str(python or sys.executable),
    }
    return subprocess.run(
        ["bash", str(SUITE), *arguments], env=environment, capture_output=True, text=True
    )


def pieces(state: Path) -> list[str]:
    return [line.split()[0] for line in suite("list", state=state).stdout.splitlines()]


def test_the_suite_is_bash() -> None:
    assert subprocess.run(["bash", "-n", str(SUITE)], capture_output=True).returncode == 0


def test_pieces_are_listed_once_and_cover_what_was_promised(tmp_path: Path) -> None:
    names = pieces(tmp_path)
    assert len(names) == len(set(names))
    for promised in ("tests-device", "doctor", "trace", "largest-stronghold", "tokens-ours"):
        assert promised in names
    for size in ("3b", "8b"):
        for cap in ("24gb", "80gb"):
            assert f"compare-{size}-{cap}-stronghold" in names
            assert f"table-{size}-{cap}" in names


def test_every_file_that_a_piece_runs_exists() -> None:
    named = set(re.findall(r"(?:benchmarks|tests)/[a-z_0-9/]+\.py", SUITE.read_text()))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_check_finds_everything_here(tmp_path: Path) -> None:
    result = suite("check", state=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "everything is here" in result.stdout


def test_check_names_the_wheels_to_carry(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *"\'hjson\'"* | *"\'msgpack\'"*) exit 1 ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    result = suite("check", state=tmp_path, python=python)
    assert result.returncode == 1
    assert "check: missing: hjson msgpack" in result.stdout
    assert "pip wheel --no-deps --no-build-isolation -w .whl hjson==" in result.stdout
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"pip download --no-deps --only-binary=:all: --python-version {version}" in result.stdout
    assert "-d .whl msgpack==" in result.stdout


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    first = pieces(tmp_path)[0]
    (tmp_path / f"{first}.done").write_text("done in 5 s\n")
    result = suite("run", first, state=tmp_path)
    assert result.returncode == 0
    assert f"{first} is done already" in result.stdout
    assert "done in 5 s" in suite("list", state=tmp_path).stdout


def test_a_piece_that_fails_says_so_and_stays_to_be_done(tmp_path: Path) -> None:
    result = suite("run", "table-3b-24gb", state=tmp_path)
    assert result.returncode == 1
    assert "no compare-3b-24gb-* has run" in result.stdout
    line = next(
        line
        for line in suite("list", state=tmp_path).stdout.splitlines()
        if line.startswith("table-3b-24gb")
    )
    assert "failed with status 1" in line


def test_the_next_piece_is_the_first_not_tried_and_then_one_that_was_cut_off(
    tmp_path: Path,
) -> None:
    names = pieces(tmp_path)
    for name in names:
        (tmp_path / f"{name}.failed").write_text("failed with status 1, see its log\n")
    assert "nothing is left" in suite("run", "next", state=tmp_path).stdout
    (tmp_path / "table-8b-80gb.failed").write_text("cut off after 480 s; run it again to go on\n")
    assert "gpu_suite: table-8b-80gb" in suite("run", "next", state=tmp_path).stdout
    (tmp_path / "table-3b-80gb.failed").unlink()
    assert "gpu_suite: table-3b-80gb" in suite("run", "next", state=tmp_path).stdout


def test_unknown_words_are_refused(tmp_path: Path) -> None:
    assert suite("run", "nothing", state=tmp_path).returncode == 2
    assert suite("dance", state=tmp_path).returncode == 2
    assert "gpu_suite.sh list" in suite("dance", state=tmp_path).stderr
