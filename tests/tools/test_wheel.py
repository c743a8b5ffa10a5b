"""The wheel installs into an environment of its own and passes `stronghold test` there.

It brings the package alone, and says that the package is typed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    """Run a command outside the repository; returns its output."""
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
def test_the_wheel_of_the_sdist_passes_the_self_test(tmp_path: Path) -> None:
    """The sdist makes the wheel. Dependencies are those of this environment; stronghold is not."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = (
        "from scikit_build_core.build import build_sdist as b; import sys; print(b(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True)
    (sdist,) = tmp_path.glob("stronghold-*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    run(*pip, "wheel", *options, str(sdist))
    (wheel,) = tmp_path.glob("stronghold-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "stronghold/py.typed" in names
    folders = {name.split("/")[0] for name in names}
    assert folders == {"stronghold", f"{wheel.stem.split('-py3')[0]}.dist-info"}
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", str(wheel))
    (site,) = environment.glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and .pth files inside it are not read: the editable
    # stronghold of this environment is not found there.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + os.linesep)
    where = run(python, "-c", "import stronghold; print(stronghold.__file__)")
    assert where.startswith(str(environment))
    link = "from stronghold.errors import *; print(page_link(ErrorPage.KERNELS))"
    page = Path(run(python, "-c", link).strip().removeprefix("file://"))
    assert page.is_relative_to(environment)
    assert page.read_text(encoding="utf-8").startswith("# The kernels are not built")
    output = run(str(environment / "bin" / "stronghold"), "test")
    assert "equal" in output
