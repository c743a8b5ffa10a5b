"""The optimizer object that the user sees, and the loss scale of fp16.

This file owns the parameter groups, the optimizer of each group, the choice of DeepSpeed's scaler,
and the moments at which the scale moves. It never touches a weight, a loss or a gradient: the
engine multiplies the loss, and the optimizer kernels divide the gradients. The training thread
alone enters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from torch import nn

from stronghold.errors import ConfigError
from stronghold.optim.contract import Optimizer
from stronghold.telemetry.metrics import LazyNumber, read_number
from stronghold.train.layer import Groups

# state of a dynamic scaler between two steps
STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class StepScaler(DynamicLossScaler):  # type: ignore[misc]
    """DeepSpeed's dynamic scaler, without a process group.

    It has DeepSpeed's attributes, and the same scale after every sequence of overflows. DeepSpeed's
    log lines ask for the rank, so they are left out. The engine logs a skipped step itself.
    """

    cur_scale: float

    def update_scale(self, overflow: bool) -> None:
        """Halve the scale, or spend hysteresis, on overflow. Double it after `scale_window` steps
        without overflow.

        Raises ConfigError if the scale would go below `min_scale`, and `raise_error_at_min_scale`
        is set.
        """
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            stable = self.cur_iter - self.last_overflow_iter - 1
            grows = stable > 0 and stable % self.scale_window == 0
            if self.consecutive_hysteresis or grows:
                self.cur_hysteresis = self.delayed_shift
            if grows:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _shrink(self) -> None:
        if 1 not in (self.delayed_shift, self.cur_hysteresis):
            self.cur_hysteresis -= 1
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise ConfigError(
                f"fp16: gradients are not finite at the smallest loss scale ({self.min_scale}, "
                "fp16.min_loss_scale). Lower the learning rate, look for NaN in the data, or use "
                '"bf16": {"enabled": true}, which needs no loss scale'
            )
        self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)


def make_scaler(fp16: DeepSpeedFP16Config, zero_stage: int) -> LossScalerBase:
    """Make the scaler for an fp16 section: fixed if `loss_scale` is above 0, else dynamic.

    As in DeepSpeed, hysteresis and the error at the smallest scale belong to ZeRO. At stage 0 the
    scale halves at every overflow, and stays at its minimum.
    """
    if fp16.loss_scale > 0:
        return LossScaler(fp16.loss_scale)
    options = fp16.dynamic_loss_scale_args()
    if zero_stage == 0:
        options["delayed_shift"] = 1
    return StepScaler(raise_error_at_min_scale=zero_stage > 0, **options)


def scaler_state(scaler: LossScalerBase) -> dict[str, Any]:
    """Return the state that a checkpoint keeps of a scaler."""
    return {name: getattr(scaler, name) for name in STATE if hasattr(scaler, name)}


def restore_scaler(scaler: LossScalerBase, state: dict[str, Any]) -> None:
    """Copy the result of `scaler_state` to a dynamic scaler.

    A fixed scale keeps the config's value. A scaler that starts after a run without fp16 is new.
    """
    if scaler.dynamic and state.keys() >= set(STATE):
        for name in STATE:
            setattr(scaler, name, state[name])


class EngineOptimizer(torch.optim.Optimizer):
    """Represents the engine's optimizer wherever a `torch.optim.Optimizer` is expected.

    `optimizers`: one for each group, or one for all groups. The engine reads `param_groups` when it
    queues an update: schedulers may write "lr" and other values at any time between steps. With
    `client`, the groups are the client's own dicts, so that a scheduler made for it keeps working.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        optimizers: Sequence[Optimizer] | Optimizer,
        client: torch.optim.Optimizer | None = None,
    ) -> None:
        self.overflow = False
        # the engine's, when it trains in fp16
        self.loss_scaler: LossScalerBase = LossScaler(1)
        self.grad_norm: LazyNumber = None  # of the last step
        self._engine_methods: dict[str, weakref.WeakMethod[Callable[..., None]]] = {}
        self._client = client
        super().__init__(params, defaults)
        if client is not None:
            self.param_groups = client.param_groups
        if isinstance(optimizers, Optimizer):
            optimizers = [optimizers] * len(self.param_groups)
        self.optimizers = tuple(optimizers)
        self._members = self._of_groups()

    @property
    def _global_grad_norm(self) -> float | None:
        """Gradient norm of the last step, under DeepSpeed's name. Waits for it if need be."""
        self.grad_norm = read_number(self.grad_norm)
        return self.grad_norm

    @property
    def loss_scale(self) -> float:
        """Factor of the next loss; 1 unless fp16 is on."""
        return float(self.loss_scaler.cur_scale)

    cur_scale = loss_scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times its scale, in fp32: a product of fp16 numbers would overflow."""
        scale = self.loss_scale
        return loss if scale == 1.0 else loss.float() * scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the scale follows the overflows."""
        return bool(self.loss_scaler.dynamic)

    def needs_scaler(self) -> bool:
        """True if the user's `loss.backward()` needs `engine.scale(loss)`."""
        return self.dynamic_loss_scale

    @property
    def parameter_offload(self) -> Any:
        """Stand in for stage 3's hooks, which DeepSpeed's and TRL's
        `unwrap_model_for_generation` remove and restore. This engine has none: generation
        streams."""
        none: dict[str, Any] = {"forward_hooks": [], "backward_hooks": [], "module": nn.Module()}
        return SimpleNamespace(_register_deepspeed_module=lambda module: None, **none)

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this fixed scale from the next loss on."""
        self.loss_scaler = LossScaler(loss_scale)

    def connect(self, *methods: Callable[..., None]) -> None:
        """Make the optimizer's methods call the engine's methods of the same names: `step`,
        `zero_grad`, `offload_states` and `reload_states`. They keep no engine alive."""
        self._engine_methods = {method.__name__: weakref.WeakMethod(method) for method in methods}

    def _engine_method(self, name: str) -> Callable[..., None] | None:
        """Return the engine's method. None without an engine, or after its end."""
        reference = self._engine_methods.get(name)
        return None if reference is None else reference()

    def _needed_engine_method(self, name: str) -> Callable[..., None]:
        method = self._engine_method(name)
        if method is None:
            raise ConfigError(f"optimizer.{name}: this optimizer is not connected to an engine")
        return method

    def count_step(self) -> None:
        """Note that the engine has taken a step. torch's schedules warn if no optimizer did before
        them."""
        for optimizer in (self, self._client):
            if optimizer is not None:
                optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def default(self) -> Optimizer:
        """Optimizer of a trained parameter that is in no group."""
        return self.optimizers[0]

    def group_of(self) -> Groups:
        """Group and optimizer of each trained parameter. Frozen parameters get no gradient."""
        return {
            parameter: (group, optimizer)
            for group, optimizer in zip(self.param_groups, self.optimizers, strict=True)
            for parameter in group["params"]
            if parameter.requires_grad
        }

    def _of_groups(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def check_groups(self) -> None:
        """Raise ConfigError if the parameters of a group, also of the client's, have changed."""
        if self._of_groups() != self._members:
            raise ConfigError(
                "optimizer.param_groups: other parameters than stronghold.initialize got, where "
                "layers, masters and moments follow them: pass every group to initialize, or "
                "destroy the engine and initialize again"
            )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Call the engine's step. A closure is refused: call `engine.backward` before."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure): call engine.backward(loss) and engine.step() instead"
            )
        self._needed_engine_method("step")()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the engine's `zero_grad`: gradients of the step so far are dropped."""
        zero_grad = self._engine_method("zero_grad")
        if zero_grad is not None:
            zero_grad()

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Call the engine's `offload_states`. Programs for ZeRO call the optimizer's."""
        offload = self._needed_engine_method("offload_states")
        offload(include=include, device=device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Call the engine's `reload_states`."""
        self._needed_engine_method("reload_states")(non_blocking=non_blocking)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new groups once the engine is made: layers, masters and moments follow groups."""
        if self._engine_methods:
            raise ConfigError(
                "add_param_group after stronghold.initialize: pass every group to initialize"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the hyper-parameters of `state_dict` into the live groups.

        Moments are refused: they belong to checkpoints, not to this object.
        """
        if state_dict.get("state"):
            raise ConfigError(
                "optimizer.load_state_dict: moments cannot be loaded in this release; pass a state "
                'dict whose "state" is empty, as optimizer.state_dict() here gives it'
            )
        loaded = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in loaded]
        expected_sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != expected_sizes:
            raise ConfigError(
                f"optimizer.load_state_dict: got groups of {sizes} parameters, "
                f"expected {expected_sizes}"
            )
        for group, new in zip(self.param_groups, loaded, strict=True):
            group.update({key: value for key, value in new.items() if key != "params"})
