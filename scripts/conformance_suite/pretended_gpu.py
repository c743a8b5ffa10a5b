"""A GPU for the processes of foreign tests: the machine's, or the pretended device of our tests.

`environment` is for the suite, `share_package` for its plugin.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# every Python process that finds it, pretends
SITE = ROOT / "tests" / "pretended" / "site"


def environment() -> dict[str, str]:
    """Return the variables under which a Python process, and those that it starts, have a GPU.

    Where torch was built for CUDA they have the machine's, and DeepSpeed uses it.
    """
    found = {"DS_ACCELERATOR": "cuda"}
    if not built_for_cuda():
        path = [str(ROOT / "scripts"), str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        found["STRONGHOLD_PRETENDED"] = "1"
    return found


def built_for_cuda() -> bool:
    """Return True if the installed torch was built for CUDA. Does not import it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()


def share_package(foreign_tests: Path) -> None:
    """Let `tests.NAME` be found in the folder `foreign_tests`, too.

    Our package `tests`, of which the pretended device is a part, was imported first.
    """
    package = sys.modules.get("tests")
    if package is not None:
        package.__path__ = [str(foreign_tests), str(ROOT / "tests")]
