"""The warm-up profile: what the first steps showed of this model on this machine.

Pure: turns the spans of a few traced steps into the workload and the rates that `simulate` takes.
Never measures by itself and never changes a plan. What is measured in place has contention in it
already: lanes that share a resource are not charged for it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from stronghold.device.contention import Rates
from stronghold.model.layout import ModelLayout
from stronghold.simulate import LayerLoad, Workload
from stronghold.telemetry.trace import Span

UNCONTENDED_GBPS = 1e6  # of what was measured with its contention


def measured_workload(
    spans: Iterable[Span],
    layout: ModelLayout,
    *,
    activations: Sequence[str],
    saved_bytes: Sequence[int],
    tokens: int,
    micro_batches: int,
    num_steps: int,
) -> Workload:
    """Each layer's seconds in the compute spans "forward i" and "backward i", per micro-batch of
    the `num_steps` that were recorded.

    `activations` are the policies under which they were recorded: a recomputed layer's backward
    span contains its forward. What runs between two layers' uses (head, loss and their backward)
    is in the span of the layer before. `saved_bytes` per layer may be empty: nothing is offloaded.
    """
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.lane == "compute":
            seconds[span.name] += span.duration_s / (num_steps * micro_batches)
    loads = []
    for layer, policy in zip(layout.layers, activations, strict=True):
        forward_s = seconds[f"forward {layer.index}"]
        backward_s = seconds[f"backward {layer.index}"]
        if policy == "recompute":
            backward_s = max(0.0, backward_s - forward_s)
        saved = saved_bytes[layer.index] if saved_bytes else 0
        loads.append(LayerLoad(forward_s=forward_s, backward_s=backward_s, saved_bytes=saved))
    return Workload(layers=tuple(loads), tokens=tokens, micro_batches=micro_batches)


def measured_rates(spans: Iterable[Span], otherwise: Rates) -> Rates:
    """The rate of each lane in the recorded spans, in 1e9 bytes/s; that of `otherwise` for a lane
    that moved nothing.
    """
    nbytes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if "nbytes" in span.args:
            nbytes[span.lane] += span.args["nbytes"]
            seconds[span.lane] += span.duration_s

    def rate(lane: str, known: float) -> float:
        return nbytes[lane] / seconds[lane] * 1e-9 if seconds[lane] > 0.0 else known

    fetch, drain = rate("fetch", otherwise.fetch_gbps), rate("drain", otherwise.drain_gbps)
    load, spill = rate("load", otherwise.load_gbps), rate("spill", otherwise.spill_gbps)
    return Rates(
        fetch_gbps=fetch,
        drain_gbps=drain,
        duplex_gbps=fetch + drain,
        update_gbps=rate("update", otherwise.update_gbps),
        memory_gbps=UNCONTENDED_GBPS,
        device_gbps=otherwise.device_gbps,
        load_gbps=load,
        spill_gbps=spill,
        io_gbps=load + spill,
        wire_gbps=rate("gather", otherwise.wire_gbps),
        reduce_gbps=rate("reduce", otherwise.reduce_gbps),
        exchange_gbps=rate("exchange", otherwise.exchange_gbps),
        handover_s=otherwise.handover_s,
        launch_s=otherwise.launch_s,
    )


def slowest(found: Sequence[tuple[Rates, Workload]]) -> tuple[Rates, Workload]:
    """What several ranks showed, as one: each lane's least rate, each layer's most seconds and
    bytes. Of the lanes that meet other ranks the most, since their spans contain the waiting."""
    rates, workloads = [rates for rates, _ in found], [workload for _, workload in found]
    wires = ("wire_gbps", "reduce_gbps", "exchange_gbps")
    lanes = {
        field.name: (max if field.name in wires else min)(getattr(r, field.name) for r in rates)
        for field in fields(Rates)
    }
    layers = zip(*(workload.layers for workload in workloads), strict=True)
    loads = tuple(
        LayerLoad(
            forward_s=max(load.forward_s for load in of_layer),
            backward_s=max(load.backward_s for load in of_layer),
            saved_bytes=max(load.saved_bytes for load in of_layer),
        )
        for of_layer in layers
    )
    return Rates(**lanes), replace(workloads[0], layers=loads)
