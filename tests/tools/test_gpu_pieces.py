"""Laws of benchmarks/gpu.py and benchmarks/smoke.py that need no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import smoke  # noqa: E402
from smoke_features import FEATURES, Feature  # noqa: E402


def pieces(out: Path, *words: str) -> list[str]:
    """The lines of a rehearsal."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), str(out), *words]
    result = subprocess.run([*command, "--rehearse"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def packed(out: Path) -> set[str]:
    with tarfile.open(out / "results.tgz") as archive:
        return set(archive.getnames())


def check_rehearsal(out: Path, names: list[str]) -> None:
    lines = pieces(out, *names)
    assert [line.split()[:3] for line in lines] == [[n, "status", "0"] for n in names]
    for name in names:
        found = out / f"{name}.json"
        rows = json.loads(found.read_text()).get("rows", []) if found.exists() else []
        assert [row["status"] for row in rows if row["status"] == "failed"] == []


@pytest.mark.slow
def test_a_step_and_its_bits_are_rehearsed(tmp_path: Path) -> None:
    check_rehearsal(tmp_path, ["3b", "exact-3b"])
    assert json.loads((tmp_path / "exact-3b.json").read_text())["equal"] is True
    assert packed(tmp_path) >= {"3b.json", "3b.log", "3b-trace.json", "exact-3b.json"}


@pytest.mark.slow
def test_every_piece_is_rehearsed(tmp_path: Path) -> None:
    check_rehearsal(tmp_path, [name for name in gpu.PIECES if not name.endswith("tests")])


def test_a_piece_that_fails_or_hangs_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What hangs is ended with what it has begun, which may hold memory of the GPU."""
    child = tmp_path / "child"
    hangs = (
        "import pathlib, subprocess, time; "
        f"p = subprocess.Popen(['sleep', '60']); pathlib.Path({str(child)!r})"
        ".write_text(str(p.pid)); time.sleep(60)"
    )
    out = tmp_path / "out"
    commands = {"fails": "raise SystemExit(3)", "hangs": hangs, "works": "print('hello')"}
    monkeypatch.setattr(
        gpu, "PIECES", {n: gpu.Piece(n, 2.0, ("-c", c)) for n, c in commands.items()}
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(out)])
    assert gpu.main() == 0
    said = capsys.readouterr().out
    assert re.search(r"^fails +status 3", said, re.M)
    assert re.search(r"^hangs +cut off", said, re.M)
    assert re.search(r"^works +status 0", said, re.M)
    assert (out / "works.log").read_text().endswith("hello\n")
    assert packed(out) == {"fails.log", "hangs.log", "works.log"}
    number = int(child.read_text())
    for _ in range(50):
        if not psutil.pid_exists(number) or psutil.Process(number).status() == "zombie":
            return
        time.sleep(0.1)
    pytest.fail("the child of the piece that hung lives on")


def test_no_piece_begins_shortly_before_the_deadline(tmp_path: Path) -> None:
    (line,) = pieces(tmp_path, "3b", "--seconds", "19")
    assert line.startswith("3b ")
    assert "not begun" in line
    assert list(tmp_path.iterdir()) == []


def test_unknown_pieces_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path / "out"), "dance"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no piece dance; expected smoke, 3b" in capsys.readouterr().err


# -- a first look at everything -------------------------------------------------------------------
WAYS = """
import faulthandler, sys, threading

def waits_for_ever():
    threading.Event().wait()

if sys.argv[2] == "hangs":
    faulthandler.dump_traceback_later(0.3)
    waits_for_ever()
if sys.argv[2] == "fails":
    raise RuntimeError("no such GPU")
print("smoke: it works")
"""


def test_a_feature_that_fails_or_hangs_says_how_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smoke, "__file__", str(tmp_path / "smoke.py"))
    (tmp_path / "smoke.py").write_text(WAYS)
    names = ["fails", "hangs", "works"]
    for name in names:
        monkeypatch.setitem(FEATURES, name, Feature(str, 3.0, False, {}))
    words: list[Any] = [*names, "--machine", "cuda", "--logs", tmp_path / "logs"]
    monkeypatch.setattr(sys, "argv", ["smoke.py", *map(str, words)])
    assert smoke.main() == 1
    said = capsys.readouterr().out
    assert re.search(r"^FAIL fails +[\d.]+ s  status 1: RuntimeError: no such GPU", said, re.M)
    assert re.search(r"^FAIL hangs +[\d.]+ s  still running after 3 s", said, re.M)
    assert "in waits_for_ever" in said
    assert re.search(r"^ok +works +[\d.]+ s  it works", said, re.M)
    assert "smoke on cuda: 1 of 3 work" in said


@pytest.mark.slow
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
