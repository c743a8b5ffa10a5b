"""Updates: the clip barrier, then one pass of the optimizer for each layer.

The host updates layer by layer on the update lane. The device updates its own layers with one
operation on the compute lane. Both run the same kernels (`native.Kernels`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stronghold import native
from stronghold.devices.device import Device
from stronghold.native.segments import ROW
from stronghold.optim.contract import Optimizer
from stronghold.optim.states import States, items
from stronghold.train.arrays import Arrays, Piece
from stronghold.train.gradients import Gradients
from stronghold.train.layer import Groups, Layer
from stronghold.train.weights import Weights

CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s
# Fields of a kernel's row with addresses, in the order of `States.kernel_arrays`.
ADDRESSES = ("weight", "low", "moment0", "moment1", "scale0", "scale1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The end of a step.

    grad_norm  global L2 norm of the gradients before clipping, without the loss scale. If nothing
              depended on it, a function that waits for it
    overflow   the norm is not finite, and no layer was updated. The norm is infinity then, as
              DeepSpeed's, also if a gradient is NaN
    """

    grad_norm: float | Callable[[], float]
    overflow: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LayerUpdate:
    """One update of a layer, with the hyper-parameters of the moment at which it was made: a
    schedule may write others before it runs.

    positions  of the parameters that have a gradient, in order
    numbers    of the kernel, for each trained parameter: fp64 [num_trained, MAX_NUMBERS]
    counts     the number of this update, from 1, for each trained parameter
    """

    layer: Layer
    positions: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


