"""Offload of activations: saved tensors wait in host memory, and come back before backward.

Owns the pinned host memory of offloaded activations, their copies on the offload and fetch lanes,
and the order in which memory on the device is dropped (evicted). Never decides which layer
offloads: that is `policies`. Entered by the training thread in forward and by autograd's thread in
backward.

A storage is swapped out once, on the offload lane, however many saved tensors view it. It is
swapped in on the fetch lane, one layer ahead of backward (prefetch). At most two layers'
activations are on the device at a time.

[Note: two layers] On a GPU the host is many layers ahead of compute. It sees the end of a copy long
after the copy. So the host never drops memory because it saw a copy end:

1. Training thread: the forward of layer i ends. Compute is made to wait for the copies of layer
   i - 1.
2. Training thread: it drops the sources of these copies.
3. Compute stream: work that is enqueued later may take their memory. In stream order it runs after
   the copies, so that nothing races with them.
4. Autograd's thread, on the way back: compute waits for the copy to the device. Autograd drops the
   memory after its last use, again in stream order.

[Note: lent] Inputs of a recomputed layer may wait in the layer's gradient entry on the host, as far
as its bytes reach (`memory.host`, [Note: lent]). The first inputs lie there, one behind the other.
All others take pinned memory of the pool.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import nn

from stronghold.devices.base import Device, Fence, completed
from stronghold.devices.lane_name import LaneName
from stronghold.errors import LaneError
from stronghold.memory.host import HostStore
from stronghold.memory.slab import PinnedPool
from stronghold.streaming.activations.saved import (
    LoadedStorage,
    SavedActivation,
    SavedStorage,
    refuse_written_source,
)
from stronghold.streaming.parts import Parts
from stronghold.streaming.patches.tensors import version_of
from stronghold.telemetry.metrics import WaitCause

MIN_OFFLOAD_BYTES = 16 << 10  # below this a copy costs more than the room it frees
MAX_STORAGE_WASTE = 4  # a view of a storage this many times larger stays on the device

StorageReference = weakref.ref[SavedStorage]


class ActivationOffload:
    """Stores saved tensors on the host and loads them back.

    host_room_bytes  the most host memory that they take; None: all that is free
    expected_bytes   the host memory that the plan expects them to take
    """

    def __init__(self, parts: Parts, host_room_bytes: int | None, expected_bytes: int) -> None:
        self._device: Device = parts.device
        self._metrics = parts.metrics
        self._host: HostStore = parts.host
        self._pool = PinnedPool(self._device, host_room_bytes, expected_bytes=expected_bytes)
        # By layer, in the order in which forward saved them.
        self._saved: dict[int, list[StorageReference]] = defaultdict(list)
        # By address, of the running forward: a storage is copied once for all of its views.
        self._storages: dict[int, SavedStorage] = {}
        # By forward of a layer, the oldest first: storages whose sources are still on the device.
        self._leaving: deque[list[SavedStorage]] = deque()
        # Storages on their way back, until compute waits for them.
        self._coming: set[LoadedStorage] = set()
        self._newest_copy: Fence = completed(LaneName.OFFLOAD, "nothing offloaded")
        # By layer: the storages in its gradient entry, each with the byte at which it ends.
        self._borrowed: dict[int, list[tuple[StorageReference, int]]] = defaultdict(list)

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory for offloaded activations."""
        return self._pool.num_bytes

    # -- a layer's forward ------------------------------------------------------------------------
    def begin_forward(self) -> None:
        """Begin a layer's first run."""
        self._drop_unused()
        self._leaving.append([])

    def forget_storages(self) -> None:
        """Forget which storages the forward has offloaded: later ones get the same addresses."""
        self._storages.clear()

    def is_worth_offloading(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is large, on the device, and most of its storage."""
        if not self._can_offload(tensor):
            return False
        storage_bytes = tensor.untyped_storage().nbytes()
        return storage_bytes <= MAX_STORAGE_WASTE * tensor.numel() * tensor.element_size()

    def _can_offload(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        return (
            tensor.device == self._device.torch_device
            and not isinstance(tensor, nn.Parameter)
            and tensor.numel() * tensor.element_size() >= MIN_OFFLOAD_BYTES
        )

    def offload(self, layer: int, tensor: torch.Tensor) -> SavedActivation:
        """Offload the tensor's storage, unless this forward has done so, and return the view.

        BudgetError if the host has no room.
        """
        address = tensor.untyped_storage().data_ptr()
        saved = self._storages.get(address)
        if saved is None:
            storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            storage.set_(tensor.untyped_storage())
            detached = tensor.detach()  # [Note: pack] of `saved`
            saved = self._in_pool(layer, detached, storage.numel())
            self._store(layer, saved, storage)
            self._storages[address] = saved
        offset = int(tensor.storage_offset())
        return SavedActivation(saved, tensor.dtype, offset, tensor.shape, tensor.stride())

    def offload_input(self, layer: int, tensor: torch.Tensor) -> SavedActivation | None:
        """Offload an argument of a layer that will run again; None if it stays on the device.

        Of a view its own bytes alone are copied, since the chunks of a batch share one storage.
        They may wait in the layer's gradient entry. BudgetError if the host has no room.
        """
        if not (tensor.is_contiguous() and self._can_offload(tensor)):
            return None
        source = tensor.detach().view(-1).view(torch.uint8)
        detached = tensor.detach()
        saved = self._borrow(layer, detached, source.numel())
        if saved is None:
            saved = self._in_pool(layer, detached, source.numel())
        self._store(layer, saved, source)
        return SavedActivation(saved, tensor.dtype, 0, tensor.shape, tensor.stride())

    def _store(self, layer: int, saved: SavedStorage, source: torch.Tensor) -> None:
        """Copy `source`, uint8 [bytes], to the host after the compute that wrote it."""
        target, device = saved.host, self._device
        saved.stored = device.offload.submit(
            f"offload {layer}",
            lambda: device.copy(target, source),
            after=(device.compute.record(f"activation {layer}"),),
            writes=saved.lent,
            nbytes=source.numel(),
        )
        self._newest_copy = saved.stored
        # a layer inside this one has ended, and was the last to offload
        if not self._leaving:
            self._leaving.append([])
        self._leaving[-1].append(saved)

    def drop_sources(self, *, keep_newest: int) -> None:
        """Drop the device memory of all forwards but the `keep_newest` last ([Note: two layers]).

        RuntimeError if a source was written in place: autograd cannot see that behind a hook.
        """
        while len(self._leaving) > keep_newest:
            storages = self._leaving.popleft()
            # the lane copies in order: the last copy ends after the others
            if storages:
                newest_copy = storages[-1].stored
                assert newest_copy is not None
                waited = self._device.compute.wait_everywhere(newest_copy)
                self._metrics.waited(WaitCause.OFFLOAD, waited)
            for saved in storages:
                source, saved.source = saved.source, None
                assert source is not None
                if version_of(source) != saved.version:
                    refuse_written_source(source, saved.version)

    # -- host memory ------------------------------------------------------------------------------
    def _in_pool(self, layer: int, tensor: torch.Tensor, nbytes: int) -> SavedStorage:
        saved = SavedStorage(tensor, version_of(tensor), self._pool.take(nbytes))
        self._return_later(layer, saved)
        return saved

    def _return_later(self, layer: int, saved: SavedStorage) -> None:
        """Give the host memory back to the pool when `saved` dies.

        The next user of the memory cannot race with a transfer that still reads it. Compute has
        waited for that transfer, and the next offload waits for compute.
        """
        pool, host = self._pool, saved.host
        self._saved[layer].append(weakref.ref(saved, lambda _: pool.give(host)))

    def _borrow(self, layer: int, tensor: torch.Tensor, nbytes: int) -> SavedStorage | None:
        """Take bytes of the layer's gradient entry ([Note: lent]); None if too few are free."""
        entry = self._host.lend_entry(layer, self._vacate)
        borrowed = self._borrowed[layer]
        while borrowed and borrowed[-1][0]() is None:
            borrowed.pop()
        begin = borrowed[-1][1] if borrowed else 0
        end = begin + nbytes
        if entry is None or end > entry.memory.nbytes:
            return None
        host = entry.memory.view(torch.uint8)[begin:end]
        saved = SavedStorage(tensor, version_of(tensor), host, (entry.record,))
        reference = weakref.ref(saved)
        borrowed.append((reference, end))
        self._saved[layer].append(reference)
        return saved

    def _vacate(self, layer: int) -> None:
        """Move the layer's inputs out of its gradient entry, since gradients are about to come."""
        for reference, _ in self._borrowed.pop(layer, ()):
            saved = reference()
            if saved is None:
                continue
            assert saved.stored is not None
            saved.stored.wait()
            target = self._pool.take(saved.host.numel())
            target.copy_(saved.host)
            saved.host, saved.lent = target, ()
            self._return_later(layer, saved)

    # -- backward ---------------------------------------------------------------------------------
    def prefetch(self, layer: int) -> None:
        """Begin to load (swap in) the layer's activations, in the order in which backward needs
        them. Returns at once."""
        self.drop_sources(keep_newest=0)
        self._drop_unused()
        references = [reference for reference in self._saved[layer] if reference() is not None]
        self._saved[layer] = references
        for reference in reversed(references):
            saved = reference()
            if saved is not None:
                self._begin_load(saved, layer)

    def _begin_load(self, saved: SavedStorage, layer: int) -> LoadedStorage:
        """Copy the bytes to the device, unless that has begun."""
        if saved.loaded is not None:
            return saved.loaded
        device, host = self._device, saved.host
        memory = torch.empty(host.numel(), dtype=torch.uint8, device=device.torch_device)
        assert saved.stored is not None
        # The copy waits for compute: the allocator may have taken the memory from queued work.
        room = device.compute.record(f"room for activation {layer}")
        ready = device.fetch.submit(
            f"onload {layer}",
            lambda: device.copy(memory, host),
            after=(saved.stored, room),
            reads=saved.lent,
            nbytes=host.numel(),
        )
        saved.loaded = LoadedStorage(weakref.ref(saved), memory, ready)
        self._coming.add(saved.loaded)
        return saved.loaded

    def load(self, view: SavedActivation) -> torch.Tensor:
        """Return the saved tensor on the device. Compute waits for its copy."""
        loaded = self._begin_load(view.storage, -1)
        self._metrics.waited(WaitCause.FETCH, self._device.compute.wait(loaded.ready))
        self._coming.discard(loaded)
        return loaded.memory.view(view.dtype).as_strided(view.shape, view.stride, view.offset)

    def _drop_unused(self) -> None:
        """Drop the memory that was loaded for a graph that died without its backward.

        Compute waits for the copies first. Autograd drops the memory that it uses by itself.
        """
        unused = [loaded for loaded in self._coming if loaded.owner() is None]
        for loaded in unused:
            self._device.compute.wait_everywhere(loaded.ready)
            self._coming.discard(loaded)

    def close(self) -> None:
        """Wait for all copies, and unregister the host memory."""
        fences = [self._newest_copy, *(loaded.ready for loaded in self._coming)]
        for fence in fences:
            # raised before, at the wait that needed the copy
            with contextlib.suppress(LaneError):
                fence.wait()
        self._coming.clear()
        self._leaving.clear()
        for layer, borrowed in self._borrowed.items():
            self._host.end_loan(layer)
            for reference, _ in borrowed:
                saved = reference()
                if saved is not None:
                    saved.host, saved.lent = saved.host.clone(), ()
        self._borrowed.clear()
        self._saved.clear()
        self._pool.close()


@dataclass(frozen=True, slots=True)
class LayerOffload:
    """The offload of one layer."""

    host: ActivationOffload
    layer: int

    def store_input(self, tensor: torch.Tensor) -> SavedActivation | None:
        """Offload an argument of the layer; None if it stays on the device."""
        return self.host.offload_input(self.layer, tensor)

    def store_result(self, tensor: torch.Tensor) -> SavedActivation | None:
        """Offload a tensor that the layer has computed; None if it stays on the device."""
        if not self.host.is_worth_offloading(tensor):
            return None
        return self.host.offload(self.layer, tensor)

    def load(self, view: SavedActivation) -> torch.Tensor:
        """Return the stored tensor on the device. Compute waits for its copy."""
        return self.host.load(view)
