"""The optimizer that the user sees: live parameter groups, no arithmetic.

Owns the parameter groups and the flags that say which Adam each group is. Never touches a weight:
`step` is the engine's. The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from stronghold.errors import ConfigError


class AdamFlags(NamedTuple):
    """Decoupled weight decay (AdamW) or L2 (Adam), and whether moments are corrected for their
    bias.
    """

    adamw: bool
    bias_correction: bool


class EngineOptimizer(torch.optim.Optimizer):
    """Stands for Adam on the host, wherever a `torch.optim.Optimizer` is expected.

    `param_groups` are read when an update is submitted: schedulers may write "lr" and the others at
    any time between steps. With `client`, the groups are the client's own dicts, so that a
    scheduler made for it keeps working.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        flags: list[AdamFlags] | AdamFlags,
        client: torch.optim.Optimizer | None = None,
    ) -> None:
        self.overflow = False
        self.loss_scale = 1.0
        self._global_grad_norm: float | None = None
        self._step: Callable[[], None] | None = None
        super().__init__(params, defaults)
        if client is not None:
            self.param_groups = client.param_groups
        self.flags = flags if isinstance(flags, list) else [flags] * len(self.param_groups)

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    def connect(self, step: Callable[[], None]) -> None:
        """`step()` will call `step`: the engine's."""
        self._step = step

    def group_of(self) -> dict[nn.Parameter, tuple[dict[str, Any], AdamFlags]]:
        """Each parameter's live group and flags."""
        return {
            parameter: (group, flags)
            for group, flags in zip(self.param_groups, self.flags, strict=True)
            for parameter in group["params"]
        }

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The engine's step. A closure is refused: the engine's backward has its own place."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure): call engine.backward(loss) and engine.step() instead"
            )
        if self._step is None:
            raise ConfigError("optimizer.step: this optimizer is not connected to an engine")
        self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients leave their parameters as they arrive, and the step forgets
        them.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed when the engine is made: layers, masters and moments follow."""
        if self._step is not None:
            raise ConfigError(
                "add_param_group after stronghold.initialize: pass every group to initialize"
            )
        super().add_param_group(param_group)
