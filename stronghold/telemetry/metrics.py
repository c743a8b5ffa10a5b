"""Counters of one step, and the line that reports them.

Owns the clock of the step, its tokens and the seconds for which compute waited. Never reads a
tensor's value before a line is formatted: a loss on the GPU stays there. The training thread
enters, and autograd's in backward. A step lasts from the end of the step before it (the first from
its first tokens), so that an asynchronous device cannot hide work between two steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from stronghold.telemetry.trace import STEP_LANE, Trace

WaitCause = Literal["fetch", "drain", "update"]
EarlyOutcome = Literal["committed", "left", "dropped"]
# A number, or where it can be read when someone asks; None: there is none.
LazyNumber = float | torch.Tensor | Callable[[], float] | None


@dataclass(frozen=True, slots=True)
class EarlyCounts:
    """Early updates of one step. `committed`: their results are the layers'. `left`: layers that
    could have one, and that the gate updated alone. `dropped`: they had begun, and were for
    nothing."""

    committed: int = 0
    left: int = 0
    dropped: int = 0

    def __bool__(self) -> bool:
        return bool(self.committed or self.left or self.dropped)

    def __str__(self) -> str:
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return f"{self.committed} committed, {self.left} left to the gate{dropped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one optimizer step did; `read_number` reads what is still on the device. Waits on a device
    that compute does not wait for on the host are known when they are traced."""

    step: int
    loss: LazyNumber
    grad_norm: LazyNumber
    learning_rate: float
    tokens_per_s: float
    tflops: float
    step_s: float
    wait_fetch_s: LazyNumber
    wait_drain_s: LazyNumber
    wait_update_s: LazyNumber
    skipped: bool
    early: EarlyCounts = EarlyCounts()


