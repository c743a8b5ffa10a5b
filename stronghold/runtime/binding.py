"""Where each layer's parameters point: at a slot, at a slab, or for good at the device.

Owns the views. Never copies a byte. Entered by the training thread, and by autograd's in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from stronghold.memory.layer import LayerState, view


class Bindings:
    """`parameters[i]` are the parameters of layer i in the layout's order."""

    def __init__(
        self, layers: Sequence[LayerState], parameters: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        self._layers = layers
        self._parameters = parameters
        # Where each layer's parameters point, and the views that they take there, by address.
        self._bound = [-1] * len(layers)
        self._views: list[dict[int, list[torch.Tensor]]] = [{} for _ in layers]

    def bind(self, layer: int, flat: torch.Tensor) -> None:
        """Point the layer's parameters at their places in `flat`."""
        address = flat.data_ptr()
        if self._bound[layer] == address:
            return
        views = self._views[layer].get(address)
        if views is None:  # slots and slabs are few and stay: each view is made once
            views = [view(flat, part) for part in self._layers[layer].layout.slices]
            self._views[layer][address] = views
        for parameter, values in zip(self._parameters[layer], views, strict=True):
            parameter.data = values
        self._bound[layer] = address

    def rest(self, layer: int) -> None:
        """Point the layer's parameters at its own arrays: on the host, or on the device when it is
        updated there.
        """
        self.bind(layer, self._layers[layer].weights)

    def rest_all(self) -> None:
        """Point every parameter at its layer's own arrays, and keep no other memory alive: slots,
        or files that are mapped."""
        for layer in range(len(self._layers)):
            self.rest(layer)
            self._views[layer].clear()
