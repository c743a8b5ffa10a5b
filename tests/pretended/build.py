"""Compiles the pretended device, once per source and torch, into `build/pretended/` of the
repository; `compiled()` says where it is.

Runs the compiler in a process of its own: it needs torch imported, and the device must be loaded
before torch is. Processes that want the same library at once wait for one of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NAME = "pretended_cuda"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = [HERE / name for name in ("device.cpp", "memory.h", "streams.h", "workspaces.h")]
FLAGS = ["-O1", "-g0", "-Wall", "-Wextra", "-Werror"]


def folder() -> Path:
    """Where the library of these sources, this torch and this Python belongs."""
    known = hashlib.sha256(f"{metadata.version('torch')} {sys.version} {FLAGS}".encode())
    for source in SOURCES:
        known.update(source.read_bytes())
    return ROOT / "build" / "pretended" / known.hexdigest()[:16]


def compiled() -> Path:
    """The compiled device; compiles it where nobody has. RuntimeError with the compiler's words."""
    place = folder()
    found = place / f"{NAME}.so"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place / "done"  # a compiler that was stopped leaves half a library
        if not done.exists():
            command = [sys.executable, "-m", "tests.pretended.build"]
            plain = {k: v for k, v in os.environ.items() if k != "STRONGHOLD_PRETENDED"}
            result = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)
            if result.returncode != 0:
                raise RuntimeError(f"the pretended device does not compile:\n{result.stderr}")
            done.touch()
    return found


def compile_here() -> None:
    from torch.utils import cpp_extension

    place = folder()
    # Torch's own lock: a compiler that was stopped leaves it, and the next would wait for ever.
    (place / "lock").unlink(missing_ok=True)
    cpp_extension.load(
        name=NAME,
        sources=[str(SOURCES[0])],
        extra_cflags=FLAGS,
        build_directory=str(place),
        with_cuda=False,
    )


if __name__ == "__main__":
    compile_here()
