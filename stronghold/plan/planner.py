"""The plan: where each layer's bytes live and how many slots there are.

Pure: no tensors, no threads. Made from sizes and budgets when the engine is, and again from what
the first steps have shown (`refine`); printed with its reasons. The byte counts are the formula
that `memory.window` and `memory.host` must meet exactly (a test compares them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.plan.demand import Demand as Demand
from stronghold.plan.demand import Gradients as Gradients
from stronghold.plan.host_tier import RING_ENTRIES as RING_ENTRIES
from stronghold.plan.host_tier import plan_host
from stronghold.plan.places import Places, place, policies_of
from stronghold.plan.spills import Spilled, Staging

DEFAULT_WINDOW = 4  # without a budget: one computes, one is still in use, two are on their way
MIB = float(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run. `gpu_bytes` and `host_bytes` name every part of each tier's peak, activations
    excepted: `activation_bytes` are theirs on the gpu, 0 where they are not known.

    Layers in `updated_on_gpu`, which are resident, have their masters, moments and sums there too,
    and nothing on the host. `whole`: every layer is one of them, and nothing stands on the model's
    path: no hooks, no slots, no copies.
    """

    window: int
    prefetch: int
    resident: frozenset[int]
    updated_on_gpu: frozenset[int]
    whole: bool
    own_gradients: frozenset[int]  # layers that gather gradients in a slot of their own
    gradient_slots: int
    gradients: Gradients
    ring_entries: int
    deferred: frozenset[int]  # layers updated after backward, where others are as gradients come
    activations: tuple[str, ...]  # by layer; what is no block keeps its own
    cpu_threads: int
    gpu_bytes: dict[str, int]
    host_bytes: dict[str, int]
    num_parameters: int
    activation_bytes: int
    offloaded_bytes: int  # of activations that wait on the host, 0 where they are not known
    recomputed: float  # share of the parameters whose forward runs again in backward
    reasons: tuple[str, ...]
    spilled: Spilled = ()  # by layer, the arrays that lie in files
    staging: Staging = field(default_factory=Staging)
    nvme_bytes: dict[str, int] = field(default_factory=dict)
    nvme_read_bytes: int = 0  # in a step
    nvme_written_bytes: int = 0
    num_ranks: int = 1  # bytes are of each
    num_nodes: int = 1

    @property
    def gpu_total_bytes(self) -> int:
        return sum(self.gpu_bytes.values())

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())

    @property
    def nvme_total_bytes(self) -> int:
        return sum(self.nvme_bytes.values())

    def __str__(self) -> str:
        ranks = f" x {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        if self.num_nodes > 1:
            ranks += f" on {self.num_nodes} nodes, each with the weights"

        def table(title: str, parts: dict[str, int]) -> list[str]:
            total = sum(parts.values())
            each = total / max(1, self.num_parameters)
            return [
                f"  {title:<5}{total / MIB:>12.2f} MiB = {each:.2f} bytes/parameter{ranks}",
                *(f"    {name:<24}{size / MIB:>10.2f} MiB" for name, size in parts.items() if size),
            ]

        return "\n".join(
            ["stronghold plan"]
            + [f"  {reason}" for reason in self.reasons]
            + table("gpu", self.gpu_bytes | {"activations": self.activation_bytes})
            + table("host", self.host_bytes | {"offloaded activations": self.offloaded_bytes})
            + ([*table("nvme", self.nvme_bytes), f"  {self.wear()}"] if self.nvme_bytes else [])
        )

    def wear(self, step_s: float | None = None) -> str:
        """Bytes that a step reads from NVMe and writes to it; per hour too where a step takes
        `step_s`.
        """
        line = (
            f"nvme, per step: {self.nvme_read_bytes / MIB:.2f} MiB read, "
            f"{self.nvme_written_bytes / MIB:.2f} MiB written"
        )
        if not step_s:
            return line
        hourly = self.nvme_written_bytes * 3600.0 / step_s
        return f"{line}; {hourly / 1e12:.3f} TB written per hour of such steps ({step_s:.2f} s)"


