"""First touch: pages are committed before their first use, and no byte changes."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import pytest
import torch

from stronghold.devices.first_touch import FirstTouch, touch_now
from stronghold.native import touch
from stronghold.train.slabs import map_slab

NBYTES = (40 << 20) + 12345  # some pieces, and a last page of which a part is used


def has_its_pages(slab: torch.Tensor) -> bool:
    pages = (ctypes.c_ubyte * -(-slab.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    assert mincore(ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(slab.nbytes), pages) == 0
    return all(page & 1 for page in pages)


def test_a_touched_slab_has_its_pages() -> None:
    first_touch = FirstTouch()
    now, soon = (map_slab(NBYTES, torch.uint8) for _ in range(2))
    assert not has_its_pages(now)
    touch_now(now)
    assert has_its_pages(now)
    first_touch.add(soon)
    deadline_s = time.perf_counter() + 60
    while not has_its_pages(soon) and time.perf_counter() < deadline_s:
        time.sleep(0.01)
    first_touch.close()
    assert has_its_pages(soon)
    assert first_touch.nbytes == NBYTES
    assert first_touch.seconds > 0.0
    assert not now.any()
    assert not soon.any()


def test_a_touch_loses_no_write_of_another_thread() -> None:
    """A page's first byte is what a touch reads and writes."""
    slab = map_slab(64 * 4096, torch.uint8)
    numbers = slab.view(torch.int64)[:: 4096 // 8]
    done = threading.Event()

    def touch_on() -> None:
        while not done.is_set():
            touch(slab)

    other = threading.Thread(target=touch_on)
    other.start()
    for _ in range(20_000):
        numbers += 1
    done.set()
    other.join()
    assert (numbers == 20_000).all()
    assert slab.view(torch.int64).sum() == 64 * 20_000


def test_a_closed_one_leaves_no_thread_and_a_refused_thread_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_touch = FirstTouch()
    first_touch.add(map_slab(NBYTES, torch.uint8))
    first_touch.close()
    first_touch.close()
    assert not [each for each in threading.enumerate() if each.name == "stronghold:touch"]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first_touch.add(map_slab(NBYTES, torch.uint8))
    assert first_touch.nbytes == NBYTES  # of the first slab alone
    touch_now(map_slab(NBYTES, torch.uint8))
