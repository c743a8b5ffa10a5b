"""What everything that trains one model has in common: made once, whatever the plan, by one
assembly for the engine and the simulator.

Owns the order in which the parts are made; what differs is the device, whose kernels and host
memory are given. The training thread assembles them; any thread may read `Parts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from stronghold.device.base import Device
from stronghold.distributed.node_weights import NodeWeights
from stronghold.distributed.sharding import RankTeam, Team
from stronghold.memory.host import DeviceStore, HostStore
from stronghold.memory.layer import LayerState
from stronghold.memory.slab import map_slab
from stronghold.memory.tiers import Tiers
from stronghold.model.layout import ModelLayout
from stronghold.model.partition import WeightSource
from stronghold.native import Kernels
from stronghold.plan.homes import GPU, HOST, Home
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Action, Kind
from stronghold.runtime.steps import Groups, OptimizerSteps
from stronghold.telemetry.metrics import Metrics

Written = Mapping[int, Collection[int]]
"""Parameters by layer and their positions in it."""


def _nobody(gradient: bool = False) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Outside:
    """Who is told that autograd runs through the model though no backward was begun: `reached`, at
    an output of a layer or (`gradient`) a parameter, may begin one; `check` ends one that raised.
    `divisor`: of its gradients as they arrive."""

    reached: Callable[[bool], None] = _nobody
    check: Callable[[], None] = _nobody
    divisor: int = 1

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that has arrived."""
        return gradient if self.divisor == 1 else gradient / self.divisor


MAX_ACTIONS = 1 << 16  # of one step: a run without steps (evaluation) must not fill memory


class Performed:
    """The operations that a step performed, in order: `engine.inspect()` shows them beside the
    schedule. `last` has those of the step that ended last. The thread that calls hooks enters."""

    def __init__(self) -> None:
        self.last: tuple[Action, ...] = ()
        self._now: list[Action] = []

    def add(self, kind: Kind, layer: int = -1) -> None:
        """An operation was queued; of a use, compute is about to begin it."""
        if len(self._now) < MAX_ACTIONS:
            self._now.append(Action(kind=kind, layer=layer))

    def end_step(self) -> None:
        """A step has ended. Later operations belong to the next one."""
        self.last = tuple(self._now)
        self._now = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`host` has every layer, and the arrays of those that `store` has not: these are updated on
    the device. `kernels` run on the update lane."""

    device: Device
    host: HostStore
    store: DeviceStore
    steps: OptimizerSteps
    kernels: Kernels
    metrics: Metrics
    team: Team
    outside: Outside = field(default_factory=Outside)
    performed: Performed = field(default_factory=Performed)

    @property
    def layers(self) -> Sequence[LayerState]:
        return self.host.layers

    def adopt(self, index: int, source: WeightSource | None = None) -> None:
        """Copy the layer's parameters into its arrays; those on the meta device are read from
        `source`."""
        stores: dict[Home, HostStore | DeviceStore] = {GPU: self.store, HOST: self.host}
        stores[self.layers[index].home].adopt(index, source)


def assemble(
    *,
    layout: ModelLayout,
    device: Device,
    plan: Plan,
    parameters: Sequence[Sequence[nn.Parameter]],
    groups: Groups,
    kernels: Kernels,
    metrics: Metrics,
    tiers: Tiers,
    undo: contextlib.ExitStack,
    weights: NodeWeights | None = None,
    allocate: Callable[[int, torch.dtype], torch.Tensor] = map_slab,
) -> Parts:
    """`parameters[i]` are layer i's parameters in the layout's order; `allocate` makes host memory.
    Of several ranks `weights` are those of the node. What is made is closed by `undo`."""
    host = HostStore(
        layout,
        device,
        held=plan.pending,
        early=plan.early,
        accumulate=plan.accumulates,
        ring_entries=plan.ring_entries,
        allocate=allocate,
        tiers=tiers,
        shared=weights.room if weights is not None else None,
        fills=weights is None or weights.fills,
    )
    undo.callback(host.close)
    for state, of_layer in zip(host.layers, parameters, strict=True):
        state.parameters = of_layer
    return Parts(
        device=device,
        host=host,
        store=DeviceStore(host, device),
        steps=OptimizerSteps(groups, host.layers),
        kernels=kernels,
        metrics=metrics,
        team=Team() if weights is None else RankTeam(device, host.layers, weights),
    )
