"""The arrays of layers: weights, remainders, moments and gradients, in RAM or on the device.

It makes and frees them. `pieces` is the one way to the arrays of an update.

    array                  of the trained parameters
    weights, low, moments  the optimizer's state (`optim.states`). The weights lie in the layer's
                           buffer, whose rest are the frozen parameters
    gradients              as they came, or their fp32 sums over micro-batches; never both
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from stronghold.devices.base import Device
from stronghold.errors import ConfigError
from stronghold.memory.slab import map_slab
from stronghold.optim.states import num_items
from stronghold.train.layer import Layer

Piece = tuple[int, dict[str, Tensor]]
"""The first element of a piece in its layer, and the arrays from that element on, by name."""


class Arrays:
    """Makes the arrays of `layers`, and moves the parameters into them.

    `accumulates`: gradients are summed in fp32. Layers are taken over one by one, so RAM never has
    two copies of the model.
    """

    def __init__(self, device: Device, layers: Sequence[Layer], *, accumulates: bool) -> None:
        self._device, self._accumulates = device, accumulates
        self._arrays: dict[tuple[Layer, str], Tensor] = {}
        self._buffers: dict[Layer, Tensor] = {}
        self._pinned: list[Tensor] = []
        self._on_device: list[Tensor] = []
        # The parameters' views of their layer's buffer.
        self.at_rest: dict[Layer, list[Tensor]] = {}
        for layer in layers:
            self._take_over(layer)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of gradients that wait for the update of parameters of `dtype`."""
        return torch.float32 if self._accumulates else dtype

    def _take_over(self, layer: Layer) -> None:
        """Move the layer's parameters into its buffer. Torch frees the memory that they had."""
        buffer = self._buffers[layer] = self._zeros(layer, "weights", layer.num_bytes, torch.uint8)
        views = self.at_rest[layer] = layer.views(buffer)
        for parameter, view in zip(layer.parameters, views, strict=True):
            view.copy_(parameter.detach())
        layer.bind(views)
        if layer.states is None:
            return
        for array, dtype in layer.states.dtypes.items():
            if array == "weights":
                slab = buffer[: layer.trained_bytes].view(dtype)
            else:
                slab = self._zeros(layer, array, num_items(array, layer.trained_numel), dtype)
            self._arrays[layer, array] = slab
        # Zeros are a fresh state. But in fp16 "low" is the master itself.
        if layer.states.low is torch.float32:
            self.of(layer, "low").copy_(self.of(layer, "weights"))
        numel, dtype = layer.trained_numel, self.gradient_dtype(layer.dtype)
        self._arrays[layer, "gradients"] = self._zeros(layer, "gradients", numel, dtype)

    def _zeros(self, layer: Layer, array: str, numel: int, dtype: torch.dtype) -> Tensor:
        if layer.is_on_gpu:
            purpose = f"{array} of {layer.name}"
            memory = self._device.memory.allocate_zeros(numel * dtype.itemsize, purpose)
            self._on_device.append(memory)
            return memory.view(dtype)
        if array in ("weights", "gradients"):  # the link copies no other arrays
            return self.pinned(numel, dtype)
        slab = map_slab(numel, dtype)
        self._device.first_touch.add(slab)
        return slab

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that a stream copies from and to without the host."""
        slab = map_slab(numel, dtype)
        if numel:
            self._device.pinning.pin(slab)
            self._pinned.append(slab)
        return slab

    def of(self, layer: Layer, array: str) -> Tensor:
        """One array of a layer, flat."""
        return self._arrays[layer, array]

    def buffer(self, layer: Layer) -> Tensor:
        """The bytes of all parameters, as a slot has them: uint8 [num_bytes]."""
        return self._buffers[layer]

    def gradient(self, layer: Layer, position: int) -> Tensor:
        """The place of one trained parameter's gradient, flat."""
        begin = layer.element(position)
        return self.of(layer, "gradients")[begin : begin + layer.parameters[position].numel()]

    def adopt_moved(self, layer: Layer) -> bool:
        """Copy parameters that the program has pointed elsewhere (`parameter.data = ...`), and
        point them back. Returns whether there were any. ConfigError for another shape."""
        of_layer = zip(layer.names, layer.parameters, self.at_rest[layer], strict=True)
        moved = [each for each in of_layer if each[1].data_ptr() != each[2].data_ptr()]
        if moved:
            layer.weight_record.wait()
        for name, parameter, view in moved:
            if parameter.shape != view.shape:
                raise ConfigError(
                    f"{name}.data has the shape {list(parameter.shape)} now, expected "
                    f"{list(view.shape)}, which its masters and moments have"
                )
            view.copy_(parameter.detach())
            parameter.data = view
        return bool(moved)

    def pieces(self, layer: Layer, arrays: Iterable[str]) -> Iterator[Piece]:
        """Yield the layer's arrays of these names, piece by piece, each in memory until the next.
        Arrays in memory are one piece."""
        yield 0, {array: self.of(layer, array) for array in arrays}

    def close(self) -> None:
        """Free all arrays. Parameters keep the buffers of their layers, in host memory."""
        for layer, views in self.at_rest.items():
            if layer.is_on_gpu:
                buffer = torch.empty(layer.num_bytes, dtype=torch.uint8)
                self._device.copy_now(buffer, self.buffer(layer))
                views = layer.views(buffer)
            layer.bind(views)
        for slab in self._pinned:
            self._device.pinning.unpin(slab)
        self._device.memory.release(*self._on_device)
        self._on_device.clear()
        self._pinned.clear()
        self._arrays.clear()
        self._buffers.clear()
        self.at_rest.clear()
