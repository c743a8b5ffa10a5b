"""The plan: where every layer's bytes lie, the number of slots, and the arrays that spill.

Pure: no tensors, no threads. Made from sizes and budgets, and printed with its reasons. `memory`
has the places of layers, and the bytes of every tier.

[Note: no blocks]

1. A model without repeated blocks has no layer that could leave the device to make room.
2. If its state fits on the device too, and the demand leaves that open, it is updated there.
3. Else its state is on the host, and its weights alone stay on the device.
4. There is no block to call in chunks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from stronghold.errors import BudgetError
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import AGAIN, Demand, Traffic, traffic_of
from stronghold.plan.memory import SUM_BUFFERS, HostMemory, Places, Spilled, Staging, choose_slots

MIB = float(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planner's decisions for one model, with their reasons.

    All bytes are those of one rank. `gpu_bytes`, `host_bytes` and `nvme_bytes` name every item of a
    tier's peak but activations.
    """

    demand: Demand  # the planner's input
    window: int  # slots for weights
    resident: frozenset[int]  # layers whose weights never leave the gpu
    updated_on_gpu: frozenset[int]  # layers whose arrays are all on the gpu, which updates them
    # by layer, its arrays that lie in files, in this order. All others are in host memory
    in_files: tuple[tuple[str, ...], ...]
    # layers with a gradient slot that no other layer uses
    own_gradients: frozenset[int]
    gradient_slots: int  # slots that all other layers share
    ring_entries: int
    trained: frozenset[int]  # layers that are updated
    early: frozenset[int]  # of them, before the norm is known. They have their arrays twice
    # the level of each layer; a layer that is no block has "keep"
    activations: tuple[str, ...]
    cpu_threads: int
    gpu_bytes: dict[str, int]
    host_bytes: dict[str, int]
    num_parameters: int
    activation_bytes: int  # on the gpu; 0 if unknown
    offloaded_bytes: int  # activations on the host; 0 if unknown
    recomputed: float  # share of the parameters whose forward runs again in backward
    reasons: tuple[str, ...]
    traffic: Traffic
    staging: Staging = field(default_factory=Staging)
    nvme_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """True if gradients wait as fp32 sums over micro-batches."""
        return self.demand.accumulate

    @property
    def gpu_total_bytes(self) -> int:
        return sum(self.gpu_bytes.values())

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())

    @property
    def nvme_total_bytes(self) -> int:
        """Bytes of the files that the run makes."""
        return sum(self.nvme_bytes.values())

    def __str__(self) -> str:
        demand, num_parameters = self.demand, self.num_parameters
        ranks = f" x {demand.num_ranks} ranks" if demand.num_ranks > 1 else ""
        if demand.num_nodes > 1:
            ranks += f" on {demand.num_nodes} nodes, each with the weights"

        gpu = self.gpu_bytes | {"activations": self.activation_bytes}
        host = self.host_bytes | {"offloaded activations": self.offloaded_bytes}
        lines = ["stronghold plan", *(f"  {reason}" for reason in self.reasons)]
        lines += _table("gpu", gpu, num_parameters, ranks)
        lines += _table("host", host, num_parameters, ranks)
        if self.nvme_bytes:
            lines += _table("nvme", self.nvme_bytes, num_parameters, ranks)
            lines.append(f"  {self.wear()}")
        return "\n".join(lines)

    def wear(self, step_s: float | None = None) -> str:
        """A line with the bytes that a step reads from NVMe and writes to it.

        `step_s`: the seconds of a step. With it the line also has the bytes written per hour.
        """
        read = self.traffic.nvme_read_bytes
        written = self.traffic.nvme_written_bytes
        line = f"nvme, per step: {read / MIB:.2f} MiB read, {written / MIB:.2f} MiB written"
        if not step_s:
            return line
        hourly = written * 3600.0 / step_s
        return f"{line}; {hourly / 1e12:.3f} TB written per hour of such steps ({step_s:.2f} s)"


