"""Early updates: they run in backward, before the norm of all gradients is known.

Most steps are not clipped, and do not overflow. Then the factor of the gradients is known before,
and an update has the same bits whenever it runs. It writes a second memory of the layer's arrays.

[Note: early updates]
1. Backward queues the offload of a layer's last gradients, and the update behind it. The update
   reads the layer's memory and its gradients. So a program that looks at the layer, and may write
   it, waits for the update.
2. The step knows the norm. It withdraws the updates that have not begun, the newest first: they
   belong to the layers that the next forward needs first.
3. It compares each update that has begun with the one that it would queue now. If they are equal,
   the second memory becomes the layer's (commit). No byte is copied. Each memory has its record,
   which goes along: so the next fetch waits for this update, and the next early update waits for
   the fetches and saves of the memory that it writes.
4. All other layers are updated in place, in forward order. A skipped step updates none.
5. Hazard: gradients or weights change between 1 and 3. A further gradient cancels the update. So
   does every look of the program, which may have written. The kept `p.data` of a layer would show
   another memory after the commit, so a layer with an alias has no early update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stronghold import native
from stronghold.devices.device import Device
from stronghold.devices.fences import Fence
from stronghold.telemetry.metrics import EarlyOutcome, Metrics
from stronghold.train.arrays import Arrays, Memory, Piece
from stronghold.train.gradients import Gradients
from stronghold.train.layer import Groups, Layer
from stronghold.train.updates import LayerUpdate, Updates


class Started(NamedTuple):
    """An early update, and what it was queued with."""

    update: LayerUpdate
    scale: float  # of the gradients
    weights: tuple[Any, ...]  # changes with each look of the program, and each write
    fence: Fence


class EarlyUpdates(Updates):
    """Updates every layer that has gradients, those of `open` early where it may."""

    def __init__(
        self,
        device: Device,
        arrays: Arrays,
        kernels: native.Pool,
        layers: Sequence[Layer],
        groups: Groups,
        metrics: Metrics,
    ) -> None:
        super().__init__(device, arrays, kernels, layers, groups)
        self._metrics = metrics
        self._second: dict[Layer, Memory] = {}
        self._started: dict[Layer, Started] = {}  # in the order of the lane
        self._dropped: set[Layer] = set()  # have begun in vain in this step
        # The factor of the gradients in a step that is not clipped, as the last step knew it. After
        # a clipped step the next one often is, too.
        self._scale, self._was_clipped = 1.0, False

    def open(self, layers: Iterable[Layer]) -> None:
        """Make the second memory of these layers. They train whole, and lie in host memory."""
        self._second = {layer: self._arrays.allocate(layer) for layer in layers}

    def close(self) -> None:
        """Free it. The lanes have finished."""
        self.forget()
        for memory in self._second.values():
            self._arrays.free(memory)
        self._second = {}

    # -- in backward ------------------------------------------------------------------------------
    def may_start(self, layer: Layer) -> bool:
        """True if a step that is not clipped will probably commit an early update."""
        return (
            layer in self._second
            and not self._was_clipped
            and len(layer.waiting) == layer.num_trained  # it writes every element of the memory
            and not layer.is_seen
            and not self._arrays.is_aliased(layer)
        )

    def start(self, layer: Layer) -> None:
        """The gradients of the layer are on their way to the host. Queue its update, if it may."""
        if not self.may_start(layer):
            return
        update, second = self._next(layer), self._second[layer]
        (piece,) = self._arrays.pieces(layer)
        gradients = {"gradients": self._arrays.of(layer, "gradients")}
        target = Piece(0, {**second.arrays, **gradients}, (second.record,))
        fence = self._device.update.submit(
            f"update early {layer.index}",
            partial(self._run, update, piece, self._scale, target),
            reads=(layer.gradient_record, *piece.records),
            writes=target.records,
            nbytes=self._bytes(layer, layer.trained_numel),
        )
        self._started[layer] = Started(update, self._scale, _weights_of(layer), fence)

    def cancel(self, layer: Layer) -> None:
        """The gradients of the layer change: the step updates it."""
        started = self._started.pop(layer, None)
        if started is not None and not self._device.update.withdraw([started.fence]):
            self._dropped.add(layer)

    def is_started(self, layer: Layer) -> bool:
        """True if the running step has queued an early update of the layer."""
        return layer in self._started

    # -- the step ---------------------------------------------------------------------------------
    def _close_barrier(self, *, clip: float, loss_scale: float) -> float:
        self._scale, self._was_clipped = 1.0 / loss_scale, clip != 1.0
        newest_first = list(reversed(self._started.items()))
        fences = [started.fence for _, started in newest_first]
        for layer, _ in newest_first[: self._device.update.withdraw(fences)]:
            del self._started[layer]
        return super()._close_barrier(clip=clip, loss_scale=loss_scale)

    def _update_on_host(self, update: LayerUpdate, scale: float) -> None:
        if self._commit(update, scale):
            self._metrics.count_early(EarlyOutcome.COMMITTED)
            return
        if update.layer in self._dropped:
            self._metrics.count_early(EarlyOutcome.DROPPED)
        elif update.layer in self._second:
            self._metrics.count_early(EarlyOutcome.LEFT)
        super()._update_on_host(update, scale)

    def _commit(self, update: LayerUpdate, scale: float) -> bool:
        """Let the second memory of the layer be its memory, if its early update has the values of
        this one."""
        layer = update.layer
        started = self._started.pop(layer, None)
        if started is None:
            return False
        is_same = (
            started.scale == scale
            and started.weights == _weights_of(layer)
            and np.array_equal(started.update.positions, update.positions)
            and np.array_equal(started.update.numbers, update.numbers)
        )
        if not is_same:
            self._dropped.add(layer)
            return False
        self._second[layer] = self._arrays.exchange(layer, self._second[layer])
        return True

    def _end(self, layers: Sequence[Layer], gradients: Gradients) -> None:
        self.forget()
        super()._end(layers, gradients)

    def forget(self) -> None:
        """The step has ended, or is void: cancel its early updates, the newest first."""
        for layer in [*reversed(self._started)]:
            self.cancel(layer)
        self._dropped.clear()


def _weights_of(layer: Layer) -> tuple[Any, ...]:
    return layer.num_looks, layer.version
