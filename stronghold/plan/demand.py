"""What the planner is asked: pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stronghold.states import EXACT, Kind

# What happens to what autograd saves of a block, by name: it stays, or goes to the host and comes
# back; or it is computed again from the block's inputs, which stay or wait on the host; and with
# them what attention gave, which is then not computed twice.
LEVELS = (
    "keep",
    "offload",
    "attention",
    "attention_offload",
    "recompute",
    "recompute_offload",
)
AGAIN = frozenset(LEVELS[2:])  # run twice
ATTENTION = frozenset(LEVELS[2:4])
AWAY = frozenset(level for level in LEVELS if level.endswith("offload"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One layer in one micro-batch: seconds of forward, of attention's kernels in it, and of
    backward (without recomputation); and bytes of what it saves, of its inputs, and of what
    attention gave."""

    forward_s: float
    backward_s: float
    saved_bytes: int = 0
    boundary_bytes: int = 0
    attention_s: float = 0.0
    attention_bytes: int = 0

    def again_s(self, level: str) -> float:
        """Seconds that backward computes again."""
        if level not in AGAIN:
            return 0.0
        return self.forward_s - (self.attention_s if level in ATTENTION else 0.0)

    def again_bytes(self, level: str) -> int:
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


class Gradients(Enum):
    """Where gradients wait on the host between their drain and the update."""

    RING = "ring"  # updated as they come
    HELD = "held"  # every layer's, until the gate: norm, overflow or several ranks decide over all
    ACCUMULATED = "accumulated"  # fp32 sums over micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the planner is asked: element sizes in bytes, budgets in bytes, and what the user pinned
    (None: derive)."""

    weight_bytes: int
    low_bytes: int
    states: Kind = EXACT  # a word of `stronghold.states`
    gated: bool
    accumulate: bool
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
    kept: tuple[LayerLoad, ...] = ()
    reserve_bytes: int = 0  # of the gpu budget that are activations' at least
    cpu_threads: int | None = None
    deferred_layers: int | None = None  # blocks that are updated while the next forward runs
    num_cores: int = 1
    nvme: bool = False  # whether there is such a tier
    nvme_capacity_bytes: int | None = None
    spill: str | None = None  # a word of `plan.DEPTHS`: all of it spills; None: what must
    spilled: tuple[frozenset[str], ...] | None = None  # by layer: what lies in files, and stays
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

    def why(self, key: str) -> str:
        """Where the value of a key comes from, for the plan's reasons."""
        return "the fastest, by simulation" if key in self.searched else f"stronghold.{key}"

    def sharers(self, array: str) -> int:
        """How many ranks divide an array among them: all, or of the weights those of a node."""
        return self.num_ranks // self.num_nodes if array == "weights" else self.num_ranks

    @property
    def gradients(self) -> Gradients:
        """What the micro-batches, the gate and other ranks ask of gradients."""
        if self.accumulate:
            return Gradients.ACCUMULATED
        return Gradients.HELD if self.gated or self.meets_others else Gradients.RING

    @property
    def meets_others(self) -> bool:
        """Whether several ranks update together, each its part of the layers or of the model."""
        return self.num_ranks > 1 or self.shares_weights
