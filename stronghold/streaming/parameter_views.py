"""Points each layer's parameters at memory: a weight slot, a host slab, or the GPU for good.

Owns the views. For each layer it knows whether parameters are hidden until their newest values are
there (`patches.parameters`), how often they were written in place, and whether a program keeps an
alias. It never copies a byte. The training thread enters, and autograd's thread in backward.

[Note: other memory]
1. `model.to(...)`, `model.half()`, `p.data = values`, or cuDNN's flattening of recurrent weights
   points a parameter at other memory.
2. Hazard: values that are written there would be neither trained nor used.
3. The engine notices it when it next moves the parameter. Equal values are harmless. Other values
   are refused: the memory that they displaced may be a backup of the program.
4. Equal values on another device take no memory: `patches.parameters` drops them at once ([Note:
   moved]). A program that keeps such a copy and writes into it is refused, too.

[Note: a storage of their own]
1. `p.data`, `p.detach()`, a view, a state dict and a NumPy array are aliases of the memory.
2. Hazard: a program reads an alias at any time, and no hook sees that.
3. A storage counts its references. So each view that a program can see between steps, at rest and
   in a resident layer's slot, has a storage to which no other object of ours refers.
4. A further reference is an alias.
5. The storage is as large as the parameter. So a program that saves or pickles the parameter, or an
   alias, saves no other one. torch.save refuses one storage with two dtypes, such as that of a
   layer with bf16 weights and fp32 adapters.

[Note: aliases of a slot]
1. A slot goes from layer A to layer B.
2. Hazard: a program keeps a view of A's weights, and silently reads B's.
3. Tensors that autograd saves come through our hooks and become handles. Parameters point elsewhere
   by then. A view may still be an attribute of a custom Function, packed by hooks inside the model,
   or held by a closure or a module.
4. `refuse_aliases` counts references when the slot is released.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Container, Sequence
from functools import partial

import torch

from stronghold.errors import ConfigError
from stronghold.memory.layer import CopyElsewhere, LayerState, OwnStorage, ParameterPlace
from stronghold.streaming.patches.autograd import without_torch_function
from stronghold.streaming.patches.parameters import hide, point, show
from stronghold.streaming.patches.tensors import (
    num_references,
    storage_address,
    version_of,
    with_own_storage,
)

# A lane may hold a view for a moment after its operation is done. A cycle of garbage may hold one,
# too. So the references are counted again after each of these.
_WAITS: tuple[Callable[[], object], ...] = (
    partial(time.sleep, 0.0002),
    partial(time.sleep, 0.001),
    partial(gc.collect, 1),
    partial(time.sleep, 0.02),
    gc.collect,
    partial(time.sleep, 0.2),
)


VIEW_IS_HELD = (
    "{names}: a view (of weight.t(), weight.detach() or weight.data, say) is still held after the "
    "block's forward or backward. Other weights take its memory next, and a later read would find "
    "these. In a torch.autograd.Function use ctx.save_for_backward, not an "
    "attribute of ctx, or keep the parameter itself and make the view in backward; copy what is "
    "kept otherwise (weight.detach().clone()); or let the gpu keep and update the weights: "
    'stronghold.resident_layers: "all", "resident_updates": "gpu"'
)


def refuse_aliases(state: LayerState, slot: torch.Tensor, ours: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError if an object holds the slot's memory beside `slot` and `ours`, its
    views."""
    if held_elsewhere(slot, len(ours)):
        storage = slot.untyped_storage()
        raise ConfigError(_message(state, views_in(storage, {id(slot), *map(id, ours)})))


def held_elsewhere(memory: torch.Tensor, num_ours: int) -> bool:
    """True if an object holds the memory's storage beside `memory` and `num_ours` views of it."""
    if num_elsewhere(memory, num_ours) == 0:
        return False
    for wait in _WAITS:
        wait()
        if num_elsewhere(memory, num_ours) == 0:
            return False
    return True


def num_elsewhere(memory: torch.Tensor, num_ours: int) -> int:
    """The number of objects that hold the memory's storage beside `memory` and `num_ours` views."""
    storage = memory.untyped_storage()  # is one more
    return max(0, num_references(storage_address(storage)) - num_ours - 2)


