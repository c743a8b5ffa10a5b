"""What tests of the NVMe store share: a small store, its memory, its open files, a broken disk."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from stronghold.memory.nvme import NvmeStore
from stronghold.memory.slab import map_slab
from stronghold.memory.stores import Extent
from tests.support.pages import PAGE


def pages(count: int, array: str = "exp_avg", layer: int = 0) -> Extent:
    return Extent(layer=layer, array=array, nbytes=count * PAGE)


def store_of(paths: list[Path], *extents: Extent, **options: object) -> NvmeStore:
    arguments: dict[str, object] = {
        "rates": [1.0] * len(paths),
        "block_bytes": 4 * PAGE,
        "depth": 4,
        **options,
    }
    return NvmeStore(paths, extents=extents, **arguments)  # type: ignore[arg-type]


def memory(count: int, seed: int | None = None) -> torch.Tensor:
    """Page-aligned bytes: random ones, or all 0xA5."""
    made = map_slab(count * PAGE, torch.uint8)
    if seed is None:
        return made.fill_(0xA5)
    generator = torch.Generator().manual_seed(seed)
    return made.random_(0, 256, generator=generator)


def descriptors(folder: Path) -> list[str]:
    """This process's open files under `folder`, as paths of /proc, in the order of opening. Of each
    spill file there are three: to look at it, to write and to read."""
    found = []
    for link in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
        try:
            if os.readlink(link).startswith(f"{folder}/") and "spill" in os.readlink(link):
                found.append(str(link))
        except OSError:
            continue
    return found


def redirect(files: list[str], device: str, *verbs: str) -> None:
    """From now on transfers of a spill file, of these verbs ("read", "write"), reach `device`, as
    after a fault of the disk; errors name the spill file. `files`: its `descriptors`, of which the
    first as `device` mends the disk."""
    _, write, read = (int(Path(file).name) for file in files)
    for verb in verbs:
        opened = os.open(device, os.O_RDONLY if verb == "read" else os.O_WRONLY)
        os.dup2(opened, read if verb == "read" else write, inheritable=False)
        os.close(opened)
