"""The parts that train one model, and the order in which they are made.

The training thread assembles; any thread may read `Parts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from stronghold.devices.base import Device
from stronghold.distributed.node_weights import NodeWeights
from stronghold.distributed.sharding import RankTeam, Team
from stronghold.memory.host import DeviceStore, HostStore
from stronghold.memory.layer import LayerState, packed_weights
from stronghold.memory.tiers import Tiers
from stronghold.model.layout import ModelLayout
from stronghold.model.stored_tensors import PackedParameter
from stronghold.native import Kernels
from stronghold.plan.homes import GPU, HOST, Home
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Action, Kind
from stronghold.streaming.steps import Groups, OptimizerSteps
from stronghold.streaming.training_thread import TrainingThread
from stronghold.telemetry.metrics import Metrics

Written = Mapping[int, Collection[int]]
"""Parameters by layer and their positions in it."""


NO_ALIASES: Mapping[torch.Tensor, Sequence[torch.Tensor]] = MappingProxyType({})


def _ignore(gradient: bool = False) -> None:
    """Callback of an engine that never runs autograd by itself."""


@dataclass(slots=True)
class UnannouncedBackward:
    """Callbacks for `loss.backward()`: autograd runs, and `engine.backward` was not called.

    Hooks call `reached(gradient)` at an output of a layer, or (`gradient` true) at a parameter. It
    may begin a backward pass. They call `check` before other work. It ends a backward that raised.
    Gradients are divided by `divisor` when they arrive.
    """

    reached: Callable[[bool], None] = _ignore
    check: Callable[[], None] = _ignore
    divisor: int = 1

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divide a gradient that has arrived."""
        return gradient if self.divisor == 1 else gradient / self.divisor


# of one step: a run without steps (evaluation) must not fill memory
MAX_ACTIONS = 1 << 16


class Performed:
    """Operations that a step performed, in order.

    `engine.inspect()` shows them beside the schedule.
    `last` has the operations of the step that ended last. The thread that calls hooks enters.
    """

    def __init__(self) -> None:
        self.last: tuple[Action, ...] = ()
        self._now: list[Action] = []

    def add(self, kind: Kind, layer: int = -1) -> None:
        """Note that an operation was queued, or that compute is about to begin a use."""
        if len(self._now) < MAX_ACTIONS:
            self._now.append(Action(kind=kind, layer=layer))

    def end_step(self) -> None:
        """A step has ended: later operations belong to the next one."""
        self.last = tuple(self._now)
        self._now = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that trains one model.

    `host` has every layer, and the arrays of layers that are updated on the host. `store` has the
    arrays of layers that are updated on the device. `kernels` run on the update lane.
    """

    device: Device
    host: HostStore
    store: DeviceStore
    steps: OptimizerSteps
    kernels: Kernels
    metrics: Metrics
    team: Team
    outside: UnannouncedBackward = field(default_factory=UnannouncedBackward)
    trainer: TrainingThread = field(default_factory=TrainingThread)
    performed: Performed = field(default_factory=Performed)

    @property
    def layers(self) -> Sequence[LayerState]:
        return self.host.layers

    def adopt(self, index: int) -> None:
        """Copy the layer's parameters into its arrays."""
        stores: dict[Home, HostStore | DeviceStore] = {GPU: self.store, HOST: self.host}
        stores[self.layers[index].home].adopt(index)


def assemble(
    *,
    layout: ModelLayout,
    device: Device,
    plan: Plan,
    parameters: Sequence[Sequence[torch.Tensor]],
    groups: Groups,
    kernels: Kernels,
    metrics: Metrics,
    tiers: Tiers,
    undo: contextlib.ExitStack,
    weights: NodeWeights | None = None,
    aliases: Mapping[torch.Tensor, Sequence[torch.Tensor]] = NO_ALIASES,
    packed: Sequence[Sequence[PackedParameter]] = (),
) -> Parts:
    """Make the parts for `plan`, and register their closing with `undo`.

    `parameters[i]`: layer i's stored tensors, in the layout's order. `weights`: the node's weights,
    if several ranks share them. `aliases`: further tensors over the memory of a stored tensor.
    `packed[i]`: the packed parameters of layer i.
    """
    host = HostStore(
        layout,
        device,
        held=plan.pending,
        early=plan.early,
        accumulate=plan.accumulates,
        ring_entries=plan.ring_entries,
        tiers=tiers,
        shared=weights.room if weights is not None else None,
        fills=weights is None or weights.fills,
    )
    undo.callback(host.close)
    for state, of_layer in zip(host.layers, parameters, strict=True):
        state.parameters = of_layer
        for position, tensor in enumerate(of_layer):
            if tensor in aliases:
                state.aliases = {**state.aliases, position: aliases[tensor]}
    for index, of_layer_packed in enumerate(packed):
        host.layers[index].packed = packed_weights(of_layer_packed, parameters[index])
    return Parts(
        device=device,
        host=host,
        store=DeviceStore(host, device),
        steps=OptimizerSteps(groups, host.layers),
        kernels=kernels,
        metrics=metrics,
        team=Team() if weights is None else RankTeam(device, host.layers, weights),
    )
