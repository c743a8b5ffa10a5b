"""DeepSpeed's instruments around a step: monitors, wall-clock timers, the FLOPS profiler.

Owns when they start and stop, and what they are told. Never changes a step: with every one of them
off it costs two empty context managers. The training thread alone enters.

A timer spans what the training thread does: "bwd_inner" is all of "bwd", since gradients leave
during backward, and updates that run while the next forward computes are in none of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.utils import timer as deepspeed_timer
from deepspeed.utils.logging import set_log_level_from_string
from torch import nn

from stronghold.telemetry.metrics import StepRecord, value

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

Phase = Literal["forward", "backward", "step"]
Event = tuple[str, float, int]
MICRO: dict[Phase, tuple[str, ...]] = {
    "forward": (deepspeed_timer.FORWARD_MICRO_TIMER,),
    "backward": (deepspeed_timer.BACKWARD_MICRO_TIMER, deepspeed_timer.BACKWARD_INNER_MICRO_TIMER),
    "step": (deepspeed_timer.STEP_MICRO_TIMER,),
}
GLOBAL: dict[Phase, tuple[str, ...]] = {
    "forward": (deepspeed_timer.FORWARD_GLOBAL_TIMER,),
    "backward": (
        deepspeed_timer.BACKWARD_GLOBAL_TIMER,
        deepspeed_timer.BACKWARD_INNER_GLOBAL_TIMER,
    ),
    "step": (deepspeed_timer.STEP_GLOBAL_TIMER,),
}
SPANS = {  # global timer: the event that a monitor gets
    deepspeed_timer.FORWARD_GLOBAL_TIMER: "Train/Samples/elapsed_time_ms_forward",
    deepspeed_timer.BACKWARD_GLOBAL_TIMER: "Train/Samples/elapsed_time_ms_backward",
    deepspeed_timer.BACKWARD_INNER_GLOBAL_TIMER: "Train/Samples/elapsed_time_ms_backward_inner",
    deepspeed_timer.STEP_GLOBAL_TIMER: "Train/Samples/elapsed_time_ms_step",
}


class NoMonitor:
    """Stands where DeepSpeed's MonitorMaster would, when none is asked for."""

    enabled = False

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Nothing listens."""


class Instruments:
    """What `config` asks for, around `engine`, whose module is `module`.

    Raises ImportError, as DeepSpeed does, where a writer's package is not installed.
    """

    def __init__(self, config: DeepSpeedConfig, engine: Any, module: nn.Module) -> None:
        self._config = config
        self._breakdown = bool(config.wall_clock_breakdown)
        profiler = config.flops_profiler_config
        self.profiler = None
        if profiler.enabled:
            # A proxy: the profiler reads sizes and timers, and must not keep the engine alive.
            self.profiler = FlopsProfiler(
                module, weakref.proxy(engine), profiler.recompute_fwd_factor
            )
        self.timers = deepspeed_timer.SynchronizedWallClockTimer()
        self.throughput = deepspeed_timer.ThroughputTimer(
            config.timers_config, batch_size=config.train_batch_size, steps_per_output=None
        )
        monitors = config.monitor_config
        self.monitor = MonitorMaster(monitors) if monitors.enabled else NoMonitor()
        self.last_times_ms: dict[str, float] = {}
        if config.log_level is not None:
            set_log_level_from_string(config.log_level)
        if config.dump_state:
            config.print("DeepSpeed's reading of the config")

    def _names(self, phase: Phase) -> tuple[str, ...]:
        micro = MICRO[phase] if self._breakdown else ()
        return micro + (GLOBAL[phase] if self._breakdown or self.profiler is not None else ())

    @contextlib.contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Time what runs inside, under DeepSpeed's names of the phase."""
        timers = [self.timers(name) for name in self._names(phase)]
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
        profiler = self.profiler if self._profiles(step) else None
        if profiler is not None:
            profiler.start_profile(ignore_list=None)
        try:
            with self.time("forward"):
                yield
        finally:
            if profiler is not None:
                profiler.stop_profile()

    def _profiles(self, step: int) -> bool:
        return bool(
            self.profiler is not None and step == self._config.flops_profiler_config.profile_step
        )

    def end_step(self, record: StepRecord, *, samples: int, loss_scale: float | None) -> None:
        """Tell the monitors of a step; reads the loss, so it waits for the step's compute."""
        if not self.monitor.enabled:
            return
        found = {
            "train_loss": value(record.loss),
            "lr": record.learning_rate,
            "loss_scale": loss_scale,
        }
        self.monitor.write_events(
            [(f"Train/Samples/{k}", v, samples) for k, v in found.items() if v is not None]
        )

    def end_micro_batch(self, *, step: int, samples: int, boundary: bool) -> None:
        """Print what was measured; `step`, from 0, is the one that the micro-batch belongs to."""
        if self._profiles(step):
            self._print_profile(step)
        if self._breakdown:
            names = [*self._all(MICRO), *self._all(GLOBAL)]
            self.last_times_ms = {n: self.timers(n).elapsed(reset=False) for n in names}
            self.timers.log(self._all(MICRO), memory_breakdown=self._config.memory_breakdown)
        if boundary and self._names("step"):
            self.monitor.write_events(
                [
                    (event, self.timers(name).elapsed(reset=False), samples)
                    for name, event in SPANS.items()
                ]
            )
            self.timers.log(self._all(GLOBAL))

    @staticmethod
    def _all(names: dict[Phase, tuple[str, ...]]) -> list[str]:
        return [name for of_phase in names.values() for name in of_phase]

    def _print_profile(self, step: int) -> None:
        assert self.profiler is not None
        options = self._config.flops_profiler_config
        if self.profiler.started:
            self.profiler.print_model_profile(
                profile_step=step,
                module_depth=options.module_depth,
                top_modules=options.top_modules,
                detailed=options.detailed,
                output_file=options.output_file,
            )
            self.profiler.end_profile()
