"""A view of an engine at one moment: `engine.inspect()`, for tests and for bug reports.

Owns the view, and none of the objects that it shows. A bug report should hold
`print(engine.inspect())`. The training thread alone enters, between two calls of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from stronghold.devices.base import Device, Fence
from stronghold.distributed.process_groups import Ranks
from stronghold.errors import ConfigError
from stronghold.memory.host import HostStore
from stronghold.memory.layer import LayerState, Residency
from stronghold.memory.neighbours import Neighbours
from stronghold.memory.stores import Store
from stronghold.model.layout import LayerLayout, ModelLayout, ParameterSlice
from stronghold.optim.states import Formats, States, items, join_master
from stronghold.plan.cost import Demand
from stronghold.plan.estimate import StepEstimate
from stronghold.plan.homes import GPU, HOST, Home
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Action
from stronghold.streaming.stack import MemoryReport, Stack
from stronghold.telemetry.metrics import StepRecord
from stronghold.telemetry.trace import Span
from stronghold.train.arrays import Arrays
from stronghold.train.job import Job
from stronghold.train.layer import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer at the moment of the call.

    layout            its parameters, ranges and offsets
    home              where it is updated
    homes             the home of each array that does not lie on the host
    residency         whether its weights are on the device (unsharded) or not
    arrays            its arrays in memory, by name, as bytes: the engine's, not copies
    writers           by array, the fence of the newest operation that writes it
    counts            number of updates of each parameter, in the layout's order
    trained           positions of the parameters that the optimizer owns
    is_updated_early  true if the running step has queued an update before its gate
    text              all of it in one line
    """

    layout: LayerLayout
    home: Home
    homes: Mapping[str, Home]
    residency: Residency
    arrays: Mapping[str, torch.Tensor]
    writers: Mapping[str, Fence]
    counts: tuple[int, ...]
    trained: frozenset[int]
    is_updated_early: bool
    text: str
    _host: HostStore = field(repr=False)
    _state: LayerState = field(repr=False)

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def weights(self) -> torch.Tensor:
        """The whole layer's weights, flat, as bytes. Each range of them has its own dtype."""
        return self.arrays["weights"]

    def wait(self) -> None:
        """Block until every operation that writes the layer's arrays has ended.

        Raises LaneError if one of them failed.
        """
        self._state.wait()

    def read(self, array: str, part: ParameterSlice) -> torch.Tensor:
        """Return a flat copy of one parameter's items of `array`, from memory or from files.

        With several ranks it has the items of this rank. It may be empty.
        """
        begin, end = part.offset, part.offset + part.numel
        pieces = self._host.access.pieces(self.index, (array,), begin, end)
        items = [views[array].to("cpu", copy=True) for _, views in pieces]
        return torch.cat(items) if items else torch.empty(0)

    def master(self, part: ParameterSlice) -> torch.Tensor:
        """Return a parameter's exact fp32 master, in its shape, as a copy on the CPU."""
        return self._host.access.master(self.index, part)


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
class RanksView:
    """This rank and the others, at the moment of the call.

    rank, num_ranks            number of this rank, and of all ranks
    node, num_nodes            number of this rank's node, and of all nodes
    num_cores                  cores of this rank alone; 0 if it shares all of them
    received_bytes             bytes of weights and gradients from other ranks
    received_from_nodes_bytes  bytes of them from other nodes
    communicator_bytes         bytes of the GPU that NCCL's communicators take
    sent_bytes                 bytes that this rank has given to collectives, by their kind
    """

    rank: int
    num_ranks: int
    node: int
    num_nodes: int
    num_cores: int
    received_bytes: int = 0
    received_from_nodes_bytes: int = 0
    communicator_bytes: int = 0
    sent_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """An engine at the moment of the call.

    layers, layout  the layers, and how the model is cut into them
    demand, plan    the input of the plan, and the plan
    predicted       estimate of a step. None before the first batch that trains, and if its costs
                    are unknown
    last_step       counters of the last step
    schedule        actions of the training step that the executor predicts
    performed       actions of the last step
    operations      recorded spans, oldest first; empty unless `stronghold.trace` is set or the
                    device records
    bytes           peak bytes per tier, planned and measured
    traffic         fetches, and bytes moved
    is_in_step      true while gradients wait for their step
    has_trained     true if masters and moments exist
    states          the arrays of the config's precision
    formats         the arrays of every range, by the range's number
    host_bytes      bytes of host memory that are held now
    torn            None, or the reason why only a load helps: the arrays belong to two steps or to
                    two checkpoints
    ranks           this rank and the others
    device, files   the live objects, with their lanes and their files
    """

    layers: tuple[LayerView | JobLayerView, ...]
    layout: ModelLayout
    demand: Demand
    plan: Plan
    predicted: StepEstimate | None
    last_step: StepRecord | None
    schedule: tuple[Action, ...]
    performed: tuple[Action, ...]
    operations: tuple[Span, ...]
    bytes: MemoryReport
    traffic: TransferCounts
    is_in_step: bool
    has_trained: bool
    states: States
    formats: Formats
    host_bytes: int
    torn: str | None
    ranks: RanksView
    device: Device
    files: Store | None

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
        lines.append("schedule")
        lines += [f"  {action}" for action in self.schedule]
        lines += [str(self.bytes), str(self.traffic), str(self.ranks)]
        if self.torn is not None:
            lines.append(f"torn: {self.torn}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayerView:
    """A layer of the room `train` at the moment of the call, as `LayerView`."""

    layout: LayerLayout
    home: Home
    homes: Mapping[str, Home]
    counts: tuple[int, ...]
    trained: frozenset[int]
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

    def read(self, array: str, part: ParameterSlice) -> torch.Tensor:
        """Return a flat copy of one trained parameter's items of `array`."""
        layer = self._layer
        k = layer.names.index(part.name)
        begin, numel = layer.element(k), layer.parameters[k].numel()
        flat = self._arrays.of(layer, array)[items(array, begin, begin + numel)]
        return flat.to("cpu", copy=True)

    def master(self, part: ParameterSlice) -> torch.Tensor:
        """Return a parameter's exact fp32 master, in its shape, as a copy on the CPU."""
        states = self._layer.states
        low = None if states is None or states.low is None else self.read("low", part)
        return join_master(self.read("weights", part), low).view(part.shape)


def inspect_job(job: Job, last_step: StepRecord | None) -> Inspection:
    """Return the view of an engine on the room `train`. Waits for nothing."""
    trainer = job.trainer
    return Inspection(
        layers=tuple(_job_layer_view(job, layer) for layer in job.layers),
        layout=job.layout,
        demand=job.demand,
        plan=job.plan,
        predicted=job.predicted,
        last_step=last_step,
        schedule=(),
        performed=(),
        operations=tuple(job.trace.spans()),
        bytes=job.memory_report(),
        traffic=TransferCounts(
            num_fetches=trainer.weights.num_fetches,
            fetched_bytes=trainer.weights.fetched_bytes,
            offloaded_bytes=trainer.gradients.offloaded_bytes,
            read_bytes=trainer.arrays.read_bytes,
            written_bytes=trainer.arrays.written_bytes,
        ),
        is_in_step=job.is_in_step,
        has_trained=job.has_trained,
        states=job.states,
        formats=job.formats,
        host_bytes=job.host_bytes,
        torn=trainer.unfinished,
        ranks=_view_of(job.ranks),
        device=job.device,
        files=None,
    )


def _job_layer_view(job: Job, layer: Layer) -> JobLayerView:
    homes = job.plan.homes
    return JobLayerView(
        layout=job.layout.layers[layer.index],
        home=GPU if layer.is_on_gpu else HOST,
        homes=dict(homes.row(layer.index)),
        counts=tuple(job.trainer.updates.counts[layer].tolist()),
        trained=frozenset(range(layer.num_trained)),
        is_updated_early=job.trainer.updates.is_started(layer),
        text=repr(layer),
        _arrays=job.trainer.arrays,
        _layer=layer,
    )


def inspect(stack: Stack, last_step: StepRecord | None) -> Inspection:
    """Return the view of the engine whose parts `stack` has. Waits for nothing."""
    host = stack.host
    tiers = host.tiers
    executor = stack.runtime.executor
    return Inspection(
        layers=tuple(_layer_view(host, state) for state in host.layers),
        layout=stack.layout,
        demand=stack.demand,
        plan=stack.plan,
        predicted=stack.predicted,
        last_step=last_step,
        schedule=tuple(executor.schedule.actions),
        performed=executor.performed.last,
        operations=tuple(stack.trace.spans()),
        bytes=stack.memory_report(),
        traffic=TransferCounts(
            num_fetches=executor.weights.num_fetches,
            fetched_bytes=executor.weights.fetched_bytes,
            offloaded_bytes=executor.gradients.offloaded_bytes,
            read_bytes=tiers.bytes_read,
            written_bytes=tiers.bytes_written,
        ),
        is_in_step=stack.runtime.ledger.is_in_step,
        has_trained=host.training,
        states=stack.states,
        formats=stack.formats,
        host_bytes=host.allocated_bytes,
        torn=_reason_of_torn(stack),
        ranks=_ranks_view(stack.ranks),
        device=stack.device,
        files=tiers.store,
    )


def _reason_of_torn(stack: Stack) -> str | None:
    """The reason why the arrays belong to two steps or two checkpoints. None if they do not."""
    try:
        stack.runtime.ledger.check()
    except ConfigError as error:
        return str(error)
    return None


def _view_of(ranks: Neighbours) -> RanksView:
    return RanksView(
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        node=ranks.node,
        num_nodes=ranks.num_nodes,
        num_cores=len(ranks.cores),
        communicator_bytes=ranks.device_bytes,
        sent_bytes=dict(ranks.sent_bytes),
    )


def _ranks_view(ranks: Ranks) -> RanksView:
    shards = ranks.shards
    return RanksView(
        rank=shards.rank,
        num_ranks=shards.num_ranks,
        node=shards.rank % shards.num_nodes,
        num_nodes=shards.num_nodes,
        num_cores=len(ranks.cores),
        received_bytes=ranks.received_bytes,
        received_from_nodes_bytes=ranks.received_from_nodes_bytes,
        communicator_bytes=ranks.communicator_bytes,
    )


def _layer_view(host: HostStore, state: LayerState) -> LayerView:
    return LayerView(
        layout=state.layout,
        home=state.home,
        homes=dict(state.homes),
        residency=state.on_gpu.residency,
        arrays=state.all_arrays(),
        writers={array: record.writer for array, record in state.records.items()},
        counts=tuple(state.optimizer.counts),
        trained=state.optimizer.trained,
        is_updated_early=state.gradients.early is not None,
        text=repr(state),
        _host=host,
        _state=state,
    )
