"""A view of an engine at one moment: `engine.inspect()`, for tests and for bug reports.

Owns the view, and nothing that it shows. A bug report should hold `print(engine.inspect())`.
The training thread alone enters, between two calls of the engine.
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
from stronghold.memory.stores import Store
from stronghold.model.layout import LayerLayout, ModelLayout, ParameterSlice
from stronghold.optim.states import Formats, States
from stronghold.plan.cost import Demand
from stronghold.plan.homes import Home
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Action
from stronghold.streaming.stack import MemoryReport, Stack
from stronghold.telemetry.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer at the moment of the call.

    `home` is where it is updated, and `homes` names the arrays that do not lie on the host, with
    their homes. `arrays` are its arrays in memory, by name, as bytes: the engine's own, not copies.
    `writers` has, by array, the fence of the newest operation that
    writes it. `counts` has each parameter's number of updates, in the layout's order, and `trained`
    holds the positions of those that the optimizer owns. `is_updated_early`: the running step has
    queued an update of the layer before its gate. `text` is all of it in one line.
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
        """The whole layer's weights: bytes, of which each range has its dtype."""
        return self.arrays["weights"]

    def wait(self) -> None:
        """Block until every operation that writes the layer's arrays has ended. LaneError where one
        of them failed."""
        self._state.wait()

    def read(self, array: str, part: ParameterSlice) -> torch.Tensor:
        """A flat copy of one parameter's items of `array`, from memory or from files. Of several
        ranks, the items that this one has: maybe none."""
        begin, end = part.offset, part.offset + part.numel
        pieces = self._host.access.pieces(self.index, (array,), begin, end)
        items = [found[array].to("cpu", copy=True) for _, found in pieces]
        return torch.cat(items) if items else torch.empty(0)

    def master(self, part: ParameterSlice) -> torch.Tensor:
        """A parameter's exact fp32 master, in its shape, as a copy on the CPU."""
        return self._host.access.master(self.index, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """Counts since the plan began: fetches of layers, bytes of weights to the
    device and of gradients from it, and bytes read from files and written to them."""

    num_fetches: int
    fetched_bytes: int
    offloaded_bytes: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """This rank and the others, at the moment of the call.

    This is rank `rank` of `num_ranks`, on node `node` of `num_nodes`. `num_cores` is the number of
    cores that it has for itself; 0 where it shares all of them. `received_bytes` are bytes of
    weights and gradients that came from other ranks, `received_from_nodes_bytes` those of them that
    came from other nodes. NCCL's communicators take `communicator_bytes` of its GPU.
    """

    rank: int
    num_ranks: int
    node: int
    num_nodes: int
    num_cores: int
    received_bytes: int
    received_from_nodes_bytes: int
    communicator_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """An engine at the moment of the call.

    `schedule` is the training step that the executor predicts, and `performed` what the last step
    did. `operations` are the recorded spans,
    oldest first: none, unless `stronghold.trace` is set or the device records. `bytes` are peaks
    per tier, planned and measured; `host_bytes` is host memory that is held now. `is_in_step`:
    gradients wait for their step. `has_trained`: masters and moments exist; `states` names the
    arrays of the config's precision, and `formats` has those of every range by its number. `torn`
    is the reason why only a load helps: the arrays are of two steps, or of two checkpoints. It is
    None where they are of one. `device` and `files` are the live objects, with their lanes and
    their files.
    """

    layers: tuple[LayerView, ...]
    layout: ModelLayout
    demand: Demand
    plan: Plan
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
    files: Store

    def __str__(self) -> str:
        return "\n".join(
            [
                str(self.plan),
                "layers",
                *(f"  {layer.text}" for layer in self.layers),
                "schedule",
                *(f"  {action}" for action in self.schedule),
                str(self.bytes),
                str(self.traffic),
                str(self.ranks),
                *([f"torn: {self.torn}"] if self.torn is not None else []),
            ]
        )


def inspect(stack: Stack) -> Inspection:
    """The view of the engine whose parts `stack` has."""
    host, executor, tiers = stack.host, stack.runtime.executor, stack.host.tiers
    return Inspection(
        layers=tuple(_layer(host, state) for state in host.layers),
        layout=stack.layout,
        demand=stack.demand,
        plan=stack.plan,
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
        torn=_torn(stack),
        ranks=_ranks(stack.ranks),
        device=stack.device,
        files=tiers.store,
    )


def _torn(stack: Stack) -> str | None:
    try:
        stack.runtime.ledger.check()
    except ConfigError as error:
        return str(error)
    return None


def _ranks(ranks: Ranks) -> RanksView:
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


def _layer(host: HostStore, state: LayerState) -> LayerView:
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