def make_plan(layout: ModelLayout, demand: Demand) -> Plan:
    """The plan for `layout`; BudgetError, before anything is allocated, when it cannot fit."""
    reasons: list[str] = []
    places = place(layout, demand, reasons)
    activations = policies_of(layout, demand)
    kept_bytes = activation_bytes(layout, activations, demand)

    def gpu_total(window: int, gradient_slots: int) -> int:
        return max(kept_bytes, demand.reserve_bytes) + sum(
            places.gpu_bytes(window, gradient_slots).values()
        )

    most_gradients = places.most_gradient_slots
    num_streamed = len(places.streamed)
    window, gradient_slots, reason = _slots(num_streamed, most_gradients, gpu_total, demand)
    reasons.append(reason)
    prefetch = _prefetch(window, num_streamed, most_gradients, gpu_total, demand)
    threads = demand.cpu_threads or max(1, demand.num_cores)
    reasons.append(
        f"activations: {_in_words(activations, places.blocks)}; {threads} update threads; "
        f"gradients: {places.gradients.value}"
    )
    offloaded = offloaded_bytes(activations, demand)
    host = plan_host(
        places.on_host,
        places.gradients,
        demand,
        reasons,
        offloaded_bytes=offloaded,
        deferrable=_deferrable(places, demand),
    )
    reasons += _deferred_in_words(places, demand, host.deferred)
    return Plan(
        window=window,
        prefetch=prefetch,
        resident=places.resident,
        updated_on_gpu=frozenset(layer.index for layer in places.on_gpu),
        whole=places.whole,
        own_gradients=frozenset(layer.index for layer in places.alone),
        gradient_slots=gradient_slots,
        gradients=places.gradients,
        ring_entries=host.ring_entries,
        deferred=host.deferred,
        activations=activations,
        cpu_threads=threads,
        gpu_bytes=places.gpu_bytes(window, gradient_slots),
        host_bytes=host.host_bytes,
        num_parameters=layout.num_parameters,
        activation_bytes=kept_bytes,
        offloaded_bytes=offloaded,
        recomputed=_recomputed(layout, activations),
        reasons=tuple(reasons),
        spilled=host.spilled,
        staging=host.staging,
        nvme_bytes=host.nvme_bytes,
        nvme_read_bytes=host.nvme_read_bytes,
        nvme_written_bytes=host.nvme_written_bytes,
        num_ranks=demand.num_ranks,
        num_nodes=demand.num_nodes,
    )


def _deferrable(places: Places, demand: Demand) -> list[LayerLayout]:
    """Blocks whose updates may wait for the next forward ([Note: deferred updates])."""
    count = demand.deferred_layers or 0
    if count > len(places.blocks):
        raise ConfigError(
            f"stronghold.deferred_layers: got {count}, but the model has {len(places.blocks)} "
            "blocks"
        )
    early = demand.training and places.gradients is Gradients.RING
    on_host = {layer.index for layer in places.on_host} if count and early else set()
    return [layer for layer in places.blocks if layer.index in on_host]


def _deferred_in_words(places: Places, demand: Demand, deferred: frozenset[int]) -> list[str]:
    if not demand.deferred_layers:
        return []
    why = demand.why("deferred_layers")
    if places.gradients is not Gradients.RING:
        return [f"no block's update is deferred ({why}): all wait for the end of the step"]
    numel = sum(layer.trainable_numel for layer in places.blocks if layer.index in deferred)
    numel //= demand.num_ranks
    return [
        f"{len(deferred)} of {len(places.blocks)} blocks are updated while the next forward runs, "
        f"their gradients held until then: {numel * demand.weight_bytes / MIB:.2f} MiB ({why})"
    ]


def activation_bytes(layout: ModelLayout, activations: tuple[str, ...], demand: Demand) -> int:
    """Bytes of activations on the gpu when forward has ended and backward begins.

    What is kept, the inputs of what is recomputed, and beside them the largest of: what the layers
    outside the blocks keep (the head's logits go first), what one recomputation makes anew, two
    offloaded layers on their way.
    """
    if not demand.saved_bytes:
        return 0
    saved, boundary = demand.saved_bytes, demand.boundary_bytes
    blocks = [layer.index for layer in layout.layers if layer.streamed]
    by_policy = {
        policy: [index for index in blocks if activations[index] == policy]
        for policy in ("keep", "recompute", "offload")
    }
    outside = sum(saved[layer.index] for layer in layout.layers if not layer.streamed)
    passing = max(
        outside,
        max((saved[index] for index in by_policy["recompute"]), default=0),
        2 * max((saved[index] for index in by_policy["offload"]), default=0),
    )
    kept = sum(saved[index] for index in by_policy["keep"])
    return kept + sum(boundary[index] for index in by_policy["recompute"]) + passing


