"""A view of an engine at one moment: `engine.inspect()`, for tests and for bug reports.

Owns the view, and none of the objects that it shows. A bug report should hold
`print(engine.inspect())`. The training thread alone enters, between two calls of the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from stronghold.devices.device import Device
from stronghold.devices.fences import Fence
from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.optim.states import States, items, join_master
from stronghold.plan.cost import Demand
from stronghold.plan.estimate import StepEstimate
from stronghold.plan.plan import Plan
from stronghold.telemetry.metrics import StepRecord
from stronghold.telemetry.trace import Span
from stronghold.train.arrays import Arrays
from stronghold.train.job import Job, MemoryReport
from stronghold.train.layer import Layer
from stronghold.train.processes import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer at the moment of the call.

    layout            its sizes
    is_on_gpu         all of its arrays lie on the device, which updates it
    in_files          names of its arrays in files
    counts            number of updates of each trained parameter
    is_updated_early  true if the running step has queued an update before its clip barrier
    text              all of it in one line
    """

    layout: LayerLayout
    is_on_gpu: bool
    in_files: tuple[str, ...]
    counts: tuple[int, ...]
    is_updated_early: bool
    text: str
    _arrays: Arrays = field(repr=False)
    _layer: Layer = field(repr=False)

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def arrays(self) -> Mapping[str, torch.Tensor]:
        """The optimizer's arrays, by name, flat: the engine's, not copies."""
        states = self._layer.states
        names = () if states is None else states.dtypes
        return {name: self._arrays.of(self._layer, name) for name in names}

    @property
    def weights(self) -> torch.Tensor:
        """The whole layer's weights, flat, as bytes."""
        return self._arrays.buffer(self._layer)

    @property
    def writers(self) -> Mapping[str, Fence]:
        """The fence of the newest operation that writes the weights (the masters and moments, too),
        and the gradients."""
        records = {"weights": self._layer.weight_record, "gradients": self._layer.gradient_record}
        return {array: record.writer for array, record in records.items()}

    def wait(self) -> None:
        """Block until every operation that writes the layer's arrays has ended."""
        for record in (self._layer.weight_record, self._layer.gradient_record):
            record.wait()

    @property
    def trained(self) -> dict[str, torch.Size]:
        """The shapes of the parameters that the optimizer owns, by name."""
        own = zip(self._layer.names, self._layer.parameters, strict=True)
        return {name: p.shape for name, p in itertools.islice(own, self._layer.num_trained)}

    def read(self, array: str, name: str) -> torch.Tensor:
        """Return a flat copy of one trained parameter's items of `array`."""
        begin = self._layer.element(self._layer.names.index(name))
        end = begin + self.trained[name].numel()
        flat = self._arrays.of(self._layer, array)[items(array, begin, end)]
        return flat.to("cpu", copy=True)

    def master(self, name: str) -> torch.Tensor:
        """Return a parameter's exact fp32 master, in its shape, as a copy on the CPU."""
        states = self._layer.states
        low = None if states is None or states.low is None else self.read("low", name)
        return join_master(self.read("weights", name), low).view(self.trained[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """Counts since the plan began.

    num_fetches      fetches of layers (swap in)
    fetched_bytes    bytes of weights, to the device
    offloaded_bytes  bytes of gradients, from the device
    read_bytes       bytes read from files
    written_bytes    bytes written to files
    """

    num_fetches: int
    fetched_bytes: int
    offloaded_bytes: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """An engine at the moment of the call.

    layers, layout  the layers, and how the model is cut into them
    demand, plan    the input of the plan, and the plan
    predicted       estimate of a step. None before the first batch that trains, and if its costs
                    are unknown
    last_step       counters of the last step
    operations      recorded spans, oldest first; empty unless `stronghold.trace` is set or the
                    device records
    bytes           peak bytes per tier, planned and measured
    traffic         fetches, and bytes moved
    is_in_step      true while gradients wait for their step
    has_trained     true if masters and moments exist
    states          the arrays of the config's precision
    host_bytes      bytes of host memory that are held now
    unfinished      None, or the reason why only a load helps: the arrays belong to two steps or to
                    two checkpoints
    ranks, device   the live objects: this rank and the others; the device with its lanes
    """

    layers: tuple[LayerView, ...]
    layout: ModelLayout
    demand: Demand
    plan: Plan
    predicted: StepEstimate | None
    last_step: StepRecord | None
    operations: tuple[Span, ...]
    bytes: MemoryReport
    traffic: TransferCounts
    is_in_step: bool
    has_trained: bool
    states: States
    host_bytes: int
    unfinished: str | None
    ranks: RankGroup
    device: Device

    def __str__(self) -> str:
        lines = [str(self.plan)]
        if self.predicted is not None:
            lines.append(f"predicted {self.predicted}")
        if self.last_step is not None:
            step = self.last_step
            lines.append(
                f"measured {step.step_s * 1e3:,.0f} ms in step {step.step}, "
                f"{step.tokens_per_s:,.0f} tokens/s"
            )
        lines.append("layers")
        lines += [f"  {layer.text}" for layer in self.layers]
        lines += [str(self.bytes), str(self.traffic), str(self.ranks)]
        if self.unfinished is not None:
            lines.append(f"unfinished: {self.unfinished}")
        return "\n".join(lines)


def inspect(job: Job, last_step: StepRecord | None) -> Inspection:
    """Return the view of the engine that runs `job`. Waits for nothing."""
    trainer = job.trainer
    return Inspection(
        layers=tuple(_layer_view(job, layer) for layer in job.layers),
        layout=job.layout,
        demand=job.demand,
        plan=job.plan,
        predicted=job.predicted,
        last_step=last_step,
        operations=tuple(job.trace.spans()),
        bytes=job.memory_report(),
        traffic=TransferCounts(
            num_fetches=trainer.weights.num_fetches,
            fetched_bytes=trainer.weights.fetched_bytes,
            offloaded_bytes=trainer.gradients.offloaded_bytes,
            read_bytes=trainer.arrays.read_bytes,
            written_bytes=trainer.arrays.written_bytes,
        ),
        is_in_step=job.trainer.is_in_step,
        has_trained=job.has_trained,
        states=job.states,
        host_bytes=job.trainer.arrays.host_bytes,
        unfinished=trainer.unfinished,
        ranks=job.ranks,
        device=job.device,
    )


def _layer_view(job: Job, layer: Layer) -> LayerView:
    return LayerView(
        layout=job.layout.layers[layer.index],
        is_on_gpu=layer.is_on_gpu,
        in_files=job.plan.in_files[layer.index],
        counts=tuple(job.trainer.updates.counts[layer].tolist()),
        is_updated_early=job.trainer.updates.is_started(layer),
        text=repr(layer),
        _arrays=job.trainer.arrays,
        _layer=layer,
    )