class Updates:
    """Updates every layer that has gradients.

    groups_of  group and optimizer of each trained parameter, by layer
    counts     number of updates of each trained parameter, by layer
    is_broken  an exception came while updates were queued: some layers may be a step ahead
    """

    def __init__(
        self,
        device: Device,
        arrays: Arrays,
        kernels: native.Pool,
        layers: Sequence[Layer],
        groups: Groups,
    ) -> None:
        self._device, self._arrays, self._kernels, self._layers = device, arrays, kernels, layers
        self.groups_of = {
            layer: [groups[parameter] for parameter in layer.parameters[: layer.num_trained]]
            for layer in layers
        }
        self.counts = {layer: np.zeros(layer.num_trained, np.int64) for layer in layers}
        # Of each piece, by its layer, its first element and its address.
        self._rows: dict[tuple[Layer, int, int], native.Rows] = {}
        self.is_broken = False

    def optimizers(self, layer: Layer) -> list[Optimizer]:
        """Return the optimizer of each trained parameter."""
        return [optimizer for _, optimizer in self.groups_of[layer]]

    # -- the step ---------------------------------------------------------------------------------
    def step(
        self,
        weights: Weights,
        gradients: Gradients,
        *,
        clipping: float,
        loss_scale: float,
        skips_overflow: bool,
    ) -> StepResult:
        """Close the clip barrier, and queue the update of every layer with gradients, in forward
        order.

        Waits for the norm if it decides something. Never waits for an update: the next fetch of a
        layer waits for it, by the layer's weight record.

        clipping        largest global norm, 0 for none
        loss_scale      factor of the gradients
        skips_overflow  update nothing if the norm is not finite
        """
        scaled_norm = gradients.norm()
        layers = [layer for layer in self._layers if layer.waiting]
        updates = [self._next(layer) for layer in layers]
        launches = self._launches([u for u in updates if u.layer.is_on_gpu])
        scale, result = 1.0, StepResult(grad_norm=lambda: scaled_norm() / loss_scale)
        if clipping > 0.0 or skips_overflow:
            # The quotient rounds once. A product with 1 / loss_scale would round twice.
            norm = scaled_norm() / loss_scale
            # torch.nn.utils.clip_grad_norm_'s coefficient. NaN stays NaN.
            scale = clipping / (norm + CLIPPING_EPSILON) if clipping > 0.0 else 1.0
            scale = 1.0 if scale > 1.0 else scale
            overflow = skips_overflow and not math.isfinite(norm)
            result = StepResult(grad_norm=math.inf if overflow else norm, overflow=overflow)
        if not result.overflow:
            for layer in layers:  # the update begins with what the program has written
                weights.refresh(layer)
            self.is_broken = True
            factor = self._close_barrier(clip=scale, loss_scale=loss_scale)
            self._queue(updates, launches, factor)
            self._outdate(layers, weights)
        self._end(layers, gradients)
        self.is_broken = False
        return result

    def _close_barrier(self, *, clip: float, loss_scale: float) -> float:
        """The norm is known, and updates are queued next. Returns the factor of the gradients.

        clip  their factor without the loss scale, 1 for a step that is not clipped
        """
        return clip / loss_scale

    def _end(self, layers: Sequence[Layer], gradients: Gradients) -> None:
        """The step of these layers has ended, or was skipped."""
        for layer in layers:
            gradients.drop(layer)

    def _next(self, layer: Layer) -> LayerUpdate:
        numbers = np.zeros((layer.num_trained, native.MAX_NUMBERS))
        last: Any = None
        values: tuple[float, ...] = ()
        for k, (group, optimizer) in enumerate(self.groups_of[layer]):
            if group is not last:
                last, values = group, optimizer.numbers(group)
            numbers[k, : len(values)] = values
        positions = np.array(sorted(layer.waiting), np.int64)
        return LayerUpdate(layer, positions, numbers, self.counts[layer] + 1)

    def _queue(
        self,
        updates: Sequence[LayerUpdate],
        launches: Sequence[Callable[[float | None], None]],
        scale: float,
    ) -> None:
        for update in updates:
            if not update.layer.is_on_gpu:
                self._update_on_host(update, scale)
            self.counts[update.layer][update.positions] += 1
            update.layer.num_updates += 1
        on_gpu = [update.layer for update in updates if update.layer.is_on_gpu]
        if on_gpu:
            self._device.compute.submit(
                "update on the device",
                lambda: _launch(launches, scale),
                reads=[layer.gradient_record for layer in on_gpu],
                writes=[layer.weight_record for layer in on_gpu],
                nbytes=sum(self._bytes(layer, layer.trained_numel) for layer in on_gpu),
            )

    def _update_on_host(self, update: LayerUpdate, scale: float) -> None:
        layer = update.layer
        for piece in self._arrays.pieces(layer):
            self._device.update.submit(
                f"update {layer.index}",
                partial(self._run, update, piece, scale),
                piece.after,
                reads=(layer.gradient_record,),
                writes=piece.records,
                nbytes=self._bytes(layer, piece.arrays["weights"].numel()),
            )

    def _outdate(self, layers: Sequence[Layer], weights: Weights) -> None:
        reader = self._device.compute.record("backward")  # it has read what changes now
        for layer in layers:
            weights.outdate(layer, reader)
        # As a torch optimizer does: autograd refuses a graph that is older than the step.
        updated = [p for layer in layers for p in layer.parameters[: layer.num_trained]]
        torch.autograd.graph.increment_version(updated)
        for layer in layers:
            if layer.is_on_gpu:
                layer.fetched = layer.version

    def _bytes(self, layer: Layer, numel: int) -> int:
        """Bytes of memory that an update of so many elements reads and writes."""
        assert layer.states is not None
        of_element = layer.states.update_bytes(self._arrays.gradient_dtype(layer.dtype))
        return int(of_element * numel)

    def forget_addresses(self) -> None:
        """Arrays have moved."""
        self._rows.clear()

    # -- the kernels' calls -----------------------------------------------------------------------
    def _run(
        self, update: LayerUpdate, piece: Piece, scale: float, target: Piece | None = None
    ) -> None:
        """Work of the update lane: one pass over the arrays of a piece. They are written in place,
        or to those of `target`."""
        layer = update.layer
        assert layer.states is not None
        targets = {} if target is None else self._calls(update, target)
        for kernel, rows in self._calls(update, piece).items():
            rows["grad_scale"] = scale
            self._kernels.update(
                kernel,
                layer.dtype,
                self._arrays.gradient_dtype(layer.dtype),
                rows,
                lean=layer.states.is_lean,
                targets=None if target is None else native.targets_of(targets[kernel]),
            )

    def _launches(self, updates: Sequence[LayerUpdate]) -> list[Callable[[float | None], None]]:
        """Prepare the device's updates: one launch for each kernel and dtype. The host does it
        while the device is busy with backward. Only the scale is not known yet."""
        calls: dict[tuple[str, States], list[native.Rows]] = defaultdict(list)
        for update in updates:
            states = update.layer.states
            assert states is not None
            for piece in self._arrays.pieces(update.layer):
                for kernel, rows in self._calls(update, piece).items():
                    calls[kernel, states].append(rows)
        return [
            self._device.kernels.prepare_update(
                kernel,
                states.dtype,
                self._arrays.gradient_dtype(states.dtype),
                np.concatenate(rows),
                lean=states.is_lean,
            )
            for (kernel, states), rows in calls.items()
        ]

    def _calls(self, update: LayerUpdate, piece: Piece) -> dict[str, native.Rows]:
        """The rows of an update for one piece, by kernel."""
        key = update.layer, piece.begin, piece.arrays["weights"].data_ptr()
        if key not in self._rows:
            self._rows[key] = self._make_rows(update.layer, piece)
        rows = self._rows[key]
        rows["step"] = update.counts
        for k in range(native.MAX_NUMBERS):
            rows[f"number{k}"] = update.numbers[:, k]
        kernels = [optimizer.kernel for _, optimizer in self.groups_of[update.layer]]
        return {
            kernel: rows[[k for k in update.positions if kernels[k] == kernel]]
            for kernel in dict.fromkeys(kernels[k] for k in update.positions)
        }

    def _make_rows(self, layer: Layer, piece: Piece) -> native.Rows:
        """One row for each trained parameter, with the addresses of its elements in the piece. This
        is done once for each place of the arrays."""
        begin, arrays = piece.begin, piece.arrays
        end = begin + arrays["weights"].numel()
        rows = np.zeros(layer.num_trained, ROW)
        assert layer.states is not None
        names = dict(zip(ADDRESSES, layer.states.kernel_arrays, strict=True), grad="gradients")
        for k, (row, (_, optimizer)) in enumerate(zip(rows, self.groups_of[layer], strict=True)):
            first = max(begin, layer.element(k))
            last = max(first, min(end, layer.element(k) + layer.parameters[k].numel()))
            row["numel"], row["flags"] = last - first, optimizer.flags
            for address, array in names.items():
                if array is not None and last > first:
                    part = arrays[array][items(array, first - begin, last - begin)]
                    row[address] = part.data_ptr()
        return rows


def _launch(launches: Sequence[Callable[[float | None], None]], scale: float) -> None:
    """Work of the compute lane."""
    for launch in launches:
        launch(scale)
