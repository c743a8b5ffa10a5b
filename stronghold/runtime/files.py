"""The files of one engine's spilled state: opened before anything large is allocated.

Owns the order in which an engine's parts meet the files, not the files themselves (`memory.nvme`).
The training thread alone enters.
"""

from __future__ import annotations

import contextlib

import torch

from stronghold.config.section import NvmeConfig
from stronghold.device.base import Device
from stronghold.memory.mapping import check_mappings
from stronghold.memory.neighbours import ALONE
from stronghold.memory.nvme import BLOCK_BYTES, NvmeStore
from stronghold.memory.tiers import Tiers, extent_requests
from stronghold.model.layout import ModelLayout
from stronghold.plan.planner import Plan
from stronghold.runtime.distributed import Ranks
from stronghold.runtime.ranks.sharing import neighbours


def open_tiers(
    nvme: NvmeConfig | None,
    plan: Plan,
    layout: ModelLayout,
    dtype: torch.dtype,
    device: Device,
    ranks: Ranks | None,
    undo: contextlib.ExitStack,
) -> Tiers:
    """Open the files of what `plan` spills, which `undo` closes; every rank calls it."""
    if nvme is None or not any(plan.spilled):
        return Tiers(layout, dtype)
    mapped = plan.nvme_bytes["weights"]
    check_mappings(mapped, len(nvme.paths), nvme.block or BLOCK_BYTES)
    store = NvmeStore(
        nvme.paths,
        extents=extent_requests(layout, dtype, plan.spilled, plan.num_ranks),
        ring_entries=plan.staging.entries,
        piece_bytes=plan.staging.piece_bytes,
        capacity_bytes=nvme.capacity,
        engine=nvme.engine,
        depth=nvme.depth,
        block_bytes=nvme.block,
        device=device,
        neighbours=ALONE if ranks is None else neighbours(ranks),
    )
    undo.callback(store.close)
    undo.callback(device.close)  # first: lanes may still read and write the files
    return Tiers(
        layout,
        dtype,
        store,
        plan.spilled,
        update_entries=plan.staging.update_entries,
        fetch_entries=plan.staging.fetch_entries,
        shards=ranks.shards if ranks is not None else None,
    )
