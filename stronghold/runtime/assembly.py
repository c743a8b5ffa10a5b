"""The parts that train one model, put together: one assembly for the engine and the simulator.

Owns the order in which they are made. What differs is the device, whose kernels and host memory are
given. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from stronghold.device.base import Device
from stronghold.device.kernels import Kernels
from stronghold.memory.host import HostStore
from stronghold.memory.resident import DeviceStore
from stronghold.memory.slab import map_slab
from stronghold.memory.tiers import Tiers
from stronghold.model.layout import ModelLayout
from stronghold.model.source import WeightSource
from stronghold.plan.plan import Plan
from stronghold.runtime.adam import AdamSteps, Grouped
from stronghold.runtime.parts import Outside, Parts
from stronghold.team.ranks import RankTeam, Team
from stronghold.team.weights import NodeWeights
from stronghold.telemetry.metrics import Metrics


class Assembly:
    """`parameters[i]` are layer i's parameters in the layout's order; `kernels` run on the update
    lane, `allocate` makes host memory. Of several ranks `weights` are those of the node. What is
    made is closed by `undo`.
    """

    def __init__(
        self,
        *,
        layout: ModelLayout,
        dtype: torch.dtype,
        device: Device,
        plan: Plan,
        parameters: Sequence[Sequence[nn.Parameter]],
        optimizer: Grouped | None,
        kernels: Kernels,
        metrics: Metrics,
        tiers: Tiers,
        undo: contextlib.ExitStack,
        weights: NodeWeights | None = None,
        allocate: Callable[[int, torch.dtype], torch.Tensor] = map_slab,
    ) -> None:
        self.host = HostStore(
            layout,
            dtype,
            device,
            held=plan.apart,
            accumulate=plan.accumulates,
            ring_entries=plan.ring_entries,
            elsewhere=plan.updated_on_gpu,
            allocate=allocate,
            tiers=tiers,
            shards=weights.ranks.shards if weights is not None else None,
            shared=weights.room if weights is not None else None,
            fills=weights is None or weights.fills,
        )
        undo.callback(self.host.close)
        self.store = DeviceStore(self.host, device, accumulate=plan.accumulates, allocate=allocate)
        for state, of_layer in zip(self.host.layers, parameters, strict=True):
            state.parameters = of_layer
        self.adam = AdamSteps(optimizer, self.host.layers)
        self.team = Team()
        if weights is not None:
            self.team = RankTeam(device, self.host.layers, weights)
        self.outside = Outside()
        self.parts = Parts(
            device=device,
            host=self.host,
            store=self.store,
            adam=self.adam,
            kernels=kernels,
            metrics=metrics,
            team=self.team,
            outside=self.outside,
        )

    def adopt(self, index: int, source: WeightSource | None = None) -> None:
        """Copy the layer's parameters into its arrays; those on the meta device are read from
        `source`."""
        on_device = self.host.layers[index].on_device
        store = self.store if on_device else self.host
        store.adopt(index, list(self.host.layers[index].parameters), source)