class Metrics:
    """Counts between two `end_step` calls. `recomputed` is the share of the model's
    `num_parameters` whose forward runs again in backward."""

    def __init__(
        self,
        *,
        num_parameters: int,
        recomputed: float = 0.0,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_parameters = num_parameters
        self.recomputed = recomputed  # of the steps to come
        self._trace = trace or Trace(recording=False)
        self._clock = clock
        self._start_s: float | None = None
        self._num_tokens = 0
        self._waits: dict[WaitCause, list[LazyNumber]] = {"fetch": [], "drain": [], "update": []}
        self._early: Counter[EarlyOutcome] = Counter()

    def waited(self, cause: WaitCause, seconds: LazyNumber) -> None:
        """Compute stood still for `seconds`, for weights, a free slot or an update; None: for a
        time that nobody measured."""
        self._waits[cause].append(seconds)

    def count_early(self, end: EarlyOutcome) -> None:
        """A layer's early update ended so."""
        self._early[end] += 1

    def add_tokens(self, num_tokens: int) -> None:
        """A training forward pass of `num_tokens` begins."""
        if self._start_s is None:
            self._start_s = self._clock()
        self._num_tokens += num_tokens

    def restart_clock(self) -> None:
        """What ran since the last step was no training: the next tokens start the clock."""
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
        """Close the step and start the next one's clock. `loss`: the micro-batches' mean."""
        now_s = self._clock()
        start_s = now_s if self._start_s is None else self._start_s
        step_s = now_s - start_s
        record = StepRecord(
            step=step,
            loss=_detached(loss),
            grad_norm=_detached(grad_norm),
            learning_rate=learning_rate,
            tokens_per_s=self._num_tokens / step_s if step_s > 0.0 else 0.0,
            tflops=tflops(self._num_parameters, self._num_tokens, step_s, self.recomputed),
            step_s=step_s,
            wait_fetch_s=_sum(self._waits["fetch"]),
            wait_drain_s=_sum(self._waits["drain"]),
            wait_update_s=_sum(self._waits["update"]),
            skipped=skipped,
            early=EarlyCounts(
                committed=self._early["committed"],
                left=self._early["left"],
                dropped=self._early["dropped"],
            ),
        )
        self._trace.record(STEP_LANE, f"step {step}", start_s, now_s)
        self._start_s = now_s
        self._num_tokens = 0
        self._waits = {"fetch": [], "drain": [], "update": []}
        self._early.clear()
        return record

    @staticmethod
    def format(record: StepRecord) -> str:
        """One line for the log; reads the loss and the norm, so it waits for the step's compute."""
        loss, grad_norm = read_number(record.loss), read_number(record.grad_norm)
        parts = [
            f"step {record.step}",
            "loss -" if loss is None else f"loss {loss:.4f}",
            "grad norm -" if grad_norm is None else f"grad norm {grad_norm:.3f}",
            f"lr {record.learning_rate:.2e}",
            f"{record.tokens_per_s:,.0f} tokens/s",
            f"{record.tflops:.2f} TFLOPS" if record.tflops >= 1 else f"{record.tflops:.3f} TFLOPS",
            f"{record.step_s * 1e3:,.0f} ms",
            f"waited ms: fetch {_milliseconds(record.wait_fetch_s)}, "
            f"drain {_milliseconds(record.wait_drain_s)}, "
            f"update {_milliseconds(record.wait_update_s)}",
        ]
        if record.early:
            parts.append(f"early {record.early}")
        if record.skipped:
            parts.append("skipped: the gradients are not finite")
        return " | ".join(parts)


def tflops(num_parameters: int, num_tokens: int, seconds: float, recomputed: float) -> float:
    """Useful TFLOP/s of a dense model, attention not counted: 2 k P T / seconds with k = 3 passes
    over the weights (forward 1, backward 2) and the `recomputed` share of one more, as in the
    Megatron and DeepSpeed papers."""
    if seconds <= 0.0:
        return 0.0
    passes = 3 + recomputed
    return num_parameters / 1e9 * passes * 2 * num_tokens / (seconds * 1e3)


def read_number(reading: LazyNumber) -> float | None:
    """The number itself; waits for the device when it is a tensor there."""
    if reading is None or isinstance(reading, float | int):
        return reading
    return float(reading.item() if isinstance(reading, torch.Tensor) else reading())


def _sum(readings: Sequence[LazyNumber]) -> LazyNumber:
    if any(reading is None for reading in readings):
        return None
    if all(isinstance(reading, float | int) for reading in readings):
        return math.fsum(read_number(reading) or 0.0 for reading in readings)
    return lambda: math.fsum(read_number(reading) or 0.0 for reading in readings)


def _milliseconds(seconds: LazyNumber) -> str:
    found = read_number(seconds)
    return "-" if found is None else f"{found * 1e3:.1f}"


class BatchSize(NamedTuple):
    """How large a batch is: its tokens, those of one sequence (0 where it is unknown), and the
    elements of its integer tensors of two or more dimensions and of its floating-point tensors."""

    tokens: int = 0
    length: int = 0
    integers: int = 0
    values: int = 0

    def maximum(self, other: BatchSize) -> BatchSize:
        """The larger of both, in each respect."""
        return BatchSize(*map(max, self, other))

    def is_within(self, other: BatchSize) -> bool:
        """True if it is no larger, in any respect."""
        return self.maximum(other) == other


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchSize:
    """The size of a forward call's batch. Tokens: the size of `input_ids`, wherever it is nested;
    else of the first integer tensor of two or more dimensions; else the first tensor's first
    dimension; else 0."""
    named = [*named_tensors(kwargs), *named_tensors(args)]
    values = sum(tensor.numel() for _, tensor in named if tensor.is_floating_point())
    tables = [tensor for _, tensor in named if tensor.dim() >= 2 and _counts(tensor)]
    integers = sum(tensor.numel() for tensor in tables)
    ids = [tensor for name, tensor in named if name == "input_ids"] + tables
    if ids:
        length = ids[0].size(-1) if ids[0].dim() else 0
        return BatchSize(ids[0].numel(), length, integers, values)
    rows = next((tensor.size(0) for _, tensor in named if tensor.dim() >= 1), 0)
    return BatchSize(rows, 0, integers, values)


def _counts(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.dtype == torch.bool)


def named_tensors(nested: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested mappings and sequences, with the key that leads to it."""
    if isinstance(nested, torch.Tensor):
        yield name, nested
    elif isinstance(nested, Mapping):
        for key, item in nested.items():
            yield from named_tensors(item, str(key))
    elif isinstance(nested, tuple | list):
        for item in nested:
            yield from named_tensors(item, name)


def _detached(reading: LazyNumber) -> LazyNumber:
    """Hold the value without the graph that made it."""
    return reading.detach() if isinstance(reading, torch.Tensor) else reading