def views_in(storage: torch.UntypedStorage, known: set[int]) -> list[torch.Tensor]:
    """Return the tensors in `storage` whose ids are not `known`."""
    views = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and id(candidate) not in known:
            # A tensor of any library may have no storage. A hidden one is not to be shown.
            with contextlib.suppress(Exception), without_torch_function():
                if candidate.untyped_storage().data_ptr() == storage.data_ptr():
                    views.append(candidate)
    return views


def _message(state: LayerState, views: list[torch.Tensor]) -> str:
    bytes_of = state.maps["weights"].bytes_of
    view_starts = [view.storage_offset() * view.element_size() for view in views]
    names = set()
    for parameter in state.layout.slices:
        place = bytes_of(parameter.offset, parameter.offset + parameter.numel)
        if any(place.start <= start < place.stop for start in view_starts):
            names.add(parameter.name)
    return VIEW_IS_HELD.format(names=", ".join(sorted(names)) or state.layout.name)


_unasked = without_torch_function  # hidden parameters do not wait for the engine
_address = torch.Tensor.data_ptr


class Bindings:
    """Binds parameters to memory. Parameters of `resident` layers have memory of their own."""

    def __init__(self, layers: Sequence[LayerState], resident: Container[int]) -> None:
        self._layers, self._resident = layers, resident
        for state in layers:
            views = state.views
            views.places, views.place = {}, None  # slots and slabs are few, and stay
            views.hidden, views.version_sum = False, 0
            views.epoch += 1  # graphs of an earlier plan are refused
        # views of shared slots, by address
        self._views_at: dict[int, list[torch.Tensor]] = {}

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
            for position, aliases in state.aliases.items():
                for alias in aliases:
                    point(alias, place.views[position])
        state.views.place = place

    def _make_place(self, state: LayerState, flat: torch.Tensor) -> ParameterPlace:
        slices, weights, address = (state.layout.slices, state.maps["weights"], flat.data_ptr())
        storages: tuple[OwnStorage, ...] = ()
        views = [weights.parameter(flat, part) for part in slices]
        if state.index not in self._resident and address != state.weights.data_ptr():
            self._views_at.setdefault(address, []).extend(views)
        else:
            views = [_in_own_storage(view) for view in views]
            storages = tuple(map(_own_storage, views))
        return ParameterPlace(views, tuple(map(_address, views)), storages)

    def point(self, layer: int, flat: torch.Tensor) -> None:
        """Bind as `bind` does, from any memory: an interrupt may have left parameters anywhere."""
        self._layers[layer].views.place = None
        self.bind(layer, flat)

    def views_at(self, address: int) -> list[torch.Tensor]:
        """Return the views of the slot at this address."""
        return self._views_at.get(address, [])

    def check(self, layer: int) -> None:
        """Raise ConfigError if a parameter points at other memory with other values ([Note: other
        memory])."""
        state = self._layers[layer]
        place = state.views.place
        if state.views.copies:
            _refuse_written_copies(state)
        with _unasked():
            if place is None or tuple(map(_address, state.parameters)) == place.addresses:
                return
            for k, (parameter, view) in enumerate(zip(state.parameters, place.views, strict=True)):
                if parameter.data_ptr() != place.addresses[k]:
                    _take_back(state.layout.slices[k].name, parameter, view)

    def note_copy(self, layer: int, parameter: torch.Tensor, copy: torch.Tensor) -> None:
        """A program pointed the parameter at a copy of its values on another device. It is not kept
        alive."""
        state = self._layers[layer]
        names = [
            part.name
            for held, part in zip(state.parameters, state.layout.slices, strict=True)
            if held is parameter
        ]
        noted = CopyElsewhere((*names, state.name)[0], weakref.ref(copy), version_of(copy))
        state.views.copies.append(noted)

    def rest(self, layer: int) -> None:
        """Point the layer's parameters at its arrays: on the host, or on the device if the layer is
        updated there."""
        self.bind(layer, self._layers[layer].weights)

    def rest_all(self) -> None:
        """Point every parameter at its layer's arrays. Keep no slot and no mapped file alive."""
        for layer, state in enumerate(self._layers):
            at_rest = state.views.places.get(state.weights.data_ptr())
            if at_rest is None or state.views.place is not at_rest:
                self.point(layer, state.weights)
            state.views.places.clear()
            state.views.place = None
        self._views_at.clear()

    def move_rest(self, layer: int, before: torch.Tensor) -> None:
        """Point parameters at rest at the layer's weights, which lay in `before`."""
        place = self._layers[layer].views.place
        if place is None or place is self._layers[layer].views.places.get(before.data_ptr()):
            self.point(layer, self._layers[layer].weights)

    # -- readers and writers ----------------------------------------------------------------------
    def hide(self, layer: int) -> None:
        """Make readers of the layer's parameters wait: newer values are on their way."""
        state = self._layers[layer]
        if not state.views.hidden:
            self.written(layer)
            state.views.epoch += 1
            hide(state.parameters)
            state.views.hidden = True

    def show(self, layer: int) -> None:
        """Let readers of the layer's parameters go on: the newest values are there."""
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
        """Sum of the versions of the layer's parameters. torch counts writes in place."""
        with _unasked():
            return sum(map(version_of, self._layers[layer].parameters))

    def is_seen(self, layer: int) -> bool:
        """True if a program keeps an alias of the layer's weights, at rest or in a slot of its own.

        The program may write through the alias, and must see new values in it.
        """
        return self.aliased_at_rest(layer) or self.aliased(layer)

    def aliased(self, layer: int) -> bool:
        """True if a program keeps an alias of the memory that the parameters point at now. False
        for a slot that layers share."""
        state = self._layers[layer]
        return _has_others(state, state.views.place)

    def aliased_at_rest(self, layer: int) -> bool:
        """True if a program keeps an alias of the arrays at rest of a layer that is not
        resident."""
        state = self._layers[layer]
        at_rest = state.views.places.get(state.weights.data_ptr())
        return layer not in self._resident and _has_others(state, at_rest)


