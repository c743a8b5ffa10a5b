"""Where each layer's parameters point: at a slot, at a slab, or for good at the device.

Owns the views, and for each layer: whether its parameters are hidden until their newest values are
there (`patches.parameters`), how often they were written in place, and whether a program keeps an
alias of them. Never copies a byte. Entered by the training thread, and by autograd's in backward.

[Note: other memory] `model.to(...)`, `model.half()`, `p.data = values` and cuDNN's flattening of
recurrent weights point a parameter elsewhere, and what is written there would be neither trained
nor used. It is noticed where the parameter is moved next. The same values are harmless; others are
refused, since the memory they displaced may be somebody's backup.

[Note: a storage of their own] `p.data`, `p.detach()`, a view, a state dict and a NumPy array show
the memory itself: whoever keeps one reads it whenever he likes, and no parameter is asked. A
storage counts its references. So where parameters are to be seen between steps, at rest and in a
resident layer's slot, their views are of a storage that nobody else here refers to: a reference too
many is an alias.

[Note: aliases of a slot] When a slot is given to another layer, nothing of the user's may refer to
its memory: whoever reads it later would read that layer's weights, silently. What autograd saves
comes through our hooks and becomes a handle, and parameters point elsewhere by then. What is left
is a view that a custom Function keeps as an attribute, that hooks inside the model packed, that a
closure or a module holds: `refuse_aliases` counts references when the slot is released.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Container, Sequence
from functools import partial

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState, ParameterPlace
from stronghold.streaming.patches.autograd import without_torch_function
from stronghold.streaming.patches.parameters import hide, point, show
from stronghold.streaming.patches.tensors import (
    num_references,
    storage_address,
    version_of,
    with_own_storage,
)

# What may hold a view, and lets go of it: a lane, just after it has said that it is done; and what
# hangs in a cycle, young or old, and is read by nobody.
_WAITS: tuple[Callable[[], object], ...] = (
    partial(time.sleep, 0.0002),
    partial(time.sleep, 0.001),
    partial(gc.collect, 1),
    partial(time.sleep, 0.02),
    gc.collect,
    partial(time.sleep, 0.2),
)


def refuse_aliases(state: LayerState, slot: torch.Tensor, ours: Sequence[torch.Tensor]) -> None:
    """ConfigError when anything but `slot` and `ours`, views of it, holds the slot's memory."""
    if slot.is_meta:  # of a simulated device
        return
    storage = slot.untyped_storage()
    expected = len(ours) + 2  # the slot, and the storage that is asked
    if num_references(storage_address(storage)) <= expected:
        return
    for wait in _WAITS:
        wait()
        if num_references(storage_address(storage)) <= expected:
            return
    raise ConfigError(_message(state, _views(storage, {id(slot), *map(id, ours)})))


def _views(storage: torch.UntypedStorage, known: set[int]) -> list[torch.Tensor]:
    found = []
    for held in gc.get_objects():
        if issubclass(type(held), torch.Tensor) and id(held) not in known:
            with contextlib.suppress(RuntimeError):  # a tensor without a storage
                if held.untyped_storage().data_ptr() == storage.data_ptr():
                    found.append(held)
    return found


def _message(state: LayerState, views: list[torch.Tensor]) -> str:
    bytes_of = state.maps["weights"].bytes_of
    places = [
        (part.name, bytes_of(part.offset, part.offset + part.numel)) for part in state.layout.slices
    ]
    starts = [view.storage_offset() * view.element_size() for view in views]
    names = {name for name, place in places if any(place.start <= at < place.stop for at in starts)}
    return (
        f"{', '.join(sorted(names)) or state.layout.name}: a view (of weight.t(), "
        "weight.detach() or weight.data, say) is still held after the block's forward or backward, "
        "in memory that the next layer takes: read later it would be another layer's weights. In a "
        "torch.autograd.Function use ctx.save_for_backward, not an attribute of ctx, or keep the "
        "parameter itself and make the view in backward; copy what is kept otherwise "
        "(weight.detach().clone()); or let the weights stay on the gpu: "
        'stronghold.resident_layers: "all"'
    )


_unasked = without_torch_function  # those that are hidden do not wait for us
_address = torch.Tensor.data_ptr


