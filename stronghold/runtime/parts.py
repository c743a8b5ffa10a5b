"""What everything that trains one model has in common: made once, whatever the plan.

Owns nothing; `assembly` makes it. Frozen: any thread may read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from stronghold.device.base import Device
from stronghold.device.kernels import Kernels
from stronghold.memory.host import HostStore
from stronghold.memory.layer import LayerState
from stronghold.memory.resident import DeviceStore
from stronghold.runtime.adam import AdamSteps
from stronghold.team.ranks import Team
from stronghold.telemetry.metrics import Metrics

Written = Mapping[int, Collection[int]]
"""Parameters by layer and their positions in it."""


def _nobody(gradient: bool = False) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Outside:
    """Who is told that autograd runs through the model though no backward was begun: `reached`, at
    an output of a layer or (`gradient`) a parameter, may begin one; `check` ends one that raised.
    `divisor`: of its gradients as they arrive.
    """

    reached: Callable[[bool], None] = _nobody
    check: Callable[[], None] = _nobody
    divisor: int = 1

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that has arrived."""
        return gradient if self.divisor == 1 else gradient / self.divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`host` has every layer, and the arrays of those that `store` has not: these are updated on
    the device. `kernels` run on the update lane.
    """

    device: Device
    host: HostStore
    store: DeviceStore
    adam: AdamSteps
    kernels: Kernels
    metrics: Metrics
    team: Team
    outside: Outside = field(default_factory=Outside)

    @property
    def layers(self) -> Sequence[LayerState]:
        return self.host.layers
