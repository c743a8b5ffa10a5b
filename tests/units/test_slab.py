"""Laws of the host's slabs."""

from __future__ import annotations

import itertools
import mmap
import os

import pytest
import torch

from stronghold.train.slabs import HUGE_PAGE_BYTES, map_slab

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16, torch.uint8])
@pytest.mark.parametrize("numel", [1, 15, 17, 4097, 3 << 20])
def test_a_slab_is_zero_exact_and_begins_at_a_page(numel: int, dtype: torch.dtype) -> None:
    slab = map_slab(numel, dtype)
    assert (slab.shape, slab.dtype) == ((numel,), dtype)
    assert slab.untyped_storage().nbytes() == numel * dtype.itemsize
    assert slab.data_ptr() % PAGE == 0
    assert not slab.any()
    slab.fill_(1)


def test_an_empty_slab_has_no_mapping() -> None:
    assert map_slab(0, torch.float32).shape == (0,)


@pytest.mark.parametrize("nbytes", [1 << 28, (1 << 28) - PAGE, 1 << 29])
def test_slabs_lie_no_multiple_of_a_large_power_of_two_apart(nbytes: int) -> None:
    """Adam's streams would fall together: three times slower on some CPUs."""
    # a layer's arrays; never touched
    slabs = [map_slab(nbytes, torch.uint8) for _ in range(5)]
    addresses = [slab.data_ptr() for slab in slabs]
    for one, other in itertools.combinations(addresses, 2):
        # small ones may fall into gaps, at any distance
        assert (one - other) % (1 << 28)


def test_a_slab_lives_as_long_as_its_views() -> None:
    views = [map_slab(4097, torch.float32)[1:].fill_(float(k)) for k in range(50)]
    for k, flat in enumerate(views):
        assert torch.equal(flat, torch.full((4096,), float(k)))


def mapping_flags(address: int) -> list[str]:
    """VmFlags of the mapping that holds `address`, as the kernel tells them."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as smaps:
        for line in smaps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the kernel tells no flags")
def test_a_slab_is_private_may_have_huge_pages_and_is_not_copied_by_a_fork() -> None:
    """Shared memory gets no huge pages by default; a fork's copy-on-write would double the host's
    bytes and move pinned pages away from the device."""
    slab = map_slab(2 * HUGE_PAGE_BYTES, torch.uint8)
    flags = mapping_flags(slab.data_ptr() + PAGE)
    assert "sh" not in flags
    assert "dc" in flags
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        assert "hg" in flags


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the kernel tells no maps")
def test_a_forked_child_unmaps_nothing_of_its_own() -> None:
    """The child inherits the object that unmaps a slab, but not the slab: its address must be taken
    by nobody else, and letting the object go must be harmless."""
    slab = map_slab(HUGE_PAGE_BYTES, torch.uint8)
    address = slab.data_ptr()
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps") as maps:
            found = [line.split()[1] for line in maps if line.startswith(f"{address:x}-")]
        del slab
        os._exit(0 if found == ["---p"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not slab.any()
