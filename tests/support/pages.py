"""What the tests of file I/O share: engines, aligned memory, mounts, refusals, forked children."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stronghold.native import ALIGNMENT, IoQueue

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


def refuse_io_uring(number: int) -> None:
    """A seccomp filter as containers have it: io_uring_setup (425 everywhere) fails."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    load_number, if_equal, answer = 0x20, 0x15, 0x06  # BPF: ld word, jeq, ret
    rules = [
        (load_number, 0, 0, 0),
        (if_equal, 0, 1, 425),
        (answer, 0, 0, 0x00050000 | number),  # SECCOMP_RET_ERRNO
        (answer, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    program = Program(len(rules), ctypes.addressof(code))
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, "PR_SET_SECCOMP"
