"""Norms and Adam of layers on the device: one batch of kernels for any number of layers.

Owns no bytes and decides nothing: `residents` and `whole` say which gradients and when. Everything
here is enqueued on the compute lane, so that it is in order with forward and backward, and entered
by whoever enters that lane. Races and what prevents them:
  * Adam writes what a checkpoint reads -> compute waits for the ledger's newest reader
  * a checkpoint reads what Adam writes -> it waits for the ledger's `updated`, recorded after Adam
  * a graph that was kept still needs the weights of before -> Adam raises the parameters' versions
  as any operation in place does, and autograd refuses
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stronghold import native
from stronghold.device.base import Device
from stronghold.errors import LaneError
from stronghold.memory.layer import LayerState
from stronghold.runtime.adam import AdamSteps, adam_bytes
from stronghold.runtime.ledger import Ledger
from stronghold.telemetry.metrics import Metrics

GradientsOfLayers = Mapping[int, Mapping[int, int]]
"""By layer and position: the address of a contiguous gradient, which the caller keeps alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One prepared batch of Adam; `rows` wait for the gradients' scale."""

    gradients: GradientsOfLayers
    dtype: torch.dtype
    rows: native.AdamRows


class DeviceUpdates:
    """Works on `states`, every layer of the model by index; only those on the device may be named
    in a call. `parameters[i]` are layer i's parameters in the layout's order.
    """

    def __init__(
        self,
        *,
        device: Device,
        states: Sequence[LayerState],
        parameters: Sequence[Sequence[nn.Parameter]],
        adam: AdamSteps,
        ledger: Ledger,
        metrics: Metrics,
    ) -> None:
        self._device = device
        self._states = states
        self._parameters = parameters
        self._adam_steps = adam
        self._ledger = ledger
        self._metrics = metrics

    def square_sums(self, gradients: GradientsOfLayers, dtype: torch.dtype) -> torch.Tensor:
        """The sum of squares of each gradient, fp64, on the device: valid for later compute."""
        segments = [
            (address, self._states[layer].layout.slices[k].numel)
            for layer, of_layer in gradients.items()
            for k, address in of_layer.items()
        ]
        with self._named("norm", gradients):
            sums = self._device.kernels.sum_squares_async(dtype, segments)
        self._device.charge_compute(dtype.itemsize * sum(numel for _, numel in segments))
        return sums

    def read(self, sums: Sequence[torch.Tensor]) -> list[float]:
        """What `square_sums` gave, on the host: the one wait of the training thread for backward on
        the device.
        """
        if not sums:
            return []
        self._device.record_compute("norms").wait()
        found: list[float] = torch.cat(list(sums)).tolist()
        return found

    def accumulate(
        self,
        gradients: GradientsOfLayers,
        dtype: torch.dtype,
        repeated: Mapping[int, frozenset[int]],
    ) -> None:
        """Add gradients to their layers' fp32 sums; those that are not `repeated` begin one."""
        segments = []
        for layer, of_layer in gradients.items():
            accumulated = self._states[layer].accumulated
            assert accumulated is not None
            base, slices = accumulated.data_ptr(), self._states[layer].layout.slices
            segments += [
                (address, base + slices[k].offset * 4, slices[k].numel, k in repeated[layer])
                for k, address in of_layer.items()
            ]
        with self._named("accumulate", gradients):
            self._device.kernels.accumulate(dtype, segments)
        moved = (numel * (dtype.itemsize + (8 if add else 4)) for _, _, numel, add in segments)
        self._device.charge_compute(sum(moved))

    def prepare(self, gradients: GradientsOfLayers, dtype: torch.dtype) -> Update:
        """Everything of `apply` but the gradients' scale, with this moment's hyper-parameters: the
        host's share of an update, done while the device is still busy with backward.
        """
        segments: list[native.AdamSegment] = []
        for layer, of_layer in gradients.items():
            segments += self._segments(layer, of_layer)
        return Update(gradients=gradients, dtype=dtype, rows=native.adam_rows(segments))

    def cancel(self, update: Update) -> None:
        """The step is skipped: what was prepared is not counted."""
        for layer, of_layer in update.gradients.items():
            self._adam_steps.retract(layer, of_layer)

    def apply(self, update: Update, scale: float) -> None:
        """Adam over every gradient, multiplied by `scale`; the layers' arrays are new after the
        fence that the ledger has then.
        """
        gradients, rows = update.gradients, update.rows
        for layer in gradients:
            read = self._ledger.read(layer)
            if not read.done:
                self._metrics.waited("update", self._device.compute_wait(read))
        rows["grad_scale"] = scale
        weight_dtype = self._states[next(iter(gradients))].weights.dtype
        with self._named("update", gradients):
            self._device.kernels.adam(weight_dtype, update.dtype, rows)
        numel = int(rows["numel"].sum())
        self._device.charge_compute(adam_bytes(weight_dtype, update.dtype) * numel)
        torch.autograd.graph.increment_version(
            [self._parameters[layer][k] for layer, of_layer in gradients.items() for k in of_layer]
        )
        updated = self._device.record_compute(_operation("update", gradients))
        for layer in gradients:
            self._ledger.update(layer, updated)

    def _segments(self, layer: int, gradients: Mapping[int, int]) -> list[native.AdamSegment]:
        state = self._states[layer]
        assert state.exp_avg is not None
        assert state.exp_avg_sq is not None
        weights, weight_size = state.weights.data_ptr(), state.weights.element_size()
        low, low_size = (
            (state.low.data_ptr(), state.low.element_size()) if state.low is not None else (0, 0)
        )
        exp_avg, exp_avg_sq = state.exp_avg.data_ptr(), state.exp_avg_sq.data_ptr()
        steps = self._adam_steps.advance(layer, frozenset(gradients), 1.0)
        return [
            native.AdamSegment(
                weights + step.part.offset * weight_size,
                low + step.part.offset * low_size,
                exp_avg + step.part.offset * 4,
                exp_avg_sq + step.part.offset * 4,
                gradients[k],
                step.part.numel,
                *step[1:],
            )
            for k, step in zip(sorted(gradients), steps, strict=True)
        ]

    @contextlib.contextmanager
    def _named(self, verb: str, layers: Mapping[int, object]) -> Iterator[None]:
        """A row in the trace, and a failure that names its operation, as a lane's does."""
        operation, begun = _operation(verb, layers), self._device.begin_compute_span()
        try:
            yield
        except Exception as cause:
            error = LaneError("compute", operation, cause)
            self._device.report(error)
            raise error from cause
        self._device.end_compute_span(operation, begun)


def _operation(verb: str, layers: Mapping[int, object]) -> str:
    first, *others = layers
    return f"{verb} {first}" if not others else f"{verb} {first} and {len(others)} more layers"


def addresses(
    flat: torch.Tensor, state: LayerState, positions: frozenset[int] | set[int]
) -> dict[int, int]:
    """Where parameters lie in a flat array of their layer."""
    base, size, slices = flat.data_ptr(), flat.element_size(), state.layout.slices
    return {k: base + slices[k].offset * size for k in sorted(positions)}
