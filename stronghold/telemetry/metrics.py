"""Counters of one step, and the log line that reports them.

Owns the clock of the step, its tokens, and the seconds for which compute waited. Never reads a
tensor's value before a line is formatted: a loss on the GPU stays there. The training thread
enters, and autograd's thread in backward. A step lasts from the end of the step before it, and the
first one from its first tokens. So an asynchronous device cannot hide work between two steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import psutil
import torch

from stronghold.telemetry.trace import STEP_LANE, Trace

# A number, or a tensor or function from which `read_number` gets it later. None: there is none.
LazyNumber = float | torch.Tensor | Callable[[], float] | None


class WaitCause(Enum):
    """Cause of a wait of compute: weights, a free gradient slot, or an update."""

    FETCH = "fetch"
    OFFLOAD = "offload"
    UPDATE = "update"


class EarlyOutcome(Enum):
    """How a layer's early update ended, as `EarlyCounts` counts."""

    COMMITTED = "committed"
    LEFT = "left"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class EarlyCounts:
    """Early updates of one step, in layers.

    committed  the result became the layer's weights
    left       the layer could have an early update, and was updated behind the clip barrier
    dropped    the update had begun, and its result was not used
    """

    committed: int = 0
    left: int = 0
    dropped: int = 0

    def __bool__(self) -> bool:
        return bool(self.committed or self.left or self.dropped)

    def __str__(self) -> str:
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return f"{self.committed} committed, {self.left} left to the clip barrier{dropped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Counters of one optimizer step. `read_number` reads those that are still on the device.

    loss           mean over the step's micro-batches
    grad_norm      global L2 norm before clipping
    predicted_s    by the plan's estimate. None for another number of tokens than that of the plan
    wait_*_s       seconds for which compute waited. On a GPU a trace must be on: else None
    skipped        the gradients were not finite, and no weight changed
    """

    step: int
    loss: LazyNumber
    grad_norm: LazyNumber
    learning_rate: float
    tokens_per_s: float
    tflops: float
    step_s: float
    predicted_s: float | None
    wait_fetch_s: LazyNumber
    wait_offload_s: LazyNumber
    wait_update_s: LazyNumber
    skipped: bool
    early: EarlyCounts = EarlyCounts()


class Metrics:
    """Counts between two calls of `end_step`.

    num_parameters  of the model
    recomputed      share of them whose forward runs again in backward
    trace           gets a span for each step
    clock           seconds
    """

    def __init__(
        self,
        *,
        num_parameters: int,
        recomputed: float = 0.0,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_parameters = num_parameters
        self.recomputed = recomputed  # may change between two steps
        self.predicted_s: Mapping[int, float] = {}  # the plan's estimate of a step, by its tokens
        self._trace = trace or Trace(recording=False)
        self._clock = clock
        self._start_s: float | None = None
        self._num_tokens = 0
        self._waits = _no_waits()
        self._early: Counter[EarlyOutcome] = Counter()

    def waited(self, cause: WaitCause, seconds: LazyNumber) -> None:
        """Count `seconds` for which compute waited: for weights, a free slot or an update.

        None: the time was not measured.
        """
        self._waits[cause].append(seconds)

    def count_early(self, end: EarlyOutcome) -> None:
        """Count one layer whose early update ended like this."""
        self._early[end] += 1

    def add_tokens(self, num_tokens: int) -> None:
        """Count the tokens of a training forward pass that begins."""
        if self._start_s is None:
            self._start_s = self._clock()
        self._num_tokens += num_tokens

    def restart_clock(self) -> None:
        """Leave the time since the last step out, unless tokens have come: it was no training."""
        if self._num_tokens == 0:
            self._start_s = None

    def end_step(
        self,
        *,
        step: int,
        loss: LazyNumber,
        grad_norm: LazyNumber,
        learning_rate: float,
        skipped: bool = False,
    ) -> StepRecord:
        """Return the counters of the step that ends, and start the next one's clock.

        `loss`: the mean over the micro-batches.
        """
        now_s = self._clock()
        start_s = now_s if self._start_s is None else self._start_s
        step_s = now_s - start_s
        predicted_s = self.predicted_s.get(self._num_tokens)
        record = StepRecord(
            step=step,
            loss=_detached(loss),
            grad_norm=_detached(grad_norm),
            learning_rate=learning_rate,
            tokens_per_s=self._num_tokens / step_s if step_s > 0.0 else 0.0,
            tflops=tflops(self._num_parameters, self._num_tokens, step_s, self.recomputed),
            step_s=step_s,
            predicted_s=predicted_s,
            wait_fetch_s=_sum(self._waits[WaitCause.FETCH]),
            wait_offload_s=_sum(self._waits[WaitCause.OFFLOAD]),
            wait_update_s=_sum(self._waits[WaitCause.UPDATE]),
            skipped=skipped,
            early=EarlyCounts(
                committed=self._early[EarlyOutcome.COMMITTED],
                left=self._early[EarlyOutcome.LEFT],
                dropped=self._early[EarlyOutcome.DROPPED],
            ),
        )
        of_trace = {} if predicted_s is None else {"predicted_ms": predicted_s * 1e3}
        self._trace.record(STEP_LANE, f"step {step}", start_s, now_s, **of_trace)
        self._start_s = now_s
        self._num_tokens = 0
        self._waits = _no_waits()
        self._early.clear()
        return record

    @staticmethod
    def format(record: StepRecord) -> str:
        """Format one line of the log. It reads the loss and the norm, so it waits for compute."""
        loss = read_number(record.loss)
        grad_norm = read_number(record.grad_norm)
        predicted = ""
        if record.predicted_s is not None:
            predicted = f" (predicted {record.predicted_s * 1e3:,.0f})"
        tflops_digits = 2 if record.tflops >= 1 else 3
        waits = [
            f"fetch {_milliseconds(record.wait_fetch_s)}",
            f"offload {_milliseconds(record.wait_offload_s)}",
            f"update {_milliseconds(record.wait_update_s)}",
        ]
        columns = [
            f"step {record.step}",
            "loss -" if loss is None else f"loss {loss:.4f}",
            "grad norm -" if grad_norm is None else f"grad norm {grad_norm:.3f}",
            f"lr {record.learning_rate:.2e}",
            f"{record.tokens_per_s:,.0f} tokens/s",
            f"{record.tflops:.{tflops_digits}f} TFLOPS",
            f"{record.step_s * 1e3:,.0f} ms{predicted}",
            f"waited ms: {', '.join(waits)}",
        ]
        if record.early:
            columns.append(f"early {record.early}")
        if record.skipped:
            columns.append("skipped: the gradients are not finite")
        return " | ".join(columns)


def _no_waits() -> dict[WaitCause, list[LazyNumber]]:
    return {cause: [] for cause in WaitCause}


def tflops(num_parameters: int, num_tokens: int, seconds: float, recomputed: float) -> float:
    """Useful TFLOP/s of a dense model, without attention: 2 * passes * parameters * tokens / time.

    As in the Megatron and DeepSpeed papers, there are 3 passes over the weights: forward 1,
    backward 2. `recomputed`: share of one more forward.
    """
    if seconds <= 0.0:
        return 0.0
    passes = 3 + recomputed
    return num_parameters / 1e9 * passes * 2 * num_tokens / (seconds * 1e3)


def read_number(reading: LazyNumber) -> float | None:
    """Read the number. Waits for the device if it is a tensor there."""
    if reading is None or isinstance(reading, float | int):
        return reading
    if isinstance(reading, torch.Tensor):
        return float(reading.item())
    return float(reading())


@dataclass(frozen=True, slots=True)
class _LazySum:
    """The sum of numbers, read when it is called."""

    readings: tuple[LazyNumber, ...]

    def __call__(self) -> float:
        return math.fsum(read_number(reading) or 0.0 for reading in self.readings)


def _sum(readings: Sequence[LazyNumber]) -> LazyNumber:
    if any(reading is None for reading in readings):
        return None
    total = _LazySum(tuple(readings))
    is_known = all(isinstance(reading, float | int) for reading in readings)
    return total() if is_known else total


def _milliseconds(seconds: LazyNumber) -> str:
    number = read_number(seconds)
    return "-" if number is None else f"{number * 1e3:.1f}"


class BatchSize(NamedTuple):
    """The size of a batch.

    tokens    its tokens
    length    tokens of one sequence, or 0 if unknown
    integers  elements of its integer tensors of two or more dimensions
    values    elements of its floating-point tensors
    """

    tokens: int = 0
    length: int = 0
    integers: int = 0
    values: int = 0

    def maximum(self, other: BatchSize) -> BatchSize:
        """The larger of both numbers, in each field."""
        return BatchSize(*map(max, self, other))

    def times(self, factor: float) -> BatchSize:
        """So many times each number."""
        return BatchSize(*(math.ceil(factor * number) for number in self))

    def is_within(self, other: BatchSize) -> bool:
        """True if no field is larger than the other's."""
        return self.maximum(other) == other


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchSize:
    """The size of the batch in a forward call's arguments.

    Its tokens are the elements of `input_ids`, at any depth. Else of the first integer tensor of
    two or more dimensions. Else the first dimension of the first tensor. Else 0.
    """
    named = [*named_tensors(kwargs), *named_tensors(args)]
    values = sum(tensor.numel() for _, tensor in named if tensor.is_floating_point())
    tables = [tensor for _, tensor in named if tensor.dim() >= 2 and _is_integer(tensor)]
    integers = sum(tensor.numel() for tensor in tables)
    named_ids = [tensor for name, tensor in named if name == "input_ids"]
    ids = named_ids + tables
    if ids:
        length = ids[0].size(-1) if ids[0].dim() else 0
        return BatchSize(ids[0].numel(), length, integers, values)
    rows = [tensor.size(0) for _, tensor in named if tensor.dim() >= 1]
    num_rows = rows[0] if rows else 0
    return BatchSize(num_rows, 0, integers, values)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.dtype == torch.bool)


