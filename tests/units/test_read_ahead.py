"""Reading ahead: a tensor that will be read is in the page cache before its read."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from stronghold.checkpoint.files import TensorFile, entry_of, write_tensors

NUMEL = 8 << 20  # bytes: more than the kernel reads ahead by itself


def cached_pages(path: Path, begin: int, num_bytes: int) -> tuple[int, int]:
    """Pages of a part of a file that are in the page cache, and all of them."""
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    length = begin + num_bytes - first
    num_pages = -(-length // mmap.PAGESIZE)
    flags = mmap.MAP_PRIVATE  # a private mapping is writable memory for ctypes
    with path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), length, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=first
        )
    libc = ctypes.CDLL(None, use_errno=True)
    vector = (ctypes.c_ubyte * num_pages)()
    memory = (ctypes.c_byte * length).from_buffer(mapped)
    status = libc.mincore(
        ctypes.c_void_p(ctypes.addressof(memory)), ctypes.c_size_t(length), vector
    )
    assert status == 0, os.strerror(ctypes.get_errno())
    del memory
    mapped.close()
    return sum(page & 1 for page in vector), num_pages


def test_a_tensor_is_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    names = ("before", "ahead", "after")
    tensors = {name: torch.arange(NUMEL, dtype=torch.uint8) for name in names}
    write_tensors(path, [entry_of(name, tensor) for name, tensor in tensors.items()])
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened = TensorFile(path)
    begin = opened.info("ahead").begin
    if cached_pages(path, begin, NUMEL)[0]:
        pytest.skip("this file system keeps its pages (tmpfs)")
    opened.will_read("ahead")
    deadline = time.monotonic() + 20
    while True:
        cached, num_pages = cached_pages(path, begin, NUMEL)
        if cached == num_pages:
            break
        assert time.monotonic() < deadline, f"{cached} of {num_pages} pages were read ahead"
        time.sleep(0.01)
    assert torch.equal(opened.read("ahead"), tensors["ahead"])
