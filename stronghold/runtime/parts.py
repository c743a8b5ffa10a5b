"""What everything that trains one model has in common: made once, whatever the plan.

Owns nothing; `assembly` makes it. Frozen: any thread may read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stronghold.device.base import Device
from stronghold.device.kernels import Kernels
from stronghold.memory.host import HostStore
from stronghold.memory.layer import LayerState
from stronghold.memory.resident import DeviceStore
from stronghold.runtime.adam import AdamSteps
from stronghold.team.ranks import Team
from stronghold.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`host` has every layer, and the arrays of those that `store` has not: these are updated on
    the device. `parameters[i]` are layer i's parameters in the layout's order; `kernels` run on the
    update lane.
    """

    device: Device
    host: HostStore
    store: DeviceStore
    parameters: Sequence[Sequence[nn.Parameter]]
    adam: AdamSteps
    kernels: Kernels
    metrics: Metrics
    team: Team

    @property
    def layers(self) -> Sequence[LayerState]:
        return self.host.layers
