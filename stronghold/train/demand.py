"""The planner's input (`plan.cost.Demand`): what the config asks for, and what the machine has.

Decides what the config leaves open and no plan can: memory budgets from free memory, and abilities
that depend on the device and on the number of ranks. The training thread enters, and all ranks do
together: they agree on budgets.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from stronghold.config import Settings, StrongholdConfig
from stronghold.errors import ConfigError
from stronghold.limits import available_host_bytes, mapped_files, update_cores
from stronghold.model.layout import ModelLayout
from stronghold.model.stored_tensors import tensor_has_memory
from stronghold.optim.states import LEAN, States
from stronghold.plan.cost import Demand
from stronghold.plan.memory import levels_of
from stronghold.train.processes import RankGroup

# Without stronghold.gpu_memory half of what the GPU has free goes to slots; the rest is left to
# activations.
GPU_SHARE = 0.5
# Libraries' memory that grows after `initialize`: allocators, communicators, compiled kernels.
PROCESS_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeResources:
    """Memory and cores for this engine.

    gpu_free_bytes       free memory of the GPU; None on another device
    host_reserved_bytes  host memory that other engines of this process will still take
    model_bytes          the model's own parameters in RAM (`ram_bytes`), which the engine's memory
                         replaces
    cores                this rank's cores; empty if ranks do not divide the node's
    """

    gpu_free_bytes: int | None
    host_reserved_bytes: int
    model_bytes: int
    cores: Sequence[int]


def ram_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of RAM that come free with the tensors.

    Pages of files do not count: the system has them as available already. Transformers maps
    safetensors.
    """
    mapped = mapped_files()
    begins = [addresses.start for addresses in mapped]
    nbytes = 0
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor_has_memory(tensor):
            position = bisect_right(begins, tensor.data_ptr()) - 1
            is_mapped = position >= 0 and tensor.data_ptr() in mapped[position]
            nbytes += 0 if is_mapped else tensor.nbytes
    return nbytes


def demand_of(
    settings: Settings,
    layout: ModelLayout,
    states: States,
    ranks: RankGroup,
    free: FreeResources,
    *,
    training: bool,
) -> Demand:
    """Return the planner's input. All ranks call it.

    Raises ConfigError for a key that this device or this number of ranks does not allow.
    """
    section, on_gpu = settings.stronghold, free.gpu_free_bytes is not None
    is_alone = ranks.num_ranks == 1
    gpu_budget = section.gpu_memory
    if gpu_budget is None and free.gpu_free_bytes is not None:
        gpu_budget = int(free.gpu_free_bytes * GPU_SHARE)
    if gpu_budget is not None:
        gpu_budget = min(ranks.of_all(gpu_budget))  # one plan: all ranks move the same layers
    available = available_host_bytes() // ranks.count
    available -= PROCESS_BYTES + free.host_reserved_bytes
    host_budget = section.host_memory or max(0, available) + free.model_bytes
    if section.nvme is not None:
        host_budget = min(ranks.of_all(host_budget))  # the same arrays spill
    resident = section.resident_layers
    num_cores = len(free.cores or os.sched_getaffinity(0))
    compute_threads = 1 if on_gpu else torch.get_num_threads()
    capacity = section.nvme.capacity if section.nvme else None
    pinned = pinned_activations(section, layout)
    # What blocks keep on a GPU, before the first batch is counted: the least.
    before_first_batch = "recompute" if on_gpu else None
    return Demand(
        states=states,
        accumulate=settings.accumulates,
        training=training,
        gpu_budget_bytes=gpu_budget,
        host_budget_bytes=host_budget,
        window=section.window,
        resident_layers=len(layout.streamed) if resident == "all" else resident,
        resident_updates=_resident_updates(section, is_alone=is_alone, on_gpu=on_gpu),
        activations=pinned or before_first_batch,
        by_rule=frozenset() if pinned else frozenset({"activations"}),
        chunk=section.chunk,
        streams=section.streams or 1,
        cpu_threads=section.cpu_threads,
        early_layers=_early_layers(section, layout, settings.gradient_clipping),
        num_cores=update_cores(num_cores, compute_threads),
        nvme=section.nvme is not None,
        nvme_capacity_bytes=capacity and capacity // ranks.count,
        spill=section.nvme.spill if section.nvme else None,
        micro_batches=settings.gradient_accumulation_steps,
        num_ranks=ranks.num_ranks,
        num_nodes=ranks.num_nodes,
    )


def _resident_updates(section: StrongholdConfig, *, is_alone: bool, on_gpu: bool) -> str | None:
    """Choose the place of resident layers' updates. The GPU updates them on one rank alone, and
    exact states alone. None leaves the choice to the rules."""
    ways = 'set it to "host"'
    why = "" if is_alone else "which this release does on one rank alone"
    if not why and section.states == LEAN and on_gpu:
        why, ways = ("but lean states are updated on the host", 'set stronghold.states to "exact"')
    if why and section.resident_updates == "gpu":
        raise ConfigError(f'stronghold.resident_updates: got "gpu", {why}: leave it out, or {ways}')
    return "host" if why else section.resident_updates


def _early_layers(
    section: StrongholdConfig, layout: ModelLayout, gradient_clipping: float
) -> int | None:
    """The config's number of early layers for the planner; None leaves it to the rules."""
    if section.early_layers is None:
        # A clipped step makes early updates twice, and they take RAM.
        return 0 if gradient_clipping else None
    return len(layout.layers) if section.early_layers == "all" else section.early_layers


def pinned_activations(
    section: StrongholdConfig, layout: ModelLayout
) -> str | tuple[str, ...] | None:
    """Return the config's activation policies for the planner. None leaves them to the rules."""
    levels = section.activations
    if isinstance(levels, dict):
        return levels_of(layout, {str(level): count for level, count in levels.items()})
    return levels
