"""Laws of benchmarks/gpu_suite.sh that need no GPU: its syntax, pieces, check and state."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
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

TURNS = """
import pathlib, time
import pytest

INSIDE = pathlib.Path(__file__).parent / "inside"

@pytest.mark.gpu
@pytest.mark.parametrize("me", range(8))
def test_of_the_others(me):
    (INSIDE / str(me)).touch()
    time.sleep(0.5)
    if len(list(INSIDE.iterdir())) > 1:
        (INSIDE.parent / "met").touch()
    (INSIDE / str(me)).unlink()

@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("me", range(3))
def test_alone(me):
    for _ in range(20):
        assert list(INSIDE.iterdir()) == []
        time.sleep(0.02)
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def environment_of(
    state: Path, python: Path | None, variables: dict[str, str]
) -> dict[str, str]:
    return {
        **os.environ,
        **variables,
        "STRONGHOLD_GPU_STATE": str(state),
        "PYTHON": str(python or sys.executable),
    }


def suite(
    *arguments: str, state: Path, python: Path | None = None, **variables: str
) -> subprocess.CompletedProcess:
    environment = environment_of(state, python, variables)
    return subprocess.run(
        ["bash", str(SUITE), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


def pieces(state: Path) -> list[str]:
    return [line.split()[0] for line in suite("list", state=state).stdout.splitlines()]


def test_pieces_are_listed_once_and_cover_what_was_promised(tmp_path: Path) -> None:
    names = pieces(tmp_path)
    assert len(names) == len(set(names))
    promises = (
        "smoke",
        "tests-device",
        "doctor",
        "trace",
        "largest-stronghold",
        "tokens-ours",
    )
    for promised in promises:
        assert promised in names
    for size in ("3b", "8b"):
        for cap in ("24gb", "80gb"):
            assert f"compare-{size}-{cap}-stronghold" in names
            assert f"table-{size}-{cap}" in names


def test_what_shows_most_comes_first(tmp_path: Path) -> None:
    """A step at a real size before the laws, its trace behind it; the device before training, and
    training before its kernels alone. Rows before what judges them, which tables need."""
    names = pieces(tmp_path)
    order = [
        "probe",
        "smoke",
        "compare-3b-24gb-stronghold",
        "trace",
        "reference-3b",
        "doctor",
    ]
    order += ["tests-device", "tests-training", "tests-kernels", "agree", "quickstart"]
    order += ["compare-3b-24gb-zero-offload", "compare-3b-80gb-stronghold", "halves-3b"]
    order += ["table-3b-24gb", "table-3b-80gb", "compare-3b-24gb-plain", "reference-8b"]
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
        result = suite(
            "run", name, state=tmp_path, python=python, CXX=f"{tmp_path}/no-c++"
        )
        assert result.returncode in (0, 1), result.stdout + result.stderr
    asked = [
        line
        for line in (tmp_path / "asked").read_text().splitlines()
        if "version" not in line
    ]
    assert ["CPUAdamBuilder().load()" in line for line in asked] == [
        True,
        False,
        False,
    ], asked


def python_that_runs(tests: str, folder: Path) -> Path:
    """An interpreter that takes a piece's own words, but for its files: it runs these tests."""
    (folder / "conftest.py").write_text(
        "from tests import conftest\nconftest.HAS_CUDA = True\n"
    )
    file = folder / "test_these.py"
    file.write_text(tests)
    what = (
        f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n'
        f'for word; do case $word in tests/*) word={file} ;; esac; words+=("$word"); done\n'
        f'exec {sys.executable} "${{words[@]:0:2}}" -p tests.conftest "${{words[@]:2}}"'
    )
    return spy(folder, what)


@pytest.mark.slow
def test_a_test_that_is_alone_is_alone_in_a_piece_of_several_processes(
    tmp_path: Path,
) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "inside").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nproc").write_text("#!/bin/bash\necho 4\n")
    (tmp_path / "bin" / "nproc").chmod(0o755)
    python = python_that_runs(TURNS, tmp_path)
    search_path = f"{tmp_path}/bin:{os.environ['PATH']}"
    result = suite(
        "run", "tests-kernels", state=tmp_path, python=python, PATH=search_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "11 passed" in result.stdout
    assert (tmp_path / "met").exists(), "the others ran one after the other"


@pytest.mark.slow
def test_a_test_that_hangs_shows_where_and_the_piece_ends(tmp_path: Path) -> None:
    python = python_that_runs(HANGS, tmp_path)
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


def test_every_law_of_a_gpu_is_in_one_piece(tmp_path: Path) -> None:
    """Those of real shapes, in whichever file, in a piece of their own. But for what only the
    pretended device can show: no GPU's host refuses to pin on demand."""
    python = spy(tmp_path, 'if [ "$1" = -c ]; then exit 1; fi; echo "$@"')
    names = [name for name in pieces(tmp_path) if name.startswith("tests-")]
    laws = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    laws.remove("tests/gpu/test_pinning_cuda.py")
    found: dict[str, list[str]] = {"not real_shapes": [], "real_shapes": []}
    for name in names:
        said = suite("run", name, state=tmp_path, python=python).stdout
        (chosen,) = re.findall(r" -k (.*?) -o ", said)
        found[chosen] += re.findall(r"tests/gpu/test_[a-z_0-9]+\.py", said)
    for files in found.values():
        assert sorted(files) == sorted(laws)


@pytest.mark.slow
def test_check_finds_everything_here(tmp_path: Path) -> None:
    result = suite("check", state=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "everything is here" in result.stdout


@pytest.mark.slow
def test_check_names_the_wheels_to_carry(tmp_path: Path) -> None:
    hidden = (
        f'set -- "${{@/#hjson=/no=}}"; exec {sys.executable} "${{@/#msgpack=/no=}}"'
    )
    python = spy(tmp_path, hidden)
    result = suite("check", state=tmp_path, python=python)
    assert result.returncode == 1
    assert "check: missing or too old: hjson msgpack" in result.stdout
    assert "pip wheel --no-deps --no-build-isolation -w .whl hjson==" in result.stdout
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (
        f"pip download --no-deps --only-binary=:all: --python-version {version}"
        in result.stdout
    )
    assert "-d .whl msgpack==" in result.stdout


def pretend_package(state: Path, name: str, version: str) -> None:
    """A package of another version, where the suite's own packages come first."""
    folder = state / "site" / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def test_check_compares_versions(tmp_path: Path) -> None:
    pretend_package(tmp_path, "msgpack", "0.1")  # of which any version will do
    pretend_package(tmp_path, "typing_extensions", "4.9.0")
    result = suite("check", state=tmp_path)
    assert result.returncode == 1
    assert "missing or too old: typing-extensions\n" in result.stdout
    assert "-d .whl typing-extensions==" in result.stdout


@pytest.mark.slow
def test_an_old_builder_is_named_and_stops_nothing(tmp_path: Path) -> None:
    """What pyproject.toml asks of it is what check asks."""
    (least,) = re.findall(
        r'scikit-build-core>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert f"scikit-build-core>={least} " in SUITE.read_text()
    pretend_package(tmp_path, "scikit_build_core", "0.12.2")
    result = suite("check", state=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        "cmake alone does it; missing or too old: scikit-build-core\n" in result.stdout
    )


def copy_of_the_tree(folder: Path) -> Path:
    """What the build needs, and no library."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("kernels", "stronghold", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "benchmarks").mkdir()
    for name in (
        "benchmarks/gpu_suite.sh",
        "CMakeLists.txt",
        "pyproject.toml",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_cmake_alone_builds_what_is_then_carried(tmp_path: Path) -> None:
    """Where scikit-build-core is too old; the second machine has no compiler to run."""
    tree, state = copy_of_the_tree(tmp_path / "tree"), tmp_path / "state"
    pretend_package(state, "scikit_build_core", "0.12.2")
    environment = environment_of(state, None, {})
    words = ["bash", str(tree / "benchmarks" / "gpu_suite.sh"), "setup", "none"]
    first = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "setup: cmake alone built the kernels" in first.stdout
    library = tree / "stronghold" / "_native" / "libstronghold.so"
    built = library.read_bytes()
    library.unlink()
    shutil.rmtree(tree / "build")
    second = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "setup: the kernels are those that were carried" in second.stdout
    assert library.read_bytes() == built
    assert not (tree / "build").exists()


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
    (tmp_path / "table-8b-80gb.failed").write_text(
        "cut off after 480 s; run it again to go on\n"
    )
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


def in_seconds(seconds: float) -> str:
    """A time from now, as DEADLINE says it."""
    return str(int(time.time() + seconds))


def test_no_piece_begins_when_the_commands_time_is_over(tmp_path: Path) -> None:
    first = pieces(tmp_path)[0]
    result = suite("run", first, state=tmp_path, DEADLINE=in_seconds(20))
    assert result.returncode == 0
    assert f"{first}: no time is left for it" in result.stdout
    assert pieces(tmp_path)[0] == first
    assert suite("list", state=tmp_path).stdout.splitlines()[0].split()[1] == "-"


def test_one_deadline_is_for_setup_and_pieces(tmp_path: Path) -> None:
    """Whatever setup took is not there for pieces, and a piece gets what is left."""
    late = suite("setup", "none", state=tmp_path, DEADLINE=in_seconds(-1))
    assert late.returncode == 1
    assert "set-up: no time is left" in late.stdout
    begun = time.monotonic()
    python = spy(tmp_path, "sleep 30")
    result = suite(
        "setup", "none", state=tmp_path, python=python, DEADLINE=in_seconds(3)
    )
    assert result.returncode == 124, result.stdout + result.stderr
    assert time.monotonic() - begun < 20
    python = spy(tmp_path, 'echo "$@"')
    said = suite(
        "run", "doctor", state=tmp_path, python=python, DEADLINE=in_seconds(60)
    ).stdout
    (limit,) = re.findall(r"doctor, (\d+) s at most", said)
    assert 50 <= int(limit) <= 60
    said = suite(
        "run", "smoke", state=tmp_path, python=python, DEADLINE=in_seconds(600)
    ).stdout
    # the first step at a real size comes after it
    assert "smoke, 180 s at most" in said


def test_a_process_that_a_piece_leaves_behind_holds_nothing_up(tmp_path: Path) -> None:
    """It has the output open, and a session of its own, in which timeout does not reach it."""
    left = f'setsid sleep 60 & echo $! >"{tmp_path}/left"; echo it printed'
    python = spy(tmp_path, f'case "$*" in *doctor*) {left} ;; esac')
    begun = time.monotonic()
    result = subprocess.run(
        ["bash", str(SUITE), "run", "doctor"],
        env=environment_of(tmp_path, python, {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - begun
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert result.returncode == 0
    assert seconds < 30
    assert (tmp_path / "doctor.log").read_text() == "it printed\n"


def names_in(archive: Path) -> set[str]:
    with tarfile.open(archive) as found:
        return {member.name for member in found if member.isfile()}


def test_a_command_that_is_killed_keeps_every_piece_that_ended(tmp_path: Path) -> None:
    """SIGKILL, while the third piece runs: the archive has the two before it, and the console's log
    what was printed until then."""
    state, out = tmp_path / "state", tmp_path / "out"
    what = (
        'case "$*" in *doctor*) echo "{}" >"${@: -1}" ;; *smoke.py*) echo all work ;;\n'
        f'  *tests/gpu*) echo "test_one PASSED"; touch "{tmp_path}/third"; exec sleep 60 ;; esac'
    )
    process = subprocess.Popen(
        ["bash", str(SUITE), "run", "smoke", "doctor", "tests-device", "trace"],
        env=environment_of(state, spy(tmp_path, what), {"PACK_TO": str(out)}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "third").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_with_children(process.pid)
    process.wait()
    found = names_in(out / "state.tgz")
    done = {
        "state/smoke.done",
        "state/smoke.log",
        "state/doctor.done",
        "state/results/doctor.json",
    }
    assert done <= found
    assert not any("tests-device" in name for name in found)


def kill_with_children(pid: int) -> None:
    """SIGKILL for a process and all that it started."""
    import psutil

    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        process.kill()


def test_a_call_is_setup_its_pieces_and_one_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = suite(
        *("call", "3", str(out), "none"),
        state=tmp_path / "state",
        python=spy(tmp_path),
        CALL_S="25",
    )
    assert result.returncode != 0  # a spy builds no kernels
    assert "compare-3b-24gb-superoffload-param: no time is left for it" in result.stdout
    assert (out / "console.log").read_text() == result.stdout
    assert "state/setup.log" in names_in(out / "state.tgz")
    assert suite("call", "4", str(out), state=tmp_path / "state").returncode == 2


def test_what_was_compiled_is_carried(tmp_path: Path) -> None:
    """In an archive of its own; unpacked elsewhere, DeepSpeed's kernels are not compiled again."""
    state, out, other = tmp_path / "state", tmp_path / "out", tmp_path / "other"
    what = 'case "$*" in *version*) exec ' + sys.executable + ' "$@" ;; esac'
    python = spy(tmp_path, f"{what}\nif [ $# = 1 ]; then exit 0; fi")
    suite(
        "run",
        "compare-3b-24gb-superoffload",
        state=state,
        python=python,
        PACK_TO=str(out),
    )
    assert any(
        name.endswith("/compiled") for name in names_in(out / "state_compiled.tgz")
    )
    assert not any("/compiled/" in name for name in names_in(out / "state.tgz"))
    other.mkdir()
    shutil.unpack_archive(out / "state_compiled.tgz", other)
    (tmp_path / "asked").unlink()
    (stamp,) = (other / "state" / "compiled").glob("*/torch_extensions/compiled")
    # of a process that was killed: the next would wait for ever
    lock = stamp.with_name("lock")
    lock.touch()
    suite("run", "compare-3b-24gb-zero-offload", state=other / "state", python=python)
    assert "CPUAdamBuilder" not in (tmp_path / "asked").read_text()
    assert not lock.exists()


def test_the_run_that_is_compared_is_traced_after_its_plan_has_settled(
    tmp_path: Path,
) -> None:
    """The plan changes at the end of step 3."""
    python = spy(tmp_path, 'echo "$@"')
    said = suite(
        "run", "compare-3b-24gb-stronghold", state=tmp_path, python=python
    ).stdout
    assert f"--trace {tmp_path}/results/trace.json" in said
    assert int(re.findall(r"--warmup (\d+)", said)[0]) >= 5
    said = suite(
        "run", "compare-3b-80gb-stronghold", state=tmp_path, python=python
    ).stdout
    assert "--trace" not in said
    assert (
        "no compare-3b-24gb-stronghold" in suite("run", "trace", state=tmp_path).stdout
    )


def test_the_memory_that_is_said_is_said_to_all(tmp_path: Path) -> None:
    python = spy(tmp_path, 'echo "$@ has $STRONGHOLD_HOST_MEMORY"')
    for words, expected in (
        ("115GB", 115 * 10**9),
        ("100GiB", 100 << 30),
        ("4096", 4096),
    ):
        state = tmp_path / words
        said = suite(
            "run", "doctor", state=state, python=python, HOST_MEMORY=words
        ).stdout
        assert f"has {expected}\n" in said


def test_the_quickstart_runs_as_its_script_runs_it(tmp_path: Path) -> None:
    python = spy(tmp_path, 'if [ "$1" = -c ]; then echo 29511; else echo "$@"; fi')
    said = suite("run", "quickstart", state=tmp_path, python=python).stdout
    assert "-m deepspeed.launcher.runner --num_gpus 1" in said
    assert "scripts/quickstart.py --deepspeed_config configs/quickstart.json" in said
    assert "--tiny --steps 40 --no-timing" in said
    script = (ROOT / "scripts" / "quickstart").read_text()
    assert "scripts/quickstart.py --deepspeed_config configs/quickstart.json" in script


def test_wheels_are_named_for_another_python(tmp_path: Path) -> None:
    result = suite(
        "carry", "pydantic-core", "deepspeed", state=tmp_path, WHEELS_FOR="3.12"
    )
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
        monkeypatch.setitem(FEATURES, name, Feature(str, 3.0, False, {}))
    words = [
        "fails",
        "hangs",
        "works",
        "--machine",
        "cuda",
        "--logs",
        str(tmp_path / "logs"),
    ]
    monkeypatch.setattr(sys, "argv", ["smoke.py", *words])
    assert program.main() == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^FAIL fails +[\d.]+ s  status 1: RuntimeError: no such GPU", said, re.M
    )
    assert re.search(r"^FAIL hangs +[\d.]+ s  still running after 3 s", said, re.M)
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
