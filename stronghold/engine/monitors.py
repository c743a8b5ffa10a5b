"""DeepSpeed's monitors: TensorBoard, W&B, Comet and CSV files get each step's values.

It never changes a step. The training thread alone enters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.monitor.monitor import MonitorMaster

from stronghold.telemetry.metrics import StepRecord, read_number

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


class NoMonitor:
    """Takes the place of DeepSpeed's monitors while none is enabled."""

    enabled = False

    def write_events(self, event_list: Any) -> None:
        """Drop the events."""


def make_monitor(config: DeepSpeedConfig) -> Any:
    """Return DeepSpeed's monitors that `config` enables.

    Raises ImportError, as DeepSpeed does, if the package of a writer is not installed.
    """
    monitors = config.monitor_config
    return MonitorMaster(monitors) if monitors.enabled else NoMonitor()


def write_step(monitor: Any, record: StepRecord, *, samples: int, loss_scale: float | None) -> None:
    """Send a step's values to the monitors. Reads the loss, so it waits for compute.

    `samples` counts the samples of all steps so far. `loss_scale` is None except in fp16.
    """
    if not monitor.enabled:
        return
    values: dict[str, Any] = {
        "train_loss": read_number(record.loss),
        "lr": record.learning_rate,
        "loss_scale": loss_scale,
    }
    if record.early:
        values["early_committed"] = record.early.committed
        values["early_left"] = record.early.left
        values["early_dropped"] = record.early.dropped
    events = []
    for name, value in values.items():
        if value is not None:
            events.append((f"Train/Samples/{name}", value, samples))
    monitor.write_events(events)
