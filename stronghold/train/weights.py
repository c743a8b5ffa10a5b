"""Weights on the device: slots, and the copies that fill them.

Streamed layers take slots of the window in turn. A resident layer keeps its own. A layer that the
device updates has its arrays in its slot, so nothing is copied.

[Note: a slot is reused]
1. A fetch reads the layer's buffer on the host, and writes the slot.
2. Compute waits for the slot's writer. The layer is HERE.
3. A release makes compute a reader of the slot. Nothing is copied back.
4. The next fetch into the slot waits for that reader.
5. A resident keeps its slot. When its host weights change, compute becomes a reader of the slot, so
   that the fetch of the new weights waits for backward, and not for the forward that follows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stronghold.devices.device import Device, timed
from stronghold.devices.fences import Fence
from stronghold.private import without_torch_function
from stronghold.telemetry.metrics import Metrics, WaitCause
from stronghold.train.aliases import num_elsewhere, refuse_aliases
from stronghold.train.arrays import Arrays
from stronghold.train.layer import Layer, Slot, WeightState
from stronghold.train.visible import Visible


class SavedWeight(NamedTuple):
    """Stands in autograd's graph for a view of a slot. The place is in elements of `dtype`, counted
    from the slot's begin."""

    layer: Layer
    version: tuple[int, int]  # of the weights that forward has used
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool  # torch has not conjugated its values yet
    is_neg: bool  # or not negated


