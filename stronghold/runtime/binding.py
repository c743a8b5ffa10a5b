"""Where each layer's parameters point: at a slot, at a slab, or for good at the device.

Owns the views, and what is known of those who look at them: whether the parameters are hidden until
their newest values are there (`reads`), how often they were written in place, and whether somebody
outside keeps an alias. Never copies a byte. Entered by the training thread, and by autograd's in
backward.

[Note: other memory] `model.to(...)`, `model.half()`, `p.data = values` and cuDNN's flattening of
recurrent weights point a parameter elsewhere, and what is written there would be neither trained
nor used. It is noticed where the parameter is moved next. The same values are harmless; others are
refused, since the memory they displaced may be somebody's backup.

[Note: a storage of their own] `p.data`, `p.detach()`, a view, a state dict and a NumPy array show
the memory itself: whoever keeps one reads it whenever he likes, and no parameter is asked. A
storage counts its references. So where parameters are to be seen between steps, at rest and in a
resident layer's slot, their views are of a storage that nobody else here refers to: a reference too
many is an alias. Slots that many layers take are looked at when they are released (`aliases`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState, view
from stronghold.runtime.reads import hide, point, show

_version = attrgetter("_version")
_unasked = torch._C.DisableTorchFunctionSubclass  # those that are hidden do not wait for us
_address = torch.Tensor.data_ptr


class _Views(NamedTuple):
    """Of one layer's parameters in one place."""

    tensors: list[torch.Tensor]
    addresses: tuple[int, ...]


class Bindings:
    """`parameters[i]` are the parameters of layer i in the layout's order; those of `resident`
    layers are bound to memory of their own alone.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        parameters: Sequence[Sequence[nn.Parameter]],
        resident: Container[int] = (),
    ) -> None:
        self._layers = layers
        self._parameters = parameters
        self._resident = resident
        # Where each layer's parameters point, and the views that they take there, by address.
        self._bound = [-1] * len(layers)
        self._views: list[dict[int, _Views]] = [{} for _ in layers]
        self._addresses: list[Sequence[int]] = [() for _ in layers]  # of each parameter, as bound
        self._views_at: dict[int, list[torch.Tensor]] = {}  # of all layers, of slots they share
        # Per layer, the storages that its views alone refer to, by address, and how often they do.
        self._own: list[dict[int, tuple[int, int]]] = [{} for _ in layers]
        self._hidden: set[int] = set()
        self._versions = [0] * len(layers)  # the sum of its parameters', as last seen
        self.epochs = [0] * len(layers)  # how often the layer's values changed

    def bind(self, layer: int, flat: torch.Tensor) -> None:
        """Point the layer's parameters at their places in `flat`."""
        address = flat.data_ptr()
        self.check(layer)
        if self._bound[layer] == address:
            return
        views = self._views[layer].get(address)
        if views is None:  # slots and slabs are few and stay: each view is made once
            tensors = self._make_views(layer, flat)
            views = _Views(tensors, tuple(map(_address, tensors)))
            self._views[layer][address] = views
        self._forget(layer)  # an interrupt may leave some of them here and some there
        with _unasked():
            for parameter, values in zip(self._parameters[layer], views.tensors, strict=True):
                point(parameter, values)
        self._addresses[layer] = views.addresses
        self._bound[layer] = address

    def _make_views(self, layer: int, flat: torch.Tensor) -> list[torch.Tensor]:
        slices, address = self._layers[layer].layout.slices, flat.data_ptr()
        if layer not in self._resident and address != self._layers[layer].weights.data_ptr():
            views = [view(flat, part) for part in slices]
            self._views_at.setdefault(address, []).extend(views)
            return views
        if not flat.is_meta:  # of a simulated device: there is nothing to see
            flat = from_dlpack(torch._C._to_dlpack(flat))  # [Note: a storage of their own]
        views = [view(flat, part) for part in slices]
        storage = flat.untyped_storage()._cdata
        del flat
        self._own[layer][address] = storage, _num_references(storage)
        return views

    def point(self, layer: int, flat: torch.Tensor) -> None:
        """As `bind`, wherever the parameters point: an interrupt may have left them anywhere."""
        self._forget(layer)
        self.bind(layer, flat)

    def _forget(self, layer: int) -> None:
        self._addresses[layer] = ()
        self._bound[layer] = -1

    def views_at(self, address: int) -> list[torch.Tensor]:
        """Every view that is held of the slot at this address."""
        return self._views_at.get(address, [])

    def check(self, layer: int) -> None:
        """ConfigError when a parameter points elsewhere, at other values ([Note: other memory])."""
        expected = self._addresses[layer]
        with _unasked():
            if not expected or tuple(map(_address, self._parameters[layer])) == expected:
                return
            for k, (parameter, address) in enumerate(
                zip(self._parameters[layer], expected, strict=True)
            ):
                if parameter.data_ptr() != address:
                    self._take_back(layer, k, parameter)

    def _take_back(self, layer: int, k: int, parameter: nn.Parameter) -> None:
        own, other = self._views[layer][self._bound[layer]].tensors[k], parameter.detach()
        point(parameter, own)
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
            self._own[layer].clear()
        self._views_at.clear()

    # -- who looks at them ------------------------------------------------------------------------
    def hide(self, layer: int) -> None:
        """The layer's newest values are on their way to where its parameters point."""
        if layer not in self._hidden:
            self.written(layer)
            self.epochs[layer] += 1
            hide(self._parameters[layer])
            self._hidden.add(layer)

    def show(self, layer: int) -> None:
        """They are there."""
        if layer in self._hidden:
            self._hidden.remove(layer)
            show(self._parameters[layer])

    def written(self, layer: int) -> bool:
        """Whether a parameter of the layer was written in place since this was asked last."""
        if layer in self._hidden:  # else it would have been shown
            return False
        before = self._versions[layer]
        now: int = sum(map(_version, self._parameters[layer]))
        self._versions[layer] = now
        self.epochs[layer] += now != before
        return now != before

    def aliased(self, layer: int, *, at_rest: bool = False) -> bool:
        """Whether anybody outside keeps an alias of what the parameters point at now, or of where
        they rest. False for a slot that many layers take.
        """
        bound = self._bound[layer]
        at = self._layers[layer].weights.data_ptr() if at_rest else bound
        if at not in self._own[layer]:
            return False
        storage, num_views = self._own[layer][at]
        num_bound = len(self._parameters[layer]) if at == bound else 0
        return _num_references(storage) > num_views + num_bound


def _num_references(storage: int) -> int:
    count: int = torch._C._storage_Use_Count(storage)
    return count
