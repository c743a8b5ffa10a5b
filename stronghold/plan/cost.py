"""Cost: the planner's demand, the bytes that a step moves, its seconds, and the limits of both.

Pure data, and arithmetic on sizes, rates and spans; any thread. `Demand` is the planner's input.
`Traffic` is the one table of a step's bytes. It serves the plan, its log line, the rules' bounds
and the physical limit. No other file counts a step's bytes.

[Note: formula] The physical limit of a step's time:

    step >= max((2 + 2 g + 2 r) P T / F + attention, (k e P n + A) / B, (e t P n + A) / B, q P / M,
                D / S)

1. P streamed parameters have e bytes each. T tokens come in n micro-batches. A micro-batch fetches
   all weights k = 2 times, and runs r further forward passes. Backward has g products for each of
   forward. In full training g is 2; all parameters train, so the share t is 1. A frozen weight has
   g = 1, no gradient and no update.
2. F is the rate of matrix products, in FLOP/s. Attention takes the time of its kernels at their
   measured rates; without such rates it runs at F.
3. B is the link's rate per direction, M the host memory's, S the disk's, in bytes/s.
4. A is the bytes of offloaded activations, D the disk's bytes, q the bytes of host memory per
   parameter.
5. The weights that are still in the window when the direction turns are subtracted.
6. One layer's fetch and offload are added. Only compute of the layers that stay can hide them.
7. Norms, activations and other memory-bound operators are no term of the limit, because fused
   kernels can avoid most of their traffic. A forecast counts them (`workload_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from stronghold.config.section import Level
from stronghold.model.costs import ModelCosts
from stronghold.model.layout import ModelLayout
from stronghold.model.operators import Counts
from stronghold.optim.states import States
from stronghold.plan.machine import MachineProfile

# -- the demand -----------------------------------------------------------------------------------
# Activation levels: what a block keeps of the tensors that autograd saves.
# "keep" leaves them on the device. "offload" copies them to the host and back. All further levels
# recompute them from the block's inputs, which wait on the device or (with "offload" in the name)
# on the host. The levels with "attention" keep attention's results beside the inputs, so that
# attention does not run twice.
LEVELS: tuple[str, ...] = get_args(Level)
AGAIN = frozenset(LEVELS[2:])  # the block's forward runs again in backward: recompute
ATTENTION = frozenset(LEVELS[2:4])  # attention's results are kept
AWAY = frozenset(level for level in LEVELS if level.endswith("offload"))


def spared(levels: Sequence[str]) -> tuple[str, ...]:
    """The levels of a forward that keeps nothing on the device that backward can compute again."""
    return tuple(level if level in AWAY else "recompute" for level in levels)


# Why a rule has set a key of the config ([Note: rules] of `rules`).
REASONS = {
    "window": "three where they fit: one computes, one is still in use, one is on its way",
    "resident_layers": "evenly over the depth, as many as make the shortest step by estimate",
    "resident_updates": "the faster by estimate",
    "activations": "the last blocks keep most: backward needs them first",
    "early_layers": "in backward, where the CPU would idle",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer's work in one micro-batch, in seconds and bytes.

    `backward_s` excludes recomputation. `attention_s` are the seconds of attention's kernels, a
    share of `forward_s`. `saved_bytes` are the tensors that autograd saves, `boundary_bytes` the
    block's inputs, `attention_bytes` attention's results. `passing_bytes` are transient in forward
    and backward, beside all others.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int = 0
    boundary_bytes: int = 0
    attention_s: float = 0.0
    attention_bytes: int = 0
    passing_bytes: int = 0

    def grown(self, factor: float) -> LayerWork:
        """The work with the bytes of a larger micro-batch. The seconds are unchanged."""
        return replace(
            self,
            saved_bytes=math.ceil(factor * self.saved_bytes),
            boundary_bytes=math.ceil(factor * self.boundary_bytes),
            attention_bytes=math.ceil(factor * self.attention_bytes),
            passing_bytes=math.ceil(factor * self.passing_bytes),
        )

    def recompute_s(self, level: str) -> float:
        """Seconds of forward that backward runs again at this activation level."""
        if level not in AGAIN:
            return 0.0
        if level in ATTENTION:
            return self.forward_s - self.attention_s
        return self.forward_s

    def recomputed_bytes(self, level: str) -> int:
        """Bytes that recomputation allocates in backward."""
        if level not in AGAIN:
            return 0
        if level in ATTENTION:
            return self.saved_bytes - self.attention_bytes
        return self.saved_bytes

    def waiting_bytes(self, level: str) -> int:
        """Bytes that wait from forward to backward, on the device or the host."""
        if level not in AGAIN:
            return self.saved_bytes
        if level in ATTENTION:
            return self.boundary_bytes + self.attention_bytes
        return self.boundary_bytes

    def moved_bytes(self, level: str) -> int:
        """Bytes of activations that are offloaded to the host, and copied back."""
        return self.waiting_bytes(level) if level in AWAY else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The planner's input: states, budgets in bytes, and the user's settings.

    A setting is None if the planner chooses it.
    """

    states: States  # of the parameters in the config's precision
    accumulate: bool  # gradients are summed in fp32 over micro-batches
    training: bool = True
    gpu_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    window: int | None = None
    resident_layers: int | None = None
    # "gpu" or "host": where resident layers are updated
    resident_updates: str | None = None
    activations: str | tuple[str, ...] | None = None  # one of LEVELS, or one per layer
    chunk: int | None = None  # sequences that go through a block together; None: all
    chunks: int = 1  # number of chunks in a micro-batch, if it is known
    streams: int = 1  # CUDA streams on which chunks take turns
    # Each layer's work; empty: unknown, and the gpu budget covers weights and gradients alone.
    work: tuple[LayerWork, ...] = ()
    sequences: int = 0  # in a micro-batch; 0: unknown
    tokens: int = 0  # in a micro-batch, in all its sequences; 0: unknown
    # A later micro-batch may have so many times the tokens. It keeps nothing that backward can
    # compute again, where no level is pinned.
    growth: float = 1.0
    reserve_bytes: int = 0  # of the gpu budget, for activations at least
    cpu_threads: int | None = None
    # number of layers that are updated before the norm is known
    early_layers: int | None = None
    num_cores: int = 1
    nvme: bool = False  # arrays may lie in files
    nvme_capacity_bytes: int | None = None
    # A word of `memory.DEPTHS`: all arrays of these kinds spill. None: as few as necessary.
    spill: str | None = None
    in_files: tuple[tuple[str, ...], ...] | None = None  # by layer, the arrays that stay in files
    piece_bytes: int | None = None
    micro_batches: int = 1
    by_rule: frozenset[str] = frozenset()  # keys that a rule set, not the user
    # Data-parallel ranks. Each owns some of the layers. Every node has all weights.
    num_ranks: int = 1
    num_nodes: int = 1

    def why(self, key: str) -> str:
        """The origin of a key's value, for the plan's reasons."""
        if key in self.by_rule:
            return REASONS[key]
        return f"stronghold.{key}"

    def pins(self, key: str) -> bool:
        """True if the user set the key, and no rule did."""
        return getattr(self, key) is not None and key not in self.by_rule

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def is_open(self) -> bool:
        """True if the user has left the rules something to choose."""
        return self.training and (self.may_update_early or self.layers_may_move)

    @property
    def may_update_early(self) -> bool:
        """True if the number of early updates is open, and the host's budget is known."""
        is_open = self.early_layers is None and self.num_ranks == 1
        return is_open and self.host_budget_bytes is not None

    @property
    def layers_may_move(self) -> bool:
        """True if the rules may choose where blocks are, or what they keep: there is a budget, and
        no layer has files."""
        is_pinned = all(map(self.pins, ("window", "resident_layers", "activations")))
        return not self.nvme and self.gpu_budget_bytes is not None and not is_pinned