class Weights:
    """The slots for weights. `free` and `held` are the window's: empty slots, and the layers in the
    others, the one that was fetched first in front."""

    def __init__(
        self,
        device: Device,
        arrays: Arrays,
        layers: Sequence[Layer],
        num_slots: int,
        *,
        metrics: Metrics,
        visible: Visible,
    ) -> None:
        self._device, self._arrays, self._layers = device, arrays, layers
        self._metrics, self._visible = metrics, visible
        streamed = [layer.num_bytes for layer in layers if not layer.is_resident]
        self.num_slots = num_slots if streamed else 0
        self._window = [
            Slot.allocate(device, max(streamed), f"weight slot {k}") for k in range(self.num_slots)
        ]
        self.free = list(self._window)
        self.held: list[Layer] = []
        self.num_fetches = self.fetched_bytes = 0
        residents = [layer for layer in layers if layer.is_resident]
        for layer in residents:
            layer.slot = self._slot_of_resident(layer)
            layer.slot.layer = layer
        # Slots never move, so the slot of an address is found by bisection. The memory of a layer
        # that the device updates is no copy: autograd may keep it, as in plain torch.
        copied = [layer.slot for layer in residents if not layer.is_on_gpu]
        slots = [*self._window, *(slot for slot in copied if slot is not None)]
        self._slots = sorted(slots, key=lambda slot: slot.memory.data_ptr())
        self._begins = [slot.memory.data_ptr() for slot in self._slots]
        # Storages of weights that the device updates, by address.
        self.staying = frozenset(
            layer.slot.memory.untyped_storage().data_ptr()
            for layer in residents
            if layer.is_on_gpu and layer.slot is not None
        )

    def _slot_of_resident(self, layer: Layer) -> Slot:
        if layer.is_on_gpu:
            layer.weight_state, layer.fetched = WeightState.HERE, layer.version
            return Slot(self._arrays.buffer(layer))
        layer.weight_state = WeightState.STALE
        return Slot.allocate(self._device, layer.num_bytes, f"weights of {layer.name}")

    @property
    def has_slots(self) -> bool:
        """True if weights are copied to the device: autograd must keep none of these."""
        return bool(self._slots)

    def needs_fetch(self, layer: Layer) -> bool:
        """True if the device has not the layer's newest weights, and no fetch of them is queued."""
        return layer.weight_state in (WeightState.AWAY, WeightState.STALE)

    def fetch(self, layer: Layer) -> None:
        """Queue the copy of the layer's weights to its slot, behind its last update. A streamed
        layer takes a free slot."""
        slot = layer.slot
        if slot is None:
            slot = layer.slot = self.free.pop(0)
            slot.layer = layer
            self.held.append(layer)
        elif layer.is_resident:
            self._refuse_aliases(layer, slot)
        layer.move(WeightState.COMING)
        layer.fetched = layer.version
        for begin, source, record in self._arrays.fetched(layer):
            target = slot.memory[begin : begin + source.nbytes]
            self._device.fetch.submit(
                f"fetch {layer.index}",
                partial(self._device.copy, target, source),
                reads=(record,),
                writes=(slot.record,),
                nbytes=source.nbytes,
            )
        self.num_fetches += 1
        self.fetched_bytes += layer.num_bytes

    def use(self, layer: Layer) -> None:
        """Let compute wait for the fetch of the layer, which was queued before."""
        if layer.weight_state is WeightState.COMING:
            assert layer.slot is not None
            updated = layer.weight_record.writer
            if not updated.done:
                self._metrics.waited(WaitCause.UPDATE, timed(updated.wait))
            # On every stream of compute: a chunk on another one must not read the slot earlier.
            seconds = self._device.compute.wait_everywhere(layer.slot.record.writer)
            self._metrics.waited(WaitCause.FETCH, seconds)
            layer.move(WeightState.HERE)

    def bind(self, layer: Layer) -> None:
        """Point the layer's parameters at its slot."""
        assert layer.slot is not None
        self._visible.show(layer)
        layer.bind(layer.slot.views_of(layer, layer.num_bytes))

    def moved(self, layer: Layer) -> list[str]:
        """The names of the parameters that do not point at the slot any more, though the layer is
        bound: its forward has assigned to their `.data`."""
        assert layer.slot is not None
        views = layer.slot.views_of(layer, layer.num_bytes)
        bound = zip(layer.names, layer.parameters, views, strict=True)
        return [name for name, p, view in bound if p.data_ptr() != view.data_ptr()]

    def rest(self, layer: Layer) -> None:
        """Point the layer's parameters at the host, where a program finds them outside of calls.
        Does nothing if the program has looked since they were bound: it may have written."""
        if not layer.is_seen:
            layer.bind(self._arrays.at_rest(layer))
            self._visible.hide(layer)

    def release(self, layer: Layer, *, is_checked: bool = True) -> None:
        """Give the slot of a streamed layer back. It is free once compute has passed.

        is_checked  ConfigError if the program keeps a view of the slot
        """
        slot, layer.slot = layer.slot, None
        assert slot is not None
        was_read = layer.weight_state is WeightState.HERE
        if was_read:
            slot.record.read(self._device.compute.record(f"release {layer.index}"))
            self._device.memory.poison(slot.memory)
        layer.move(WeightState.AWAY)
        slot.layer = None
        self.held.remove(layer)
        self.free.append(slot)  # the slot that was freed last is taken last: it may still be read
        if was_read and is_checked:
            self._refuse_aliases(layer, slot)

    def _refuse_aliases(self, layer: Layer, slot: Slot) -> None:
        """ConfigError if the program keeps a view of the slot, which the layer has had."""
        if num_elsewhere(slot.memory, slot.num_views) == 0:
            return
        views = slot.views.get(layer, [])
        with without_torch_function():  # hidden parameters need not be shown
            bound = zip(layer.parameters, views, strict=False)
            is_bound = any(p.data_ptr() == view.data_ptr() for p, view in bound if p.numel())
        if is_bound:
            self.rest(layer)  # backward reads it no more, or binds it again
        refuse_aliases(layer, slot)

    def refresh(self, layer: Layer) -> None:
        """Take over what the program may have written into the layer's parameters at rest, and hide
        them. It has looked at them, or kept an alias whose writes change the version."""
        if layer.is_seen:
            self._arrays.adopt_moved(layer)
            self._visible.hide(layer)
        if layer.slot is not None and (layer.is_seen or layer.fetched != layer.version):
            self.outdate(layer, self._device.compute.record(f"write {layer.index}"))
            if layer.is_on_gpu:
                layer.fetched = layer.version
        layer.is_seen = False

    def outdate(self, layer: Layer, reader: Fence) -> None:
        """The host's weights of the layer change, or did: the device's are old. `reader`: compute
        that may still read them."""
        if layer.is_on_gpu:
            return
        if not layer.is_resident:
            if layer.slot is not None:
                self.release(layer)
        elif layer.weight_state is not WeightState.STALE:
            assert layer.slot is not None
            layer.slot.record.read(reader)
            layer.move(WeightState.STALE)

    def has_memory_of(self, tensor: Tensor) -> bool:
        """True if the tensor is a view of a slot, to which weights are copied."""
        return tensor.layout is torch.strided and self.saved(tensor) is not None

    def saved(self, tensor: Tensor) -> SavedWeight | None:
        """The handle of a tensor that autograd saves, if its memory is a slot's."""
        address = tensor.data_ptr()
        k = bisect(self._begins, address) - 1
        if k < 0 or address >= self._begins[k] + self._slots[k].memory.nbytes:
            return None
        layer, dtype = self._slots[k].layer, tensor.dtype
        assert layer is not None, "a tensor of a slot that no layer has"
        offset = (address - self._begins[k]) // dtype.itemsize
        return SavedWeight(
            layer,
            layer.fetched,
            dtype,
            tensor.shape,
            tensor.stride(),
            offset,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, saved: SavedWeight) -> Tensor:
        """The saved view, in the slot that has the layer now."""
        slot = saved.layer.slot
        assert slot is not None
        flat = slot.memory[: saved.layer.num_bytes].view(saved.dtype)
        view = flat.as_strided(saved.shape, saved.stride, saved.offset + flat.storage_offset())
        view = view.conj() if saved.is_conj else view
        return -view if saved.is_neg else view

    def forget(self) -> None:
        """Empty every slot, after an exception at any place. The lanes end what they began."""
        self._device.finish()
        for layer in self._layers:
            if not layer.is_resident:
                layer.slot, layer.weight_state = None, WeightState.AWAY
            elif not layer.is_on_gpu:
                layer.weight_state = WeightState.STALE
        for slot in self._window:
            slot.layer = None
            self._device.memory.poison(slot.memory)
        self.held, self.free = [], list(self._window)

    def close(self) -> None:
        """Drop every slot. The layers' arrays stay."""
        slots = {*self._window, *(layer.slot for layer in self._layers if not layer.is_on_gpu)}
        self._device.memory.release(*(slot.memory for slot in slots if slot is not None))
        for layer in self._layers:
            layer.slot, layer.weight_state = None, WeightState.AWAY
        self._window, self._slots, self.held, self.free = [], [], [], []
        self._begins.clear()
