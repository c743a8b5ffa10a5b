"""Laws of benchmarks/gpu_suite.sh that need no GPU: its syntax, pieces, check and state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "benchmarks" / "gpu_suite.sh"

HANGS = """
import faulthandler, threading
import pytest

def waits_for_ever():
    threading.Event().wait()

@pytest.mark.gpu
def test_hangs():
    waits_for_ever()
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def suite(
    *arguments: str, state: Path, python: Path | None = None, **variables: str
) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        **variables,
        "STRONGHOLD_GPU_STATE": str(state),
        "PYTHON": str(python or sys.executable),
    }
    return subprocess.run(
        ["bash", str(SUITE), *arguments], env=environment, capture_output=True, text=True
    )


def pieces(state: Path) -> list[str]:
    return [line.split()[0] for line in suite("list", state=state).stdout.splitlines()]


def test_pieces_are_listed_once_and_cover_what_was_promised(tmp_path: Path) -> None:
    names = pieces(tmp_path)
    assert len(names) == len(set(names))
    promises = ("smoke", "tests-device", "doctor", "trace", "largest-stronghold", "tokens-ours")
    for promised in promises:
        assert promised in names
    for size in ("3b", "8b"):
        for cap in ("24gb", "80gb"):
            assert f"compare-{size}-{cap}-stronghold" in names
            assert f"table-{size}-{cap}" in names


def test_what_others_stand_on_comes_first(tmp_path: Path) -> None:
    """Training before its kernels alone; rows before the reference, which all tables need once."""
    names = pieces(tmp_path)
    order = ["tests-training", "tests-device", "tests-kernels", "compare-3b-24gb-plain"]
    order += ["reference-3b", "table-3b-24gb", "compare-3b-80gb-stronghold", "table-3b-80gb"]
    assert [name for name in names if name in order] == order


def spy(folder: Path, what: str = "exit 0") -> Path:
    """An interpreter that writes down what it is asked, then does `what`."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\necho "$*" >>"{folder}/asked"\n{what}\n')
    python.chmod(0o755)
    return python


def test_deepspeed_is_compiled_here_before_it_is_measured(tmp_path: Path) -> None:
    """Also where another machine's state says that it is compiled; once."""
    (tmp_path / "compile.done").write_text("done in 50 s\n")
    what = 'case "$*" in *version*) exec ' + sys.executable + ' "$@" ;; esac'
    python = spy(tmp_path, f"{what}\nif [ $# = 1 ]; then exit 0; fi")
    for name in ("compare-3b-24gb-zero-offload", "compare-3b-24gb-superoffload"):
        result = suite("run", name, state=tmp_path, python=python, CXX=f"{tmp_path}/no-c++")
        assert result.returncode in (0, 1), result.stdout + result.stderr
    asked = [
        line for line in (tmp_path / "asked").read_text().splitlines() if "version" not in line
    ]
    assert ["CPUAdamBuilder().load()" in line for line in asked] == [True, False, False], asked