class Bindings:
    """Parameters of `resident` layers are bound to memory of their own alone."""

    def __init__(self, layers: Sequence[LayerState], resident: Container[int]) -> None:
        self._layers, self._resident = layers, resident
        for state in layers:
            views = state.views
            views.places, views.place = {}, None  # slots and slabs are few, and stay
            views.hidden, views.version_sum = False, 0
            views.epoch += 1  # a graph of an earlier runtime's is refused, whatever it resolves to
        self._views_at: dict[int, list[torch.Tensor]] = {}  # of all layers, of slots they share

    def bind(self, layer: int, flat: torch.Tensor) -> None:
        """Point the layer's parameters at their places in `flat`."""
        self.check(layer)
        state, address = self._layers[layer], flat.data_ptr()
        place = state.views.places.get(address)
        if place is None:
            place = state.views.places[address] = self._make_place(state, flat)
        if state.views.place is place:
            return
        state.views.place = None
        with _unasked():
            for parameter, values in zip(state.parameters, place.views, strict=True):
                point(parameter, values)
        state.views.place = place

    def _make_place(self, state: LayerState, flat: torch.Tensor) -> ParameterPlace:
        slices, weights, address = state.layout.slices, state.maps["weights"], flat.data_ptr()
        storage, references = None, 0
        if state.index not in self._resident and address != state.weights.data_ptr():
            views = [weights.parameter(flat, part) for part in slices]
            self._views_at.setdefault(address, []).extend(views)
        else:
            if not flat.is_meta:  # of a simulated device: there is nothing to see
                flat = with_own_storage(flat)  # [Note: a storage of their own]
            views = [weights.parameter(flat, part) for part in slices]
            storage = storage_address(flat.untyped_storage())
            del flat
            references = num_references(storage)
        return ParameterPlace(views, tuple(map(_address, views)), storage, references)

    def point(self, layer: int, flat: torch.Tensor) -> None:
        """As `bind`, wherever the parameters point: an interrupt may have left them anywhere."""
        self._layers[layer].views.place = None
        self.bind(layer, flat)

    def views_at(self, address: int) -> list[torch.Tensor]:
        """Every view that is held of the slot at this address."""
        return self._views_at.get(address, [])

    def check(self, layer: int) -> None:
        """ConfigError when a parameter points elsewhere, at other values ([Note: other memory])."""
        state = self._layers[layer]
        place = state.views.place
        with _unasked():
            if place is None or tuple(map(_address, state.parameters)) == place.addresses:
                return
            for k, (parameter, own) in enumerate(zip(state.parameters, place.views, strict=True)):
                if parameter.data_ptr() != place.addresses[k]:
                    _take_back(state.layout.slices[k].name, parameter, own)

    def rest(self, layer: int) -> None:
        """Point the layer's parameters at its own arrays: on the host, or on the device when it is
        updated there."""
        self.bind(layer, self._layers[layer].weights)

    def rest_all(self) -> None:
        """Point every parameter at its layer's own arrays, and keep no other memory alive: slots,
        or files that are mapped."""
        for layer, state in enumerate(self._layers):
            at_rest = state.views.places.get(state.weights.data_ptr())
            if at_rest is None or state.views.place is not at_rest:
                self.point(layer, state.weights)
            state.views.places.clear()
            state.views.place = None
        self._views_at.clear()

    def move_rest(self, layer: int, before: torch.Tensor) -> None:
        """The layer's weights lay in `before`, and lie elsewhere: parameters at rest follow."""
        place = self._layers[layer].views.place
        if place is None or place is self._layers[layer].views.places.get(before.data_ptr()):
            self.point(layer, self._layers[layer].weights)

    # -- who looks at them ------------------------------------------------------------------------
    def hide(self, layer: int) -> None:
        """The layer's newest values are on their way to where its parameters point."""
        state = self._layers[layer]
        if not state.views.hidden:
            self.written(layer)
            state.views.epoch += 1
            hide(state.parameters)
            state.views.hidden = True

    def show(self, layer: int) -> None:
        """They are there."""
        state = self._layers[layer]
        if state.views.hidden:
            state.views.hidden = False
            show(state.parameters)

    def written(self, layer: int) -> bool:
        """True if a parameter of the layer was written in place since the last call."""
        state = self._layers[layer]
        if state.views.hidden:  # else it would have been shown
            return False
        version_sum = sum(map(version_of, state.parameters))
        is_changed: bool = version_sum != state.views.version_sum
        state.views.version_sum = version_sum
        state.views.epoch += is_changed
        return is_changed

    def version_sum(self, layer: int) -> int:
        """Return the sum of the versions of the layer's parameters (counts of writes in place)."""
        with _unasked():
            return sum(map(version_of, self._layers[layer].parameters))

    def is_seen(self, layer: int) -> bool:
        """True if a program keeps an alias of the layer's weights, where it rests or in a slot of
        its own. The program may write through it, and must see new values in it."""
        return self.aliased_at_rest(layer) or self.aliased(layer)

    def aliased(self, layer: int) -> bool:
        """Whether anybody outside keeps an alias of what the parameters point at now. False for a
        slot that many layers take."""
        state = self._layers[layer]
        return _has_others(state, state.views.place)

    def aliased_at_rest(self, layer: int) -> bool:
        """The same of where a layer that is not resident rests."""
        state = self._layers[layer]
        at_rest = state.views.places.get(state.weights.data_ptr())
        return layer not in self._resident and _has_others(state, at_rest)


def _take_back(name: str, parameter: nn.Parameter, own: torch.Tensor) -> None:
    other = parameter.detach()
    point(parameter, own)
    same = other.dtype is own.dtype and other.shape == own.shape
    if other.shape != own.shape:
        raise ConfigError(
            f"{name} was given another shape while an engine moves it: got {tuple(other.shape)}, "
            f"expected {tuple(own.shape)}: call resize_token_embeddings and the like before "
            "stronghold.initialize, or after destroy() for a new engine"
        )
    if not same or not torch.equal(other.to(own.device), own):
        raise ConfigError(
            f"{name} was pointed at other memory with other values (p.data = ..., "
            "model.half(), model.to(dtype)) while an engine moves it: write into the parameter "
            "instead (with torch.no_grad(): p.copy_(values)), or use load_state_dict"
        )


def _has_others(state: LayerState, place: ParameterPlace | None) -> bool:
    if place is None or place.storage is None:
        return False
    num_bound = len(state.parameters) if place is state.views.place else 0
    return num_references(place.storage) > place.num_references + num_bound
