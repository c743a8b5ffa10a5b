"""Device bytes of layers that are updated on the device: weights, masters, moments and sums.

Owns those arrays, for good: nothing of such a layer is on the host, nothing of it is fetched or
drained. They stand in the `LayerState` of their layer (`HostStore.layers`), laid out as a host
layer's. Gradients gather in the window's slots. Allocated and read by the training thread; written
on the compute lane, in order with forward and backward; a checkpoint reads them on the io lane,
which the ledger's fences keep apart from the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from stronghold.device.base import Device
from stronghold.memory.host import HostStore
from stronghold.memory.layer import fill
from stronghold.memory.slab import map_slab
from stronghold.memory.tiers import LOW_DTYPE
from stronghold.model.source import WeightSource


class DeviceStore:
    """The arrays of the layers that are `on_device` in `host`. `accumulate` gives each an fp32
    accumulator; `allocate` makes the host memory through which values come and go.
    """

    def __init__(
        self,
        host: HostStore,
        device: Device,
        *,
        accumulate: bool,
        allocate: Callable[[int, torch.dtype], torch.Tensor] = map_slab,
    ) -> None:
        self._dtype = host.dtype
        self._host = host
        self._device = device
        self._accumulate = accumulate
        self._allocate = allocate
        self._training = False
        self.layers = [state for state in host.layers if state.on_device]
        for state in self.layers:
            name = f"weights of {state.layout.name or 'the root'}"
            state.weights = device.allocate(state.layout.numel, self._dtype, name)

    def adopt(
        self, index: int, parameters: Sequence[nn.Parameter], source: WeightSource | None = None
    ) -> None:
        """Copy `parameters` (in the layout's order) into the layer's weights, cast to their dtype,
        through host memory of one layer; those on the meta device are read from `source`.
        """
        state = self._host.layers[index]
        passing = self._allocate(state.layout.numel, self._dtype)
        fill(passing, state.layout, parameters, source)
        self._device.copy_now(state.weights, passing)

    def take(self, index: int) -> None:
        """Move a host layer here between two steps, with all that it has; its host memory is given
        back, but for what the model's parameters still show.
        """
        state, left = self._host.layers[index], self._host.give_up(index)
        state.weights = self._moved(left.weights, f"weights of {state.layout.name or 'the root'}")
        if left.exp_avg is not None and left.exp_avg_sq is not None:
            if left.low is not None:
                state.low = self._moved(left.low, "masters of resident layers")
            state.exp_avg = self._moved(left.exp_avg, "moments of resident layers")
            state.exp_avg_sq = self._moved(left.exp_avg_sq, "moments of resident layers")
            if self._accumulate:
                numel = state.layout.trainable_numel
                state.accumulated = self._zeros(numel, torch.float32, "accumulated gradients")
        self.layers.append(state)
        self.layers.sort(key=lambda one: one.layout.index)

    def _moved(self, array: torch.Tensor, purpose: str) -> torch.Tensor:
        there = self._device.allocate(array.numel(), array.dtype, purpose)
        self._device.copy_now(there, array)
        return there

    def prepare_training(self) -> None:
        """Make masters, moments and accumulators; called at every backward, works at the first."""
        if self._training:
            return
        low_dtype = LOW_DTYPE[self._dtype]
        for state in self.layers:
            numel = state.layout.trainable_numel
            # What an interrupt ended goes on where it was.
            if low_dtype is not None:
                if state.low is None:
                    state.low = self._zeros(numel, low_dtype, "masters")
                self._host.restart_master(state.layout.index)
            if state.exp_avg is None:
                state.exp_avg = self._zeros(numel, torch.float32, "moments")
            if state.exp_avg_sq is None:
                state.exp_avg_sq = self._zeros(numel, torch.float32, "moments")
            if self._accumulate and state.accumulated is None:
                state.accumulated = self._zeros(numel, torch.float32, "accumulated gradients")
        self._training = True

    def _zeros(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        return self._device.allocate(numel, dtype, f"{purpose} of resident layers").zero_()

    def give_back(self) -> None:
        """The device's work has ended: every layer's weights move to host memory, their own."""
        for state in self.layers:
            weights = self._allocate(state.layout.numel, self._dtype)
            self._device.copy_now(weights, state.weights)
            mine = (state.weights, state.low, state.exp_avg, state.exp_avg_sq, state.accumulated)
            self._device.release(*(array for array in mine if array is not None))
            state.weights = weights
            state.low = state.exp_avg = state.exp_avg_sq = state.accumulated = None
