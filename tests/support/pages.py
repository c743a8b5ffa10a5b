"""What the tests of files share: the size of a page, mounts, forked children."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stronghold.optim.states import PAGE_BYTES

PAGE = PAGE_BYTES


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
    torch.set_num_threads(1)  # others would stay here
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