def offloaded_bytes(activations: tuple[str, ...], demand: Demand) -> int:
    """Bytes of activations that wait on the host while backward begins."""
    if not demand.saved_bytes:
        return 0
    return sum(
        saved
        for saved, policy in zip(demand.saved_bytes, activations, strict=True)
        if policy == "offload"
    )


def _in_words(activations: tuple[str, ...], blocks: list[LayerLayout]) -> str:
    """ "keep", or "keep 3, recompute 5" where blocks differ."""
    counts = Counter(activations[layer.index] for layer in blocks)
    if len(counts) < 2:
        return next(iter(counts), "keep")
    return ", ".join(f"{policy} {count}" for policy, count in sorted(counts.items()))


def _recomputed(layout: ModelLayout, activations: tuple[str, ...]) -> float:
    again = sum(
        layer.num_parameters
        for layer, policy in zip(layout.layers, activations, strict=True)
        if policy == "recompute"
    )
    return again / max(1, layout.num_parameters)


def _slots(
    num_streamed: int, most_gradients: int, total: Callable[[int, int], int], demand: Demand
) -> tuple[int, int, str]:
    """Number of weight slots and gradient slots, and why. `total(window, gradient_slots)` are the
    bytes on the gpu; `most_gradients` is 0 when no streamed layer trains."""
    if demand.window is not None and demand.window < 1:
        raise ConfigError(f"stronghold.window: got {demand.window}, expected at least 1 slot")
    budget = demand.gpu_budget_bytes
    if budget is None:
        wanted = demand.window or max(DEFAULT_WINDOW, 1 + (demand.prefetch or 0))
        window = min(wanted, num_streamed)
        why = demand.why("window") if demand.window else "no gpu budget"
        return window, most_gradients, f"window: {window} slots ({why})"
    fewest_gradients = min(1, most_gradients)
    if demand.window is not None:
        window = min(demand.window, num_streamed)
        need = total(window, fewest_gradients)
        if need > budget:
            raise BudgetError(
                f"stronghold.gpu_memory: got {budget} bytes, but stronghold.window of {window} "
                f"slots needs {need}; raise gpu_memory to at least {need}, or leave window out, "
                f"with which {total(min(1, num_streamed), fewest_gradients)} bytes suffice"
            )
        fit = (count for count in range(most_gradients, 0, -1) if total(window, count) <= budget)
        return window, next(fit, 0), f"window: {window} slots ({demand.why('window')})"
    window = min(1, num_streamed)
    smallest = total(window, fewest_gradients)
    if smallest > budget:
        raise BudgetError(
            f"stronghold.gpu_memory: got {budget} bytes, but the smallest window needs {smallest}: "
            "one weight slot and one gradient slot of the largest layer, beside "
            f"{total(0, 0)} bytes of what stays on the gpu; raise gpu_memory to at least {smallest}"
            + (", or lower stronghold.resident_layers" if demand.resident_layers else "")
            + (
                ', or set stronghold.resident_updates to "host"'
                if demand.resident_updates == "gpu"
                else ""
            )
        )
    # A second gradient slot lets a drain overlap the next backward: worth more than a third
    # weight slot.
    fits = total(min(2, num_streamed), most_gradients) <= budget
    gradient_slots = most_gradients if fits else fewest_gradients
    while window < num_streamed and total(window + 1, gradient_slots) <= budget:
        window += 1
    why = f"the most that {budget / MIB:.2f} MiB hold (stronghold.gpu_memory)"
    return window, gradient_slots, f"window: {window} slots, {why}"


def _prefetch(
    window: int,
    num_streamed: int,
    most_gradients: int,
    total: Callable[[int, int], int],
    demand: Demand,
) -> int:
    """How many layers are fetched ahead; one slot of the window holds the layer that computes."""
    most = max(0, window - 1)
    wanted = most if demand.prefetch is None else demand.prefetch
    if wanted <= most or window == num_streamed:  # there are no more layers to fetch ahead
        return min(wanted, most)
    if demand.window is not None:
        remedy = f"stronghold.window to {wanted + 1}"
    else:
        need = total(min(wanted + 1, num_streamed), most_gradients)
        remedy = f"stronghold.gpu_memory to {need} bytes"
    raise ConfigError(
        f"stronghold.prefetch: got {wanted}, expected less than the window of {window} slots, one "
        f"of which holds the layer that computes; lower prefetch to {most} or raise {remedy}"
    )
