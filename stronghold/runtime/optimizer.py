"""The optimizer that the user sees, and the loss scale of fp16: no arithmetic on tensors.

Owns the parameter groups, how each of them is updated, which of DeepSpeed's scalers a config asks
for, and when the scale moves. Never touches a weight, a loss or a gradient: `step` is the engine's,
which multiplies the loss; the optimizer kernels divide the gradients. The training thread alone
enters.
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
from stronghold.runtime.steps import Groups
from stronghold.telemetry.metrics import Reading, value

# What a dynamic scaler remembers between two steps; the rest of it is config, which a ZeRO
# checkpoint holds, too, in the order of DeepSpeed's arguments.
STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
CONFIG = (
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
    "raise_error_at_min_scale",
)


class StepScaler(DynamicLossScaler):  # type: ignore[misc]
    """DeepSpeed's dynamic scaler, in a process that has no process group as well.

    Same attributes and the same scale after every sequence of overflows; only DeepSpeed's log
    lines, which ask for the rank, are left out: the engine logs a skipped step itself.
    """

    cur_scale: float

    def update_scale(self, overflow: bool) -> None:
        """Halve the scale, or spend hysteresis, on overflow; double it after `scale_window` steps
        without one.

        ConfigError when it would go below `min_scale` and the scaler is told to raise then.
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
    """The scaler for an fp16 section: fixed when `loss_scale` is above 0, else dynamic.

    As in DeepSpeed, hysteresis and the error at the smallest scale belong to ZeRO; at stage 0 the
    scale halves at every overflow and stays at its minimum.
    """
    if fp16.loss_scale > 0:
        return LossScaler(fp16.loss_scale)
    options = fp16.dynamic_loss_scale_args()
    if zero_stage == 0:
        options["delayed_shift"] = 1
    return StepScaler(raise_error_at_min_scale=zero_stage > 0, **options)


def scaler_state(scaler: LossScalerBase) -> dict[str, Any]:
    """What a checkpoint keeps of a scaler."""
    names = STATE + CONFIG
    return {name: getattr(scaler, name) for name in names if hasattr(scaler, name)}


def deepspeeds_scaler(state: dict[str, Any]) -> LossScalerBase | None:
    """DeepSpeed's own object of what `scaler_state` gave; None where an older one lacks parts."""
    if state.keys() == {"cur_scale"}:
        return LossScaler(state["cur_scale"])
    if not state.keys() >= {*STATE, *CONFIG}:
        return None
    scaler = DynamicLossScaler(state["cur_scale"], *(state[name] for name in CONFIG))
    restore_scaler(scaler, state)
    return scaler


def restore_scaler(scaler: LossScalerBase, state: dict[str, Any]) -> None:
    """Take over what `scaler_state` gave, from one dynamic scaler to another.

    A fixed scale stays what the config says, and one that starts after a run without fp16 is new.
    """
    if scaler.dynamic and state.keys() >= set(STATE):
        for name in STATE:
            setattr(scaler, name, state[name])


class EngineOptimizer(torch.optim.Optimizer):
    """Stands for the engine's optimizer, wherever a `torch.optim.Optimizer` is expected.

    `optimizers` has how each group is updated, or one for all groups. `param_groups` are read when
    an update is submitted: schedulers may write "lr" and the others at any time between steps. With
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
        self.loss_scaler: LossScalerBase = LossScaler(1)  # the engine's, when it trains in fp16
        self.grad_norm: Reading = None  # of the last step
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

    def needs_scaler(self) -> bool:
        """Whether `loss.backward()` of the user's needs `engine.scale(loss)`."""
        return self.dynamic_loss_scale

    @property
    def parameter_offload(self) -> Any:
        """Of stage 3, whose hooks DeepSpeed's and TRL's `unwrap_model_for_generation` take away and
        put back: here are none, and generation streams."""
        none: dict[str, Any] = {"forward_hooks": [], "backward_hooks": [], "module": nn.Module()}
        return SimpleNamespace(_register_deepspeed_module=lambda module: None, **none)

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this fixed scale from the next loss on."""
        self.loss_scaler = LossScaler(loss_scale)

    def connect(self, *methods: Callable[..., None]) -> None:
        """The optimizer's methods will call the engine's of the same names: `step`, `zero_grad`,
        `offload_states` and `reload_states`. They keep no engine alive."""
        self._engine_methods = {method.__name__: weakref.WeakMethod(method) for method in methods}

    def _engine_method(self, name: str) -> Callable[..., None] | None:
        """The engine's method; None without an engine, or when the engine is gone."""
        reference = self._engine_methods.get(name)
        return None if reference is None else reference()

    def _needed_engine_method(self, name: str) -> Callable[..., None]:
        method = self._engine_method(name)
        if method is None:
            raise ConfigError(f"optimizer.{name}: this optimizer is not connected to an engine")
        return method

    def count_step(self) -> None:
        """The engine has taken a step: torch's schedules warn when no optimizer did before them."""
        for shown in (self, self._client):
            if shown is not None:
                shown._opt_called = True  # type: ignore[attr-defined]

    @property
    def default(self) -> Optimizer:
        """Of a parameter that trains and is in no group."""
        return self.optimizers[0]

    def group_of(self) -> Groups:
        """Of the parameters that are trained: frozen ones get no gradient."""
        return {
            parameter: (group, optimizer)
            for group, optimizer in zip(self.param_groups, self.optimizers, strict=True)
            for parameter in group["params"]
            if parameter.requires_grad
        }

    def _of_groups(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.param_groups]

    def check_groups(self) -> None:
        """ConfigError where a group, the client's too, has other parameters than it began with."""
        if self._of_groups() != self._members:
            raise ConfigError(
                "optimizer.param_groups: other parameters than stronghold.initialize got, where "
                "layers, masters and moments follow them: pass every group to initialize, or "
                "destroy the engine and initialize again"
            )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The engine's step. A closure is refused: the engine's backward has its own place."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure): call engine.backward(loss) and engine.step() instead"
            )
        self._needed_engine_method("step")()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's: gradients that wait for the step are thrown away."""
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
        """The engine's `offload_states`: programs for DeepSpeed's ZeRO call the optimizer's."""
        offload = self._needed_engine_method("offload_states")
        offload(include=include, device=device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """The engine's `reload_states`."""
        self._needed_engine_method("reload_states")(non_blocking=non_blocking)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed when the engine is made: layers, masters and moments follow."""
        if self._engine_methods:
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
