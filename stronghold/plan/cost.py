"""What is asked of a step, and what it costs: one table of the bytes that it moves, its seconds,
and the limits of both.

Pure data, and arithmetic on sizes, rates and spans; any thread. `Demand` is what the planner is
asked; `Traffic` serves the plan, its log line, the search's bounds and the physical limit; nobody
else counts a step's bytes.

[Note: formula] For P streamed parameters of e bytes, T tokens in n micro-batches, k = 2 loads of
the weights and r further forward passes per micro-batch:

    step >= max((6 + 2 r) P T / F + attention, (k e P n + A) / B, (e P n + A) / B, q P / M, D / S)

less what is still in the window when the direction turns. F are the FLOP/s of products. Attention
takes the time of its kernels at their measured rates, at F where a profile has none. B are the
link's bytes/s per direction, M the host memory's, S the disk's, A the bytes of activations that are
offloaded, D the disk's, q those of host memory that a parameter costs. Beside it stand one layer's
fetch and drain, which nothing hides but what stays on the device. Norms, activations and other
operators that only move device memory are no part of the limit, since fused kernels can leave out
most of what they move. A forecast counts them (`workload_of`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import get_args

from stronghold.config.section import Level
from stronghold.model.costs import LayerCost, ModelCosts
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.optim.states import Formats, States, one_format
from stronghold.plan.homes import Homes
from stronghold.plan.machine import MachineProfile, Rates
from stronghold.telemetry.metrics import BatchSize
from stronghold.telemetry.trace import Span

# -- what is asked --------------------------------------------------------------------------------
# What happens to what autograd saves of a block, by name: it stays, or goes to the host and comes
# back; or it is computed again from the block's inputs, which stay or wait on the host; and with
# them what attention gave, which is then not computed twice.
LEVELS: tuple[str, ...] = get_args(Level)
AGAIN = frozenset(LEVELS[2:])  # run twice
ATTENTION = frozenset(LEVELS[2:4])
AWAY = frozenset(level for level in LEVELS if level.endswith("offload"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How many times as much a larger micro-batch takes: of most things, and of those that grow
    with the square of a sequence's length. 1 for what is no larger, or not known."""

    linear: float = 1.0
    square: float = 1.0

    @classmethod
    def between(cls, known: BatchSize, wanted: BatchSize, margin: float = 1.0) -> Growth:
        """From a batch that was measured to another one; `margin` times as much."""

        def times(now: int, then: int) -> float:
            return now / then if now > then > 0 else 1.0

        linear = max(
            times(wanted.tokens, known.tokens),
            times(wanted.integers, known.integers),
            times(wanted.values, known.values),
        )
        longer = times(wanted.length, known.length)
        return cls(linear=margin * linear, square=margin * linear * longer)

    def of(self, nbytes: int, square_bytes: int = 0) -> int:
        """So many bytes, of which `square_bytes` grow with the square, in the larger batch."""
        return math.ceil((nbytes - square_bytes) * self.linear + square_bytes * self.square)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer in one micro-batch: seconds of forward, of attention's kernels in it, and of
    backward (without recomputation); and bytes of what it saves, of its inputs, and of what
    attention gave. `square_*` are the parts that grow with the square of a sequence's length: what
    attention without its own kernel saves, and its masks."""

    forward_s: float
    backward_s: float
    saved_bytes: int = 0
    boundary_bytes: int = 0
    attention_s: float = 0.0
    attention_bytes: int = 0
    square_saved_bytes: int = 0
    square_boundary_bytes: int = 0

    def grown(self, by: Growth) -> LayerWork:
        """The bytes of a larger micro-batch, in the same seconds."""
        return replace(
            self,
            saved_bytes=by.of(self.saved_bytes, self.square_saved_bytes),
            boundary_bytes=by.of(self.boundary_bytes, self.square_boundary_bytes),
            attention_bytes=by.of(self.attention_bytes),
            square_saved_bytes=by.of(self.square_saved_bytes, self.square_saved_bytes),
            square_boundary_bytes=by.of(self.square_boundary_bytes, self.square_boundary_bytes),
        )

    def recompute_s(self, level: str) -> float:
        """Seconds that backward computes again."""
        if level not in AGAIN:
            return 0.0
        return self.forward_s - (self.attention_s if level in ATTENTION else 0.0)

    def recomputed_bytes(self, level: str) -> int:
        """What that makes anew."""
        if level not in AGAIN:
            return 0
        return self.saved_bytes - (self.attention_bytes if level in ATTENTION else 0)

    def waiting_bytes(self, level: str) -> int:
        """What waits from forward to backward, on the device or the host."""
        if level not in AGAIN:
            return self.saved_bytes
        return self.boundary_bytes + (self.attention_bytes if level in ATTENTION else 0)

    def moved_bytes(self, level: str) -> int:
        """To the host, and back."""
        return self.waiting_bytes(level) if level in AWAY else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the planner is asked: of which states, budgets in bytes, and what the user pinned (None:
    derive)."""

    states: States  # of what the config's precision trains
    accumulate: bool
    all_formats: Formats = ()  # of the model's ranges; none: one, of `states`
    training: bool = True
    gpu_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    window: int | None = None
    prefetch: int | None = None
    resident_layers: int | None = None
    resident_updates: str | None = None  # "gpu" or "host": where resident layers are updated
    whole: bool | None = None  # None: where every layer stays on the gpu and is updated there
    activations: str | tuple[str, ...] | None = None  # one of LEVELS, or one per layer
    chunk: int | None = None  # sequences that go through a block together; None: all
    chunks: int = 1  # that a micro-batch has of them, where that is known
    streams: int = 1  # on which chunks take turns
    # What each layer keeps for backward; empty: unknown, and the gpu budget is for weights and
    # gradients alone.
    kept: tuple[LayerWork, ...] = ()
    sequences: int = 0  # of a micro-batch, with `tokens` in all of them; 0: unknown
    tokens: int = 0
    reserve_bytes: int = 0  # of the gpu budget that are activations' at least
    cpu_threads: int | None = None
    early_layers: int | None = None  # layers that are updated before the norm is known
    num_cores: int = 1
    nvme: bool = False  # whether there is such a tier
    nvme_capacity_bytes: int | None = None
    spill: str | None = None  # a word of `plan.DEPTHS`: all of it spills; None: what must
    homes: Homes | None = None  # what lies in files stays there
    piece_bytes: int | None = None
    micro_batches: int = 1
    searched: frozenset[str] = frozenset()  # what a search put in, not the user
    # Data-parallel ranks, each with its part of the host's arrays; every node has all weights.
    # `reduces_in_room`: sums over them need a buffer of the largest layer's gradients (on CPU
    # memory; NCCL adds in place).
    num_ranks: int = 1
    num_nodes: int = 1
    reduces_in_room: bool = False
    shares_weights: bool = False  # with other processes, in memory: they never spill

    @property
    def formats(self) -> Formats:
        """Of the ranges of the model's layers."""
        return self.all_formats or one_format(self.states)

    def why(self, key: str) -> str:
        """Where the value of a key comes from, for the plan's reasons."""
        return "the fastest, by simulation" if key in self.searched else f"stronghold.{key}"

    def pins(self, key: str) -> bool:
        """True if you set the key, and no search did."""
        return getattr(self, key) is not None and key not in self.searched

    def sharers(self, array: str) -> int:
        """How many ranks divide an array among them: all, or of the weights those of a node."""
        return self.num_ranks // self.num_nodes if array == "weights" else self.num_ranks

    @property
    def meets_others(self) -> bool:
        """Whether several ranks update together, each its part of the layers or of the model."""
        return self.num_ranks > 1 or self.shares_weights


