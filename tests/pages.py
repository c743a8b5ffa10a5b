"""What the tests of file I/O share: engines, aligned memory, mounts, a forked child."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stronghold.native_io import ALIGNMENT, IoQueue

PAGE = ALIGNMENT


def io_uring_is_permitted() -> bool:
    with IoQueue(1, PAGE) as queue:
        return queue.engine == "io_uring"


ENGINES = [
    pytest.param(
        "io_uring",
        marks=pytest.mark.skipif(not io_uring_is_permitted(), reason="the kernel refuses io_uring"),
    ),
    "threads",
]


class Memory:
    """Page-aligned bytes with an address; random ones when a seed is given."""

    def __init__(self, pages: int, seed: int | None = None) -> None:
        self._mapping = mmap.mmap(-1, pages * PAGE)
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.nbytes = pages * PAGE
        self.address = self.bytes.ctypes.data
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.nbytes, np.uint8)


@contextlib.contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[Path]:
    """A file system at `path` for a while; mounting one needs root, and skips without."""
    command = ["mount", *arguments, str(path)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if made.returncode != 0:
        pytest.skip(f"{' '.join(command)} is refused: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def in_child(body: Callable[[], object]) -> str:
    """What `body` returns in a forked child, as text; its exception's text when it raises."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            answer = str(body())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return answer