def named_tensors(nested: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested mappings and sequences, after the key that leads to it."""
    if isinstance(nested, torch.Tensor):
        yield name, nested
    elif isinstance(nested, Mapping):
        for key, item in nested.items():
            yield from named_tensors(item, str(key))
    elif isinstance(nested, tuple | list):
        for item in nested:
            yield from named_tensors(item, name)


def _detached(reading: LazyNumber) -> LazyNumber:
    """The number without the graph that made it."""
    return reading.detach() if isinstance(reading, torch.Tensor) else reading


# -- the start ------------------------------------------------------------------------------------
_STEPS = ("in the first step", "in the second")


class Start:
    """Seconds of the parts of a start, in their order, until the second step has ended: it waits
    for the first updates, and these for new memory. `initialize` begins now."""

    def __init__(self) -> None:
        process_s = time.time() - psutil.Process().create_time()
        self._seconds = {"before initialize (imports, the program's own work)": process_s}
        self._last_s = time.perf_counter()

    def end(self, part: str) -> None:
        """A part has ended now, and the next one begins."""
        now_s = time.perf_counter()
        self._seconds[part] = now_s - self._last_s
        self._last_s = now_s

    def end_step(self) -> bool:
        """A step has ended. Returns True if it was the second one."""
        is_second = _STEPS[0] in self._seconds
        self.end(_STEPS[is_second])
        return is_second

    def __str__(self) -> str:
        parts = ", ".join(f"{seconds:.1f} {part}" for part, seconds in self._seconds.items())
        return f"start: {sum(self._seconds.values()):.1f} s, of them {parts}"