def _table(title: str, parts: dict[str, int], num_parameters: int, ranks: str) -> list[str]:
    """The lines for one tier: its bytes in all, and those of its parts."""
    total = sum(parts.values())
    per_parameter = total / max(1, num_parameters)
    return [
        f"  {title:<5}{total / MIB:>12.2f} MiB = {per_parameter:.2f} bytes/parameter{ranks}",
        *(f"    {name:<24}{size / MIB:>10.2f} MiB" for name, size in parts.items() if size),
    ]


def make_plan(layout: ModelLayout, demand: Demand) -> Plan:
    """Make the plan for `layout`.

    BudgetError, before anything is allocated, if no plan fits. ConfigError for settings that the
    model does not have.
    """
    if not layout.streamed:  # [Note: no blocks]
        demand = replace(demand, chunk=None, chunks=1, streams=1)
        if demand.resident_updates is None and demand.spill is None:
            with contextlib.suppress(BudgetError):
                return _make_plan(layout, replace(demand, resident_updates="gpu"))
    return _make_plan(layout, demand)


def _make_plan(layout: ModelLayout, demand: Demand) -> Plan:
    places = Places(layout, demand)
    window, gradient_slots, why_window = choose_slots(places)
    host = HostMemory(places)
    activations = places.activations
    threads = demand.cpu_threads or max(1, demand.num_cores)
    recomputed = (layer for layer in layout.layers if activations[layer.index] in AGAIN)
    return Plan(
        demand=demand,
        window=window,
        resident=places.resident,
        updated_on_gpu=places.updated_on_gpu,
        in_files=_in_files(layout, host.spilled),
        own_gradients=frozenset(layer.index for layer in places.own_slots),
        gradient_slots=gradient_slots,
        ring_entries=SUM_BUFFERS if host.ring_bytes else 0,
        trained=frozenset(layer.index for layer in layout.layers if layer.states),
        early=host.early,
        activations=activations,
        cpu_threads=threads,
        gpu_bytes=places.gpu_parts(window, gradient_slots),
        host_bytes=host.host_bytes,
        num_parameters=layout.num_parameters,
        activation_bytes=places.activation_bytes,
        offloaded_bytes=places.offloaded_bytes,
        recomputed=sum(x.num_parameters for x in recomputed) / max(1, layout.num_parameters),
        reasons=(
            *_place_reasons(places, f"window: {window} slots ({why_window})", threads),
            *host.reasons(),
        ),
        traffic=traffic_of(
            layout,
            demand,
            resident=places.resident,
            on_gpu=places.updated_on_gpu,
            window=window,
            offloaded_bytes=places.offloaded_bytes,
            nvme=host.file_traffic,
        ),
        staging=host.staging,
        nvme_bytes=host.nvme_bytes,
    )


def _in_files(layout: ModelLayout, spilled: Spilled) -> tuple[tuple[str, ...], ...]:
    """The arrays of each layer that lie in files, in their order there."""
    return tuple(
        tuple(array for array in (*layout.moments, "low", "weights") if array in spilled[k])
        for k in range(len(layout.layers))
    )


def _place_reasons(places: Places, slots: str, threads: int) -> Iterator[str]:
    """Sentences about residents, slots, activations and states, for the plan's reasons."""
    demand, num_blocks = places.demand, places.num_blocks
    if places.kept:
        why = demand.why("resident_layers")
        yield f"{len(places.kept)} of {num_blocks} blocks stay on the gpu ({why})"
    if places.on_gpu:
        why = demand.why("resident_updates")
        yield f"resident layers are updated on the gpu ({why})"
    if places.streamed:
        yield slots
    counts = Counter(places.activations[index] for index in places.layout.streamed)
    levels = next(iter(counts), "keep")
    if len(counts) > 1:
        levels = ", ".join(f"{level} {count}" for level, count in sorted(counts.items()))
        if "activations" in demand.by_rule:
            levels += f" ({demand.why('activations')})"
    gradients = "accumulated" if demand.accumulate else "pending until the clip barrier"
    yield f"activations: {levels}; {threads} update threads; gradients: {gradients}"
    if demand.states.is_lean:
        stays = any(layer.index in places.resident for layer in places.on_host)
        where = "; what stays on the gpu is updated on the host" if stays else ""
        yield f"states: lean, which round otherwise than exact ones{where}"