def test_a_test_that_hangs_shows_where_and_the_piece_ends(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests import conftest\nconftest.HAS_CUDA = True\n")
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text(HANGS)
    # The piece's own words, but for the files.
    what = (
        f"for word; do case $word in tests/*) word={hangs} ;; esac; words+=($word); done\n"
        f'exec {sys.executable} "${{words[@]:0:2}}" -p tests.conftest "${{words[@]:2}}"'
    )
    python = spy(tmp_path, what)
    begun = time.monotonic()
    result = suite("run", "tests-device", state=tmp_path, python=python, DEADLOCK_S="1")
    assert time.monotonic() - begun < 60
    assert result.returncode == 1, result.stdout + result.stderr
    assert "in waits_for_ever" in result.stdout
    assert "failed with status 1" in suite("list", state=tmp_path).stdout


def test_every_file_that_a_piece_runs_exists() -> None:
    named = set(re.findall(r"(?:benchmarks|tests)/[a-z_0-9/]+\.py", SUITE.read_text()))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_law_of_a_gpu_is_in_a_piece() -> None:
    """But for what only the pretended device can show: no GPU's host refuses to pin on demand."""
    laws = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    named = set(re.findall(r"tests/gpu/test_[a-z_0-9]+\.py", SUITE.read_text()))
    assert laws - named == {"tests/gpu/test_pinning_cuda.py"}


def test_check_finds_everything_here(tmp_path: Path) -> None:
    result = suite("check", state=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "everything is here" in result.stdout


def test_check_names_the_wheels_to_carry(tmp_path: Path) -> None:
    hidden = f'set -- "${{@/#hjson=/no=}}"; exec {sys.executable} "${{@/#msgpack=/no=}}"'
    python = spy(tmp_path, hidden)
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
    listed = suite("list", state=tmp_path).stdout
    assert re.search(r"^table-3b-24gb .*failed with status 1", listed, re.M)


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


@pytest.mark.parametrize(("piece", "runs"), [("window", 5), ("compare-3b-24gb-l2l", 1)])
def test_runs_that_take_all_their_time_leave_some_to_write_it_down(
    piece: str, runs: int, tmp_path: Path
) -> None:
    python = spy(tmp_path, 'echo "$@"')
    said = suite("run", piece, state=tmp_path, python=python, PIECE_S="100").stdout
    (seconds,) = re.findall(r"--timeout (\d+)", said)
    assert 0 < int(seconds) * runs <= 90


def test_no_piece_begins_when_the_commands_time_is_over(tmp_path: Path) -> None:
    first = pieces(tmp_path)[0]
    result = suite("run", first, state=tmp_path, TOTAL_S="20")
    assert result.returncode == 0
    assert f"{first}: no time is left for it" in result.stdout
    assert pieces(tmp_path)[0] == first
    assert suite("list", state=tmp_path).stdout.splitlines()[0].split()[1] == "-"


def test_wheels_are_named_for_another_python(tmp_path: Path) -> None:
    result = suite("carry", "pydantic-core", "deepspeed", state=tmp_path, WHEELS_FOR="3.12")
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert "--python-version 3.12" in lines[0]
    assert "-d .whl pydantic-core==" in lines[0]
    assert "pip wheel --no-deps --no-build-isolation -w .whl deepspeed==" in lines[1]


# -- a first look at everything -------------------------------------------------------------------
WAYS = (
    HANGS
    + """
import sys
if sys.argv[2] == "hangs":
    faulthandler.dump_traceback_later(0.3)
    test_hangs()
if sys.argv[2] == "fails":
    raise RuntimeError("no such GPU")
print("smoke: it works")
"""
)


def test_a_feature_that_fails_or_hangs_says_how_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import smoke as program
    from smoke_features import FEATURES, Feature

    monkeypatch.setattr(program, "__file__", str(tmp_path / "smoke.py"))
    (tmp_path / "smoke.py").write_text(WAYS)
    for name in ("fails", "hangs", "works"):
        monkeypatch.setitem(FEATURES, name, Feature(str, 1.0, False, {}))
    words = ["fails", "hangs", "works", "--machine", "cuda", "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", ["smoke.py", *words])
    assert program.main() == 1
    said = capsys.readouterr().out
    assert re.search(r"^FAIL fails +[\d.]+ s  status 1: RuntimeError: no such GPU", said, re.M)
    assert re.search(r"^FAIL hangs +[\d.]+ s  still running after 1 s", said, re.M)
    assert "in waits_for_ever" in said
    assert re.search(r"^ok +works +[\d.]+ s  it works", said, re.M)
    assert "smoke on cuda: 1 of 3 work" in said


def test_a_smoke_test_has_a_line_for_each_feature(tmp_path: Path) -> None:
    words = ["step-fp32", "gpu", "--machine", "emulated", "--logs", str(tmp_path)]
    program = [sys.executable, str(ROOT / "benchmarks" / "smoke.py"), *words]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    line, left_out, last = result.stdout.splitlines()
    assert re.match(r"ok +step-fp32 +[\d.]+ s  a plain loop's bits; window 1", line)
    assert left_out == "left out, since they need a GPU: gpu"
    assert last.startswith("smoke on emulated: 1 of 1 work")
    assert {path.name for path in tmp_path.iterdir()} == {"step-fp32.log"}


def test_unknown_words_are_refused(tmp_path: Path) -> None:
    assert suite("run", "nothing", state=tmp_path).returncode == 2
    assert suite("dance", state=tmp_path).returncode == 2
    assert "gpu_suite.sh list" in suite("dance", state=tmp_path).stderr
