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
from stronghold.model.source import WeightSource
from stronghold.states import MOMENTS, SCALES, num_items

PURPOSES = {"low": "masters", "accumulated": "accumulated gradients"} | dict.fromkeys(
    (*MOMENTS, *SCALES), "moments"
)


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
        self._training = self._away = False
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
        for name, array in left.arrays().items():
            if name == "accumulated":  # between two steps there is no sum
                setattr(state, name, self._zeros(array.numel(), array.dtype, name))
            else:
                setattr(state, name, self._moved(array, f"{PURPOSES[name]} of resident layers"))
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
        sums = {"accumulated": torch.float32} if self._accumulate else {}
        for state in self.layers:
            numel = state.layout.trainable_numel
            # What an interrupt ended goes on where it was.
            for array, dtype in {**self._host.states.dtypes, **sums}.items():
                if getattr(state, array) is None:
                    setattr(state, array, self._zeros(num_items(array, numel), dtype, array))
                if array == "low":
                    self._host.restart_master(state.layout.index)
        self._training = True

    def _zeros(self, numel: int, dtype: torch.dtype, array: str) -> torch.Tensor:
        purpose = f"{PURPOSES[array]} of resident layers"
        return self._device.allocate(numel, dtype, purpose).zero_()

    def leave(self) -> None:
        """Between two steps: every array goes to host memory, until `come_back`."""
        self._away = True
        for state in self.layers:
            for name, array in {"weights": state.weights, **state.arrays()}.items():
                there = self._allocate(array.numel(), array.dtype)
                self._device.copy_now(there, array)
                setattr(state, name, there)
                self._device.release(array)

    def come_back(self) -> None:
        """What `leave` has moved is on the device again."""
        self._away = False
        for state in self.layers:
            for name, array in {"weights": state.weights, **state.arrays()}.items():
                setattr(state, name, self._moved(array, f"{name} of {state.name}"))

    def give_back(self) -> None:
        """The device's work has ended: every layer's weights move to host memory, their own."""
        for state in self.layers:
            if self._away:
                state.drop_arrays()
                continue
            weights = self._allocate(state.layout.numel, self._dtype)
            self._device.copy_now(weights, state.weights)
            self._device.release(state.weights, *state.arrays().values())
            state.weights = weights
            state.drop_arrays()
