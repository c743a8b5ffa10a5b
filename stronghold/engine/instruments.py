"""DeepSpeed's instruments around a step: monitors, wall-clock timers, the FLOPS profiler.

Owns when they start and stop, and the values that they get. It never changes a step. With all of
them off it costs two empty context managers. The training thread alone enters.

A timer spans work of the training thread. "bwd_inner" is all of "bwd", since gradients leave during
backward. No timer spans updates that run while the next forward computes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.utils import timer as deepspeed_timer
from deepspeed.utils.logging import set_log_level_from_string
from torch import nn

from stronghold.telemetry.metrics import StepRecord, read_number

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

Phase = Literal["forward", "backward", "step"]
# DeepSpeed's timers of each phase, as it names them: FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER ...
TIMERS: dict[Phase, tuple[str, ...]] = {
    "forward": ("FORWARD",),
    "backward": ("BACKWARD", "BACKWARD_INNER"),
    "step": ("STEP",),
}


def timers_of(kind: Literal["MICRO", "GLOBAL"], *phases: Phase) -> dict[str, str]:
    """Return DeepSpeed's name of each timer, by the name that events have.

    `phases` selects the timers of these phases. Without `phases` all are returned.
    """
    words = [word for phase in phases or TIMERS for word in TIMERS[phase]]
    return {word.lower(): getattr(deepspeed_timer, f"{word}_{kind}_TIMER") for word in words}


class NoMonitor:
    """Takes the place of DeepSpeed's monitors while none is enabled."""

    enabled = False

    def write_events(self, event_list: Any) -> None:
        """Drop the events."""


class Instruments:
    """The instruments that `config` enables, around `engine` with the user's `module`.

    Raises ImportError, as DeepSpeed does, if the package of a monitor's writer is not installed.
    """

    def __init__(self, config: DeepSpeedConfig, engine: Any, module: nn.Module) -> None:
        self._config = config
        self._breakdown = bool(config.wall_clock_breakdown)
        self.profiler: Any = None
        options = config.flops_profiler_config
        if options.enabled:
            # A proxy: the profiler reads sizes and timers, and must not keep the engine alive.
            proxy = weakref.proxy(engine)
            self.profiler = FlopsProfiler(module, proxy, options.recompute_fwd_factor)
        self.timers = deepspeed_timer.SynchronizedWallClockTimer()
        self.throughput = deepspeed_timer.ThroughputTimer(
            config.timers_config, batch_size=config.train_batch_size, steps_per_output=None
        )
        monitors = config.monitor_config
        self.monitor: Any = MonitorMaster(monitors) if monitors.enabled else NoMonitor()
        self.last_times_ms: dict[str, float] = {}
        if config.log_level is not None:
            set_log_level_from_string(config.log_level)
        if config.dump_state:
            config.print("DeepSpeed's reading of the config")

    @property
    def _times_steps(self) -> bool:
        return self._breakdown or self.profiler is not None

    @contextlib.contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Context manager that times its block, under DeepSpeed's names of the phase."""
        names: list[str] = []
        if self._breakdown:
            names += timers_of("MICRO", phase).values()
        if self._times_steps:
            names += timers_of("GLOBAL", phase).values()
        timers = [self.timers(name) for name in names]
        for timer in timers:
            if timer.started_:  # an interrupt kept it from being stopped
                timer.reset()
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.stop()

    @contextlib.contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Context manager that times a forward, and profiles it if the config names its step.

        `step` counts from 0.
        """
        profiler = self._profiler_at(step)
        if profiler is not None:
            profiler.start_profile(ignore_list=None)
        try:
            with self.time("forward"):
                yield
        finally:
            if profiler is not None:
                profiler.stop_profile()

    def _profiler_at(self, step: int) -> Any:
        """The profiler if the config names this step, else None."""
        is_due = step == self._config.flops_profiler_config.profile_step
        return self.profiler if is_due else None

    def end_step(self, record: StepRecord, *, samples: int, loss_scale: float | None) -> None:
        """Send a step's values to the monitors. Reads the loss, so it waits for compute.

        `samples` counts the samples of all steps so far. `loss_scale` is None except in fp16.
        """
        if not self.monitor.enabled:
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
        self.monitor.write_events(events)

    def end_micro_batch(self, *, step: int, samples: int, boundary: bool) -> None:
        """Print the measurements of a micro-batch.

        `step` is the number of its step, from 0. `samples` counts the samples of all steps so far.
        `boundary` is true if the micro-batch ended the step.
        """
        self._end_profile(step)
        micro, whole = timers_of("MICRO"), timers_of("GLOBAL")
        if self._breakdown:
            names = [*micro.values(), *whole.values()]
            self.last_times_ms = {name: self._elapsed_ms(name) for name in names}
            breakdown = self._config.memory_breakdown
            self.timers.log(list(micro.values()), memory_breakdown=breakdown)
        if boundary and self._times_steps:
            events = []
            for word, name in whole.items():
                event = f"Train/Samples/elapsed_time_ms_{word}"
                events.append((event, self._elapsed_ms(name), samples))
            self.monitor.write_events(events)
            self.timers.log(list(whole.values()))

    def _elapsed_ms(self, name: str) -> float:
        elapsed: float = self.timers(name).elapsed(reset=False)
        return elapsed

    def _end_profile(self, step: int) -> None:
        """Print the profile of a step, if one was started."""
        profiler = self._profiler_at(step)
        if profiler is None or not profiler.started:
            return
        options = self._config.flops_profiler_config
        profiler.print_model_profile(
            profile_step=step,
            module_depth=options.module_depth,
            top_modules=options.top_modules,
            detailed=options.detailed,
            output_file=options.output_file,
        )
        profiler.end_profile()
