"""DeepSpeed's instruments around a step: monitors, wall-clock timers, the FLOPS profiler.

Owns when they start and stop, and what they are told. Never changes a step: with every one of them
off it costs two empty context managers. The training thread alone enters.

A timer spans what the training thread does: "bwd_inner" is all of "bwd", since gradients leave
during backward, and updates that run while the next forward computes are in none of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
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
    """Of the timers of these phases, or of all: the names that events have, and DeepSpeed's."""
    words = [word for phase in phases or TIMERS for word in TIMERS[phase]]
    return {word.lower(): getattr(deepspeed_timer, f"{word}_{kind}_TIMER") for word in words}


class Instruments:
    """What `config` asks for, around `engine`, whose module is `module`. Raises ImportError, as
    DeepSpeed does, where a writer's package is not installed."""

    def __init__(self, config: DeepSpeedConfig, engine: Any, module: nn.Module) -> None:
        self._config = config
        self._breakdown = bool(config.wall_clock_breakdown)
        options, self.profiler = config.flops_profiler_config, None
        if options.enabled:
            # A proxy: the profiler reads sizes and timers, and must not keep the engine alive.
            proxy = weakref.proxy(engine)
            self.profiler = FlopsProfiler(module, proxy, options.recompute_fwd_factor)
        self.timers = deepspeed_timer.SynchronizedWallClockTimer()
        self.throughput = deepspeed_timer.ThroughputTimer(
            config.timers_config, batch_size=config.train_batch_size, steps_per_output=None
        )
        monitors = config.monitor_config
        nobody = SimpleNamespace(enabled=False, write_events=lambda event_list: None)
        self.monitor = MonitorMaster(monitors) if monitors.enabled else nobody
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
        """Time what runs inside, under DeepSpeed's names of the phase."""
        names = [*timers_of("MICRO", phase).values()] if self._breakdown else []
        names += timers_of("GLOBAL", phase).values() if self._times_steps else ()
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
        """Time a forward; `step`, counted from 0, is profiled when it is the one asked for."""
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
        due = step == self._config.flops_profiler_config.profile_step
        return self.profiler if due else None

    def end_step(self, record: StepRecord, *, samples: int, loss_scale: float | None) -> None:
        """Tell the monitors of a step; reads the loss, so it waits for the step's compute."""
        if not self.monitor.enabled:
            return
        found = {"train_loss": read_number(record.loss), "lr": record.learning_rate}
        found["loss_scale"] = loss_scale
        if record.early:
            early = record.early
            found["early_committed"], found["early_left"] = early.committed, early.left
            found["early_dropped"] = early.dropped
        self.monitor.write_events(
            [(f"Train/Samples/{k}", v, samples) for k, v in found.items() if v is not None]
        )

    def end_micro_batch(self, *, step: int, samples: int, boundary: bool) -> None:
        """Print what was measured; `step`, from 0, is the one that the micro-batch belongs to."""
        profiler = self._profiler_at(step)
        if profiler is not None and profiler.started:
            options = self._config.flops_profiler_config
            shown = ("module_depth", "top_modules", "detailed", "output_file")
            values = {name: getattr(options, name) for name in shown}
            profiler.print_model_profile(profile_step=step, **values)
            profiler.end_profile()
        micro, whole = timers_of("MICRO"), timers_of("GLOBAL")
        if self._breakdown:
            names = [*micro.values(), *whole.values()]
            self.last_times_ms = {n: self.timers(n).elapsed(reset=False) for n in names}
            breakdown = self._config.memory_breakdown
            self.timers.log(list(micro.values()), memory_breakdown=breakdown)
        if boundary and self._times_steps:
            times = {word: self.timers(n).elapsed(reset=False) for word, n in whole.items()}
            prefix = "Train/Samples/elapsed_time_ms"
            self.monitor.write_events([(f"{prefix}_{w}", t, samples) for w, t in times.items()])
            self.timers.log(list(whole.values()))
