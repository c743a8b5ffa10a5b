"""The loss scale of fp16: DeepSpeed's own scalers, with DeepSpeed's settings.

Owns which scaler a config asks for, and when the scale moves. Never touches a loss or a gradient:
the engine multiplies the loss, the updater divides the gradients. The training thread alone enters.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
from deepspeed.runtime.precision_config import DeepSpeedFP16Config

from stronghold.errors import ConfigError

# What a dynamic scaler remembers between two steps; the rest of it is config.
STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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
    return {name: getattr(scaler, name) for name in STATE if hasattr(scaler, name)}


def restore_scaler(scaler: LossScalerBase, state: dict[str, Any]) -> None:
    """Take over what `scaler_state` gave, from one dynamic scaler to another.

    A fixed scale stays what the config says, and one that starts after a run without fp16 is new.
    """
    if scaler.dynamic and state.keys() >= set(STATE):
        for name in STATE:
            setattr(scaler, name, state[name])
