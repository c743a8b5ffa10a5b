"""Where each layer's parameters point: at a slot, at a slab, or for good at the device.

Owns the views. Never copies a byte. Entered by the training thread, and by autograd's in backward.

[Note: other memory] `model.to(...)`, `model.half()`, `p.data = values` and cuDNN's flattening of
recurrent weights point a parameter elsewhere, and what is written there would be neither trained
nor used. It is noticed where the parameter is moved next. The same values are harmless; others are
refused, since the memory they displaced may be somebody's backup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState, view

_address = torch.Tensor.data_ptr


class _Views(NamedTuple):
    """Of one layer's parameters in one place."""

    tensors: list[torch.Tensor]
    addresses: tuple[int, ...]


class Bindings:
    """`parameters[i]` are the parameters of layer i in the layout's order."""

    def __init__(
        self, layers: Sequence[LayerState], parameters: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        self._layers = layers
        self._parameters = parameters
        # Where each layer's parameters point, and the views that they take there, by address.
        self._bound = [-1] * len(layers)
        self._views: list[dict[int, _Views]] = [{} for _ in layers]
        self._addresses: list[Sequence[int]] = [() for _ in layers]  # of each parameter, as bound
        self._views_at: dict[int, list[torch.Tensor]] = {}  # of all layers, by the same address

    def bind(self, layer: int, flat: torch.Tensor) -> None:
        """Point the layer's parameters at their places in `flat`."""
        address = flat.data_ptr()
        self.check(layer)
        if self._bound[layer] == address:
            return
        views = self._views[layer].get(address)
        if views is None:  # slots and slabs are few and stay: each view is made once
            tensors = [view(flat, part) for part in self._layers[layer].layout.slices]
            views = _Views(tensors, tuple(map(_address, tensors)))
            self._views[layer][address] = views
            self._views_at.setdefault(address, []).extend(tensors)
        self._forget(layer)  # an interrupt may leave some of them here and some there
        for parameter, values in zip(self._parameters[layer], views.tensors, strict=True):
            parameter.data = values
        self._addresses[layer] = views.addresses
        self._bound[layer] = address

    def point(self, layer: int, flat: torch.Tensor) -> None:
        """As `bind`, wherever the parameters point: an interrupt may have left them anywhere."""
        self._forget(layer)
        self.bind(layer, flat)

    def _forget(self, layer: int) -> None:
        self._addresses[layer] = ()
        self._bound[layer] = -1

    def views_at(self, address: int) -> list[torch.Tensor]:
        """Every view that is held of the memory at this address."""
        return self._views_at.get(address, [])

    def check(self, layer: int) -> None:
        """ConfigError when a parameter points elsewhere, at other values ([Note: other memory])."""
        expected = self._addresses[layer]
        if not expected or tuple(map(_address, self._parameters[layer])) == expected:
            return
        for k, (parameter, address) in enumerate(
            zip(self._parameters[layer], expected, strict=True)
        ):
            if parameter.data_ptr() != address:
                self._take_back(layer, k, parameter)

    def _take_back(self, layer: int, k: int, parameter: nn.Parameter) -> None:
        own, other = self._views[layer][self._bound[layer]].tensors[k], parameter.data
        parameter.data = own
        same = other.dtype is own.dtype and other.shape == own.shape
        if not same or not torch.equal(other.to(own.device), own):
            name = self._layers[layer].layout.slices[k].name
            raise ConfigError(
                f"{name} was pointed at other memory with other values (p.data = ..., "
                "model.half(), model.to(dtype)) while an engine moves it: write into the parameter "
                "instead (with torch.no_grad(): p.copy_(values)), or use load_state_dict"
            )

    def rest(self, layer: int) -> None:
        """Point the layer's parameters at its own arrays: on the host, or on the device when it is
        updated there.
        """
        self.bind(layer, self._layers[layer].weights)

    def rest_all(self) -> None:
        """Point every parameter at its layer's own arrays, and keep no other memory alive: slots,
        or files that are mapped."""
        for layer in range(len(self._layers)):
            self._addresses[layer] = ()
            self.rest(layer)
            self._views[layer].clear()
        self._views_at.clear()