WEIGHT_FETCHES = 2  # k: forward and backward
SUM_BYTES = 4  # of an accumulated gradient
MANY_PARAMETERS = (
    1 << 20
)  # parameters, whose bytes are whole numbers also where several have one item
UNCONTENDED_GBPS = 1e6  # of what was measured with its contention

COMPUTE = "compute"
MEMORY = "host memory bandwidth"
FETCH = "link host to device"
DRAIN = "link device to host"
DUPLEX = "link, both directions together"
DISK = "nvme"


# -- bytes ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one training step moves on one rank, whatever the schedule. Padding does not count, but
    in files.

    Bytes of weights: `streamed_bytes` cross the link, but for `window_bytes` of them that are still
    there when the direction turns; `refreshed_bytes` stay on the device but are updated on the
    host. `layer_bytes` are the largest streamed layer's. `trained_bytes` are the gradients of what
    is streamed and trains, `trained_parameters` of them. `step_bytes` are what the optimizer reads
    and writes on the host, `device_update_bytes` on the device. `offloaded_bytes` of activations
    leave and return in every micro-batch; `nvme_*` are of a step.
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

    @classmethod
    def of_parameters(
        cls,
        states: States,
        *,
        streamed: int = 0,
        trained: int = 0,
        refreshed: int = 0,
        window: int = 0,
        layer: int = 0,
        micro_batches: int = 1,
    ) -> Traffic:
        """Of a model of one format, by numbers of parameters: `trained` of the `streamed` ones have
        gradients, `refreshed` ones stay."""
        each, step = states.weight_bytes, states.update_bytes(states.dtype)
        return cls(
            micro_batches=micro_batches,
            streamed_bytes=each * streamed,
            window_bytes=each * window,
            refreshed_bytes=each * refreshed,
            layer_bytes=each * layer,
            trained_bytes=each * trained,
            trained_parameters=trained,
            update_bytes=int(step * (trained + refreshed)),
        )

    @property
    def fetch_bytes(self) -> int:
        """Host to device: weights k n times, without those in the window at each turn between
        forward and backward but with them after an update, which changed them; once what was
        updated away from where it stays; and activations that come back."""
        passes = WEIGHT_FETCHES * self.micro_batches
        loaded = passes * self.streamed_bytes - (passes - 1) * self.window_bytes
        return loaded + self.refreshed_bytes + self.micro_batches * self.offloaded_bytes

    @property
    def drain_bytes(self) -> int:
        """Device to host: gradients of streamed layers in every micro-batch (their slots are needed
        for the next layer), of those that stay at least once; and activations that leave."""
        drained = self.micro_batches * self.trained_bytes + self.refreshed_bytes
        return drained + self.micro_batches * self.offloaded_bytes

    @property
    def norm_bytes(self) -> int:
        """What the norms of the gradients read on the host."""
        return self.trained_bytes + self.refreshed_bytes

    @property
    def sum_bytes(self) -> int:
        """Sums over micro-batches: the first gradient starts a sum (read e, write 4), each further
        one is added (read e and 4, write 4), and the last is read by the step beside the sum."""
        each = self.trained_bytes + 2 * SUM_BYTES * self.trained_parameters
        return (self.micro_batches - 1) * each

    @property
    def memory_bytes(self) -> int:
        """Host memory: the optimizer, and every transfer's end there, the disk's too."""
        moved = self.fetch_bytes + self.drain_bytes + self.nvme_read_bytes + self.nvme_written_bytes
        return self.update_bytes + self.sum_bytes + moved


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
    """What a step moves on one rank when these layers stay (what is no block stays anyway), and
    those in `on_gpu` are updated there; `nvme` is read and written."""
    formats, num_ranks = demand.formats, demand.num_ranks
    streamed = [layer for layer in layout.layers if layer.streamed and layer.index not in resident]
    away = {layer.index for layer in streamed}
    staying = [layer for layer in layout.layers if layer.index not in away | on_gpu]
    sharers = demand.sharers("weights")
    largest = sorted(weight_bytes(layer, formats) // sharers for layer in streamed)[::-1]
    on_host = [*streamed, *staying]
    return Traffic(
        micro_batches=demand.micro_batches,
        streamed_bytes=sum(largest),
        window_bytes=sum(largest[:window]),
        refreshed_bytes=sum(trained_bytes(e, formats) for e in staying) // num_ranks,
        layer_bytes=next(iter(largest), 0),
        trained_bytes=sum(trained_bytes(e, formats) for e in streamed) // num_ranks,
        trained_parameters=sum(e.num_trainable for e in streamed) // num_ranks,
        update_bytes=int(sum(step_bytes(e, formats) for e in on_host) / num_ranks),
        device_update_bytes=int(
            sum(step_bytes(e, formats) for e in layout.layers if e.index in on_gpu)
        ),
        offloaded_bytes=offloaded_bytes,
        nvme_read_bytes=nvme[0],
        nvme_written_bytes=nvme[1],
    )


def weight_bytes(layer: LayerLayout, formats: Formats) -> int:
    """Of the layer's weights, without padding."""
    return sum(each.num_parameters * formats[each.format].dtype.itemsize for each in layer.ranges)


def trained_bytes(layer: LayerLayout, formats: Formats) -> int:
    """Of those weights that train, and so of their gradients."""
    return sum(
        each.num_parameters * formats[each.format].dtype.itemsize for each in layer.trainable_ranges
    )


def step_bytes(layer: LayerLayout, formats: Formats) -> float:
    """What a step of the layer reads and writes, with gradients of the weights' dtypes."""
    return sum(
        each.num_parameters * made.trained.update_bytes(made.dtype)
        for each in layer.trainable_ranges
        for made in (formats[each.format],)
    )


# -- limits ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`seconds` no step can beat; `bound` is the part that sets them, `parts` the seconds of every
    resource, `fill_s` what one layer's way in and out adds."""

    seconds: float
    bound: str
    parts: dict[str, float]
    fill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Tokens from which compute takes longer than the optimizer (`cpu`, per step) and than the
    weights' way to the GPU (`link`, per micro-batch), whatever the size of the model."""

    cpu: float
    link: float


def physical_limit(
    traffic: Traffic,
    machine: MachineProfile,
    dtype: str,
    *,
    forward_flops: float,
    recomputed_flops: float = 0.0,
    staying_flops: float = 0.0,
) -> Limits:
    """The lower bound of a step's time ([Note: formula]): the busiest resource if it never waited.
    FLOPs are of one micro-batch's forward: of the model, of what backward computes again, and of
    the layers that never leave the device. Backward computes twice what forward does."""
    rate, link = machine.flops[dtype], traffic.fetch_bytes + traffic.drain_bytes
    parts = {
        COMPUTE: traffic.micro_batches * (3.0 * forward_flops + recomputed_flops) / rate,
        FETCH: traffic.fetch_bytes / (machine.fetch_gbps * 1e9),
        DRAIN: traffic.drain_bytes / (machine.drain_gbps * 1e9),
        DUPLEX: link / (machine.duplex_gbps * 1e9),
        MEMORY: traffic.memory_bytes / (max(machine.memory_gbps.values()) * 1e9),
        DISK: _disk_s(traffic, machine),
    }
    layer_bytes = traffic.layer_bytes
    drained = layer_bytes if traffic.trained_bytes else 0
    way_s = (layer_bytes / machine.fetch_gbps + drained / machine.drain_gbps) / 1e9
    fill_s = max(0.0, way_s - 3.0 * staying_flops / rate)
    bound = max(parts, key=lambda name: parts[name])
    return Limits(seconds=parts[bound] + fill_s, bound=bound, parts=parts, fill_s=fill_s)


def _disk_s(traffic: Traffic, machine: MachineProfile) -> float:
    """Reads and writes at their own rates, and both together at the mixed one; infinite where the
    profile has no disk."""
    reads, writes = traffic.nvme_read_bytes, traffic.nvme_written_bytes
    if not reads + writes:
        return 0.0
    if machine.nvme_read_gbps is None or machine.nvme_write_gbps is None:
        return float("inf")
    apart = max(reads / machine.nvme_read_gbps, writes / machine.nvme_write_gbps)
    mixed = machine.nvme_mixed_gbps
    return max(apart, (reads + writes) / mixed if mixed else 0.0) / 1e9


def break_even(
    machine: MachineProfile,
    dtype: str,
    states: States,
    *,
    recompute: bool,
    active_share: float = 1.0,
) -> BreakEven:
    """Tokens at which the terms of [Note: formula] are equal, without attention:
    q F / ((6 + 2 r) a M) and k e F / ((6 + 2 r) a B).

    a is `active_share`: one token computes with that share of the streamed parameters. It is 1 in a
    dense model, and small in a model of experts, where all parameters move and few compute.
    """
    rate = machine.flops[dtype] / ((8.0 if recompute else 6.0) * active_share)
    memory = max(machine.memory_gbps.values()) * 1e9
    return BreakEven(
        cpu=bytes_per_parameter(states) * rate / memory,
        link=WEIGHT_FETCHES * states.weight_bytes * rate / (machine.fetch_gbps * 1e9),
    )


def bytes_per_parameter(states: States, micro_batches: int = 1) -> float:
    """q: bytes of host memory that a step of a trained, streamed parameter reads and writes. With
    two moments: 32 in bf16, 26 of them the optimizer's, and 18.25 with lean states; 36 in fp16,
    where weight and whole fp32 master are both read and written."""
    moved = Traffic.of_parameters(
        states, streamed=MANY_PARAMETERS, trained=MANY_PARAMETERS, micro_batches=micro_batches
    )
    return moved.memory_bytes / MANY_PARAMETERS


# -- seconds --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step computes: `layers` in the layout's order, for each of `micro_batches`."""

    layers: tuple[LayerWork, ...]
    micro_batches: int = 1

    @property
    def forward_s(self) -> float:
        """Of the model, in one micro-batch."""
        return sum(layer.forward_s for layer in self.layers)

    def together(self) -> Workload:
        """All micro-batches as one."""
        count = self.micro_batches
        loads = ({k: count * v for k, v in asdict(load).items()} for load in self.layers)
        return Workload(layers=tuple(LayerWork(**load) for load in loads))

    def backward_s(self, activations: Sequence[str]) -> float:
        """With what is computed again under these policies."""
        levels = zip(self.layers, activations, strict=True)
        return sum(layer.backward_s + layer.recompute_s(level) for layer, level in levels)


def attention_s(
    layer: LayerCost, costs: ModelCosts, machine: MachineProfile
) -> tuple[float, float]:
    """Seconds of a layer's fused attention in forward, and in backward."""
    return machine.attention_s(
        costs.dtype,
        tokens=costs.seq,
        width=layer.head_width,
        causal_flops=layer.causal_flops,
        other_flops=layer.attention_flops - layer.causal_flops,
    )


def workload_of(costs: ModelCosts, machine: MachineProfile, *, micro_batches: int = 1) -> Workload:
    """The seconds that `machine` needs for `costs`: products at its rate of matrix multiplication,
    fused attention at its rates, other operators at that of device memory, one kernel after the
    other. Backward computes twice what forward does, and moves twice as much (1.6 to 2.6 times in
    blocks of eight families of models, of a Llama 2.2). Outside the blocks (norm, head, loss) one
    layer after the other has most in passing while everything else is kept: the most of them
    counts, once."""
    flops, layers = machine.flops[costs.dtype], costs.layers
    outside = [layer for layer in layers if not layer.boundary_bytes]
    largest = max(outside, key=lambda layer: layer.passing_bytes, default=None)
    loads = []
    for layer in layers:
        attention_forward_s, attention_backward_s = attention_s(layer, costs, machine)
        products_s = (layer.forward_flops - layer.attention_flops) / flops
        operators_s = layer.operator_bytes / (machine.gpu_memory_gbps * 1e9)
        load = LayerWork(
            forward_s=products_s + attention_forward_s + operators_s,
            backward_s=2 * products_s + attention_backward_s + 2 * operators_s,
            saved_bytes=layer.saved_bytes + (layer.passing_bytes if layer is largest else 0),
            boundary_bytes=layer.boundary_bytes,
            attention_s=attention_forward_s,
            attention_bytes=layer.attention_bytes,
        )
        loads.append(load)
    return Workload(layers=tuple(loads), micro_batches=micro_batches)


# -- what the first steps showed ------------------------------------------------------------------
def measured_workload(
    spans: Iterable[Span],
    layout: ModelLayout,
    *,
    activations: Sequence[str],
    micro_batches: int,
    num_steps: int,
    saved_bytes: Sequence[int] = (),
    boundary_bytes: Sequence[int] = (),
    attended: Sequence[tuple[int, float, int]] = (),
    square_saved_bytes: Sequence[int] = (),
    square_boundary_bytes: Sequence[int] = (),
) -> Workload:
    """Each layer's seconds in the compute spans "forward i" and "backward i" of `num_steps`.

    `activations` are the policies under which they were recorded: a recomputed layer's backward
    span contains its forward. What runs between two layers' uses (head, loss and their backward)
    is in the span of the layer before. Bytes per layer may be empty: nothing is offloaded.
    `attended`: by layer bytes, FLOPs and tokens of attention's kernels. Their part of a forward is
    that of its FLOPs, of which each parameter has two a token.
    """
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.lane == "compute":
            seconds[span.name] += span.duration_s / (num_steps * micro_batches)
    loads = []
    for layer, policy in zip(layout.layers, activations, strict=True):
        forward_s = seconds[f"forward {layer.index}"]
        backward_s = seconds[f"backward {layer.index}"]
        nbytes, flops, rows = attended[layer.index] if attended else (0, 0.0, 0)
        part = flops / (flops + 2.0 * layer.num_parameters * rows) if flops else 0.0
        load = LayerWork(
            forward_s=forward_s,
            backward_s=backward_s,
            saved_bytes=saved_bytes[layer.index] if saved_bytes else 0,
            boundary_bytes=boundary_bytes[layer.index] if boundary_bytes else 0,
            square_saved_bytes=square_saved_bytes[layer.index] if square_saved_bytes else 0,
            square_boundary_bytes=square_boundary_bytes[layer.index]
            if square_boundary_bytes
            else 0,
            attention_s=part * forward_s,
            attention_bytes=nbytes,
        )
        loads.append(replace(load, backward_s=max(0.0, backward_s - load.recompute_s(policy))))
    return Workload(layers=tuple(loads), micro_batches=micro_batches)


def measured_rates(spans: Iterable[Span], otherwise: Rates) -> Rates:
    """The rate of each lane in the spans, of one that moved nothing that of `otherwise`. Contention
    is in what was measured in place: lanes that share a resource are not charged for it again."""
    nbytes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if "nbytes" in span.args:
            nbytes[span.lane] += span.args["nbytes"]
            seconds[span.lane] += span.duration_s
    lanes = ("fetch", "drain", "update", "load", "spill", "gather", "reduce", "exchange")
    fields_of = {lane: f"{'wire' if lane == 'gather' else lane}_gbps" for lane in lanes}
    found = {
        fields_of[lane]: nbytes[lane] / seconds[lane] * 1e-9 for lane in lanes if seconds[lane] > 0
    }
    known = replace(otherwise, memory_gbps=UNCONTENDED_GBPS, **found)
    duplex, disk = known.fetch_gbps + known.drain_gbps, known.load_gbps + known.spill_gbps
    return replace(known, duplex_gbps=duplex, io_gbps=disk)


def slowest(found: Sequence[tuple[Rates, Workload]]) -> tuple[Rates, Workload]:
    """What several ranks showed, as one: each lane's least rate, each layer's most seconds and
    bytes. Of the lanes that meet other ranks the most, since their spans contain the waiting."""
    rates, workloads = [rates for rates, _ in found], [workload for _, workload in found]
    wires = ("wire_gbps", "reduce_gbps", "exchange_gbps")
    lanes = {
        field.name: (max if field.name in wires else min)(getattr(r, field.name) for r in rates)
        for field in fields(Rates)
    }
    loads = tuple(
        LayerWork(**{f.name: max(getattr(e, f.name) for e in of_layer) for f in fields(LayerWork)})
        for of_layer in zip(*(workload.layers for workload in workloads), strict=True)
    )
    return Rates(**lanes), replace(workloads[0], layers=loads)