def _refuse_written_copies(state: LayerState) -> None:
    """Raise ConfigError if a program has written into a copy that a parameter was pointed at."""
    copies, state.views.copies = state.views.copies, []
    for noted in copies:
        copy = noted.copy()
        if copy is None:
            continue
        if version_of(copy) != noted.version:
            raise ConfigError(
                f"{noted.name} was pointed at a copy on {copy.device}, and the copy was written: "
                "the engine keeps the parameter where it is, so what was written is lost. Write "
                "into the parameter instead (with torch.no_grad(): p.copy_(values))"
            )
        state.views.copies.append(noted)


def _take_back(name: str, parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Point a parameter at `view` again. Raise ConfigError if it had other values."""
    other = parameter.detach()
    point(parameter, view)
    same = other.dtype is view.dtype and other.shape == view.shape
    if other.shape != view.shape:
        raise ConfigError(
            f"{name} was given another shape while an engine moves it: got {tuple(other.shape)}, "
            f"expected {tuple(view.shape)}: call resize_token_embeddings and the like before "
            "stronghold.initialize, or after destroy() for a new engine"
        )
    if not same or not torch.equal(other.to(view.device), view):
        raise ConfigError(
            f"{name} was pointed at other memory with other values (p.data = ..., "
            "model.half(), model.to(dtype)) while an engine moves it: write into the parameter "
            "instead (with torch.no_grad(): p.copy_(values)), or use load_state_dict"
        )


def _has_others(state: LayerState, place: ParameterPlace | None) -> bool:
    """True if an object outside refers to a storage of `place`."""
    if place is None:
        return False
    is_bound = place is state.views.place
    for position, storage in enumerate(place.storages):
        num_bound = 1 + len(state.aliases.get(position, ())) if is_bound else 0
        if num_references(storage.address) > storage.num_references + num_bound:
            return True
    return False


def _in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory in a storage of its own ([Note: a storage of their own])."""
    with torch.inference_mode(False):  # autograd must be able to save it
        return with_own_storage(view)


def _own_storage(view: torch.Tensor) -> OwnStorage:
    address = storage_address(view.untyped_storage())
    return OwnStorage(address, num_references(address))
