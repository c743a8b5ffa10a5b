"""The optimizer that the user sees: live parameter groups, no arithmetic.

Owns the parameter groups and the flags that say which Adam each group is. Never touches a weight:
`step` is the engine's. The training thread alone enters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase
from torch import nn

from stronghold.errors import ConfigError
from stronghold.runtime.adam import AdamFlags
from stronghold.telemetry.metrics import Reading, value


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
        self.loss_scaler: LossScalerBase = LossScaler(1)  # the engine's, when it trains in fp16
        self.grad_norm: Reading = None  # of the last step
        self._step: weakref.WeakMethod[Callable[[], None]] | None = None
        self._zero_grad: weakref.WeakMethod[Callable[[], None]] | None = None
        self._client = client
        super().__init__(params, defaults)
        if client is not None:
            self.param_groups = client.param_groups
        self.flags = flags if isinstance(flags, list) else [flags] * len(self.param_groups)

    @property
    def _global_grad_norm(self) -> float | None:
        """DeepSpeed's name of the last step's norm; waits for it where the step did not."""
        self.grad_norm = value(self.grad_norm)
        return self.grad_norm

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1 unless fp16 is on."""
        return float(self.loss_scaler.cur_scale)

    cur_scale = loss_scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times its scale, in fp32: a product of fp16 numbers would overflow."""
        scale = self.loss_scale
        return loss if scale == 1.0 else loss.float() * scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale follows the overflows."""
        return bool(self.loss_scaler.dynamic)

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this fixed scale from the next loss on."""
        self.loss_scaler = LossScaler(loss_scale)

    def connect(self, step: Callable[[], None], zero_grad: Callable[[], None]) -> None:
        """`step()` and `zero_grad()` will call the engine's methods, which keep no engine alive."""
        self._step, self._zero_grad = weakref.WeakMethod(step), weakref.WeakMethod(zero_grad)

    def count_step(self) -> None:
        """The engine has taken a step: torch's schedules warn when no optimizer did before them."""
        for shown in (self, self._client):
            if shown is not None:
                shown._opt_called = True  # type: ignore[attr-defined]

    def group_of(self) -> dict[nn.Parameter, tuple[dict[str, Any], AdamFlags]]:
        """The live group and the flags of each parameter that is trained: frozen ones get no
        gradient.
        """
        return {
            parameter: (group, flags)
            for group, flags in zip(self.param_groups, self.flags, strict=True)
            for parameter in group["params"]
            if parameter.requires_grad
        }

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The engine's step. A closure is refused: the engine's backward has its own place."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure): call engine.backward(loss) and engine.step() instead"
            )
        step = self._step() if self._step is not None else None
        if step is None:
            raise ConfigError("optimizer.step: this optimizer is not connected to an engine")
        step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's: gradients that wait for the step are thrown away."""
        zero_grad = self._zero_grad() if self._zero_grad is not None else None
        if zero_grad is not None:
            zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed when the engine is made: layers, masters and moments follow."""
        if self._step is not None:
            raise ConfigError(
                "add_param_group after stronghold.initialize: pass every group to initialize"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the hyper-parameters of `state_dict`, in the groups that are live.

        Moments are refused: they belong to checkpoints, not to this object.
        """
        if state_dict.get("state"):
            raise ConfigError(
                "optimizer.load_state_dict: moments cannot be loaded in this release; pass a state "
                'dict whose "state" is empty, as optimizer.state_dict() here gives it'
            )
        loaded = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in loaded]
        if sizes != (own := [len(group["params"]) for group in self.param_groups]):
            raise ConfigError(
                f"optimizer.load_state_dict: got groups of {sizes} parameters, expected {own}"
            )
        for group, new in zip(self.param_groups, loaded, strict=True):
            group.update({key: value for key, value in new.items() if key != "params"})