WEIGHT_FETCHES = 2  # k: forward and backward
SUM_BYTES = 4  # bytes of an accumulated gradient, which is fp32

COMPUTE = "compute"
MEMORY = "host memory bandwidth"
FETCH = "link host to device"
OFFLOAD = "link device to host"
DUPLEX = "link, both directions together"
DISK = "nvme"


# -- bytes ----------------------------------------------------------------------------------------
def owners(trained_bytes: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each layer: the largest first, each to the rank with the fewest bytes so far."""
    owner, loads = [0] * len(trained_bytes), [0] * num_ranks
    for k in sorted(range(len(owner)), key=lambda k: -trained_bytes[k]):
        owner[k] = loads.index(min(loads))
        loads[owner[k]] += trained_bytes[k]
    return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one training step moves on one rank, for any schedule, with padding.

    streamed_bytes       weights that cross the link
    window_bytes         those of them that are still in the window when the direction turns
    refreshed_bytes      weights that stay on the device and are updated on the host
    layer_bytes          weights of the largest streamed layer
    trained_bytes        gradients of streamed layers; `trained_parameters` is their number
    update_bytes         memory that the optimizer reads and writes on the host
    device_update_bytes  memory that the optimizer reads and writes on the device
    offloaded_bytes      activations that leave and return in every micro-batch
    nvme_*               bytes of files, per step
    """

    micro_batches: int = 1
    streamed_bytes: int = 0
    window_bytes: int = 0
    refreshed_bytes: int = 0
    layer_bytes: int = 0
    trained_bytes: int = 0
    trained_parameters: int = 0
    update_bytes: int = 0
    device_update_bytes: int = 0
    offloaded_bytes: int = 0
    nvme_read_bytes: int = 0
    nvme_written_bytes: int = 0

    @property
    def fetch_bytes(self) -> int:
        """Bytes from host to device.

        1. Streamed weights cross k n times. The window's weights do not cross at a turn between
           forward and backward. They do cross after an update, which changed them.
        2. Weights that stay on the device and are updated on the host cross once.
        3. Offloaded activations come back in every micro-batch.
        """
        passes = WEIGHT_FETCHES * self.micro_batches
        loaded = passes * self.streamed_bytes - (passes - 1) * self.window_bytes
        return loaded + self.refreshed_bytes + self.micro_batches * self.offloaded_bytes

    @property
    def drain_bytes(self) -> int:
        """Bytes from device to host.

        1. Gradients of streamed layers cross in every micro-batch, because the next layer needs
           their slots.
        2. Gradients of layers that stay cross at least once.
        3. Offloaded activations leave in every micro-batch.
        """
        drained = self.micro_batches * self.trained_bytes + self.refreshed_bytes
        return drained + self.micro_batches * self.offloaded_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of host memory that sums over micro-batches read and write.

        Per parameter, the first gradient starts a sum (read e, write 4). Each further gradient is
        added (read e and 4, write 4). The update reads the last gradient beside the sum.
        """
        bytes_per_sum = self.trained_bytes + 2 * SUM_BYTES * self.trained_parameters
        return (self.micro_batches - 1) * bytes_per_sum

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory: the optimizer's, and one end of every transfer, the disk's too."""
        link_bytes = self.fetch_bytes + self.drain_bytes
        disk_bytes = self.nvme_read_bytes + self.nvme_written_bytes
        return self.update_bytes + self.sum_bytes + link_bytes + disk_bytes


def traffic_of(
    layout: ModelLayout,
    demand: Demand,
    *,
    resident: frozenset[int] = frozenset(),
    on_gpu: frozenset[int] = frozenset(),
    window: int = 0,
    offloaded_bytes: int = 0,
    nvme: tuple[int, int] = (0, 0),
) -> Traffic:
    """The traffic of a step on one rank.

    Layers in `resident` stay on the device; layers that are no blocks stay anyway. Layers in
    `on_gpu` are updated there. `window` is the number of slots. `nvme` has the bytes that a step
    reads from files, and those that it writes.
    """
    num_ranks = demand.num_ranks
    streamed = [layer for layer in layout.layers if layer.streamed and layer.index not in resident]
    streamed_indices = {layer.index for layer in streamed}
    elsewhere = streamed_indices | on_gpu
    refreshed = [layer for layer in layout.layers if layer.index not in elsewhere]
    on_device = [layer for layer in layout.layers if layer.index in on_gpu]
    largest = sorted((layer.weight_bytes for layer in streamed), reverse=True)
    # The order of this sum decides its last bit.
    host_update_bytes = sum(layer.update_bytes for layer in [*streamed, *refreshed])
    device_update_bytes = sum(layer.update_bytes for layer in on_device)
    nvme_read_bytes, nvme_written_bytes = nvme
    return Traffic(
        micro_batches=demand.micro_batches,
        streamed_bytes=sum(largest),
        window_bytes=sum(largest[:window]),
        refreshed_bytes=sum(layer.gradient_bytes for layer in refreshed) // num_ranks,
        layer_bytes=next(iter(largest), 0),
        trained_bytes=sum(layer.gradient_bytes for layer in streamed) // num_ranks,
        trained_parameters=sum(layer.trained_numel for layer in streamed) // num_ranks,
        update_bytes=int(host_update_bytes / num_ranks),
        device_update_bytes=int(device_update_bytes),
        offloaded_bytes=offloaded_bytes,
        nvme_read_bytes=nvme_read_bytes,
        nvme_written_bytes=nvme_written_bytes,
    )


# -- limits ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The physical limit of a step's time.

    No step takes less than `seconds`. `parts` has the seconds of every resource; `bound` names the
    busiest one. `fill_s` are the seconds that one layer's fetch and offload add.
    """

    seconds: float
    bound: str
    parts: dict[str, float]
    fill_s: float


def physical_limit(
    traffic: Traffic,
    machine: MachineProfile,
    dtype: str,
    *,
    forward_flops: float,
    recomputed_flops: float = 0.0,
    staying_flops: float = 0.0,
) -> Limits:
    """The lower bound of a step's time ([Note: formula]): the busiest resource if it never waits.

    All FLOPs are those of one micro-batch's forward: `forward_flops` of the model,
    `recomputed_flops` of the layers that backward recomputes, `staying_flops` of the layers that
    never leave the device. Backward computes twice as much as forward.
    """
    rate = machine.flops[dtype]
    link_bytes = traffic.fetch_bytes + traffic.drain_bytes
    parts = {
        COMPUTE: traffic.micro_batches * (3.0 * forward_flops + recomputed_flops) / rate,
        FETCH: traffic.fetch_bytes / (machine.fetch_gbps * 1e9),
        OFFLOAD: traffic.drain_bytes / (machine.offload_gbps * 1e9),
        DUPLEX: link_bytes / (machine.duplex_gbps * 1e9),
        MEMORY: traffic.memory_bytes / (machine.memory_gbps * 1e9),
        DISK: _disk_s(traffic, machine),
    }
    fetched = traffic.layer_bytes
    drained = traffic.layer_bytes if traffic.trained_bytes else 0
    transfer_s = (fetched / machine.fetch_gbps + drained / machine.offload_gbps) / 1e9
    hidden_s = 3.0 * staying_flops / rate
    fill_s = max(0.0, transfer_s - hidden_s)
    bound = max(parts, key=parts.__getitem__)
    return Limits(seconds=parts[bound] + fill_s, bound=bound, parts=parts, fill_s=fill_s)


def _disk_s(traffic: Traffic, machine: MachineProfile) -> float:
    """Seconds of the disk. Infinite if the step uses a disk and the profile has none."""
    if not traffic.nvme_read_bytes + traffic.nvme_written_bytes:
        return 0.0
    read, write = machine.nvme_read_gbps, machine.nvme_write_gbps
    if read is None or write is None:
        return float("inf")
    return disk_s(traffic, read, write, machine.nvme_mixed_gbps or read + write)


def disk_s(traffic: Traffic, read_gbps: float, write_gbps: float, mixed_gbps: float) -> float:
    """The least seconds of a disk with these rates of reads, of writes, and of both together.

    Reads and writes run together at the mixed rate, or one after the other, whichever is faster.
    """
    reads_s = traffic.nvme_read_bytes / read_gbps * 1e-9
    writes_s = traffic.nvme_written_bytes / write_gbps * 1e-9
    moved = traffic.nvme_read_bytes + traffic.nvme_written_bytes
    together_s = moved / mixed_gbps * 1e-9
    return max(reads_s, writes_s, min(together_s, reads_s + writes_s))


# -- seconds --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of a step: `layers` in the layout's order, for each of `micro_batches`."""

    layers: tuple[LayerWork, ...]
    micro_batches: int = 1

    @property
    def forward_s(self) -> float:
        """Seconds of the model's forward in one micro-batch."""
        return sum(layer.forward_s for layer in self.layers)

    def backward_s(self, activations: Sequence[str]) -> float:
        """Seconds of the model's backward in one micro-batch, with the recomputation that these
        activation levels need."""
        seconds = [
            layer.backward_s + layer.recompute_s(level)
            for layer, level in zip(self.layers, activations, strict=True)
        ]
        return sum(seconds)


def workload_of(costs: ModelCosts, machine: MachineProfile, *, micro_batches: int = 1) -> Workload:
    """The seconds that `machine` needs for `costs`, with one kernel after the other.

    1. Matrix products take their FLOPs at the machine's rate of products.
    2. Fused attention takes its measured rates. Other operators take device memory's rate.
    """

    def one_by_one_s(counts: Counts) -> float:
        operators_s = counts.moved_bytes / (machine.gpu_memory_gbps * 1e9)
        return counts.product_flops / machine.flops[costs.dtype] + operators_s

    layers: list[LayerWork] = []
    for layer in costs.layers:
        attention_forward_s, attention_backward_s = machine.attention_s(costs.dtype, layer.forward)
        work = LayerWork(
            forward_s=one_by_one_s(layer.forward) + attention_forward_s,
            backward_s=one_by_one_s(layer.backward) + attention_backward_s,
            saved_bytes=layer.saved_bytes,
            boundary_bytes=layer.boundary_bytes,
            attention_s=attention_forward_s,
            attention_bytes=layer.forward.attention_bytes,
            passing_bytes=layer.passing_bytes,
        )
        layers.append(work)
    return Workload(layers=tuple(layers), micro_batches=micro_batches)
