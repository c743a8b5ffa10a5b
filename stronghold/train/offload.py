"""The offload of activations: saved tensors wait in pinned host memory until backward.

A storage is copied once per call of a block, however many saved tensors view it. The offload lane
takes it away. The fetch lane brings it back, one call ahead of backward (prefetch).

[Note: two calls] On a GPU the host is many blocks ahead of compute, and sees the end of a copy long
after it. So it never drops memory because it saw a copy end.
1. A block's call ends. Compute is made to wait for the copies of the call before it. Then the
   sources of these copies are dropped.
2. Work that compute gets later may take their memory. It runs after the copies, in stream order.
3. In backward compute waits for the copy to the device. Autograd drops the memory after its last
   use, again in stream order.
4. So the activations of at most two calls are on the device. Chunks on several streams are as many
   calls at once.

[Note: dead graphs] A graph may die without a backward, at any moment and on any thread.
1. Its storages give their host memory back to the pool at once. A copy may still use that memory.
   The next copy to it is on the same lane as the one that wrote it, and waits for the newest load.
2. Memory of the device to which a load still writes is kept until compute has waited for the load.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stronghold.devices.device import Device
from stronghold.devices.fences import Fence, LaneName, completed
from stronghold.errors import LaneError
from stronghold.telemetry.metrics import Metrics, WaitCause
from stronghold.train.layer import Layer
from stronghold.train.saved_tensors import Handle, Keep, kept, refuse_written
from stronghold.train.slabs import PinnedPool

MIN_OFFLOAD_BYTES = 16 << 10  # below this a copy costs more than the room it frees
MAX_STORAGE_WASTE = 4  # a view of a storage this many times larger stays on the device


@dataclass(eq=False)
class Loaded:
    """A storage on the device again, uint8 [bytes]. Its bytes are valid after `ready`."""

    owner: weakref.ref[Stored]
    memory: Tensor
    ready: Fence


@dataclass(eq=False)
class Stored:
    """A storage on the host, uint8 [bytes]. Autograd's graph owns it.

    source      an alias of it on the device, until that memory may be dropped
    version     of the source when it was saved
    is_written  the source had another version when it was dropped
    saved       fence of the copy to the host
    """

    call: Call
    host: Tensor
    source: Tensor | None
    version: int
    is_written: bool = False
    saved: Fence | None = None
    loaded: Loaded | None = None


class Call:
    """A call of a block: the storages that it has on the host.

    storages     in the order in which forward saved them
    sources      those whose source is still on the device, by its address and version
    newest_copy  fence of the last copy to the host
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.is_over = False
        self.storages: list[weakref.ref[Stored]] = []
        self.sources: dict[tuple[int, int], Stored] = {}
        self.newest_copy: Fence | None = None

    @property
    def is_dead(self) -> bool:
        """True if no graph needs it any more."""
        return all(reference() is None for reference in self.storages)

    def drop_sources(self) -> None:
        """Drop the memory on the device."""
        for stored in self.sources.values():
            if stored.source is not None:
                # Autograd compares no versions behind a pair of hooks. Later writes cannot matter.
                stored.is_written = stored.source._version != stored.version
                stored.source = None
        self.sources.clear()


class ActivationOffload:
    """Takes saved tensors to the host, and brings them back.

    room_bytes      the most host memory that they take; None: all that is free
    expected_bytes  the host memory that the plan expects them to take
    weights         addresses of storages that stay on the device anyway
    """

    def __init__(
        self,
        device: Device,
        *,
        metrics: Metrics,
        room_bytes: int | None,
        expected_bytes: int,
        weights: frozenset[int],
    ) -> None:
        self._device, self._metrics, self._weights = device, metrics, weights
        self._pool = PinnedPool(device, room_bytes, expected_bytes=expected_bytes)
        self._calls: list[Call] = []  # whose graphs may live, the oldest first
        self._leaving: deque[Call] = deque()  # with sources, the oldest first
        self._coming: set[Loaded] = set()  # until compute waits for them
        self._reading: Call | None = None  # which backward has read last
        nothing = completed(LaneName.OFFLOAD, "no activation has moved")
        self._newest_copy = self._newest_load = nothing

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return self._pool.num_bytes

    # -- forward ----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def call(self, layer: Layer, *, is_last: bool) -> Iterator[Keep]:
        """Context manager for a call of a block. It gives the function that makes the handles of
        the block's tensors.

        is_last  later blocks keep their tensors on the device, and have no room for ours
        """
        self._drop_unused()
        call = Call(layer)
        self._calls.append(call)
        self._leaving.append(call)
        try:
            yield partial(self._keep, call)
        finally:
            call.is_over = True
            num_at_once = max(1, len(self._device.side_streams.streams))
            self._drop_sources(0 if is_last else num_at_once)

    def _keep(self, call: Call, tensor: Tensor) -> Handle:
        """The handle of a saved tensor. BudgetError if the host has no room."""
        if not self._is_worth_it(tensor):
            return kept(tensor)
        storage, version = tensor.untyped_storage(), tensor._version
        place = storage.data_ptr(), version
        stored = call.sources.get(place)
        if stored is None:
            host = self._pool.take(storage.nbytes())
            stored = Stored(call, host, tensor.detach(), version)
            give = self._pool.give
            call.storages.append(weakref.ref(stored, lambda _: give(host)))
            self._begin_copy(stored)
            call.sources[place] = stored
        offset = int(tensor.storage_offset())
        return partial(self._load, stored, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _is_worth_it(self, tensor: Tensor) -> bool:
        """True if the tensor is large, on the device, most of its storage, and no weight."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device != self._device.torch_device or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return (
            tensor.nbytes >= MIN_OFFLOAD_BYTES
            and storage.nbytes() <= MAX_STORAGE_WASTE * tensor.nbytes
            and storage.data_ptr() not in self._weights
        )

    def _begin_copy(self, stored: Stored) -> None:
        """Copy the storage to the host, after the compute that wrote it."""
        device, host, index = self._device, stored.host, stored.call.layer.index
        assert stored.source is not None
        memory = torch.empty(0, dtype=torch.uint8, device=stored.source.device)
        memory.set_(stored.source.untyped_storage())
        stored.saved = stored.call.newest_copy = self._newest_copy = device.offload.submit(
            f"offload {index}",
            partial(device.copy, host, memory),
            after=(device.compute.record(f"activation {index}"), self._newest_load),
            nbytes=host.nbytes,
        )

    def _drop_sources(self, num_kept: int) -> None:
        """Drop the memory on the device of all calls but the newest ([Note: two calls])."""
        while len(self._leaving) > num_kept and self._leaving[0].is_over:
            call = self._leaving.popleft()
            if call.newest_copy is not None:  # a lane copies in order
                waited = self._device.compute.wait_everywhere(call.newest_copy)
                self._metrics.waited(WaitCause.OFFLOAD, waited)
            call.drop_sources()

    # -- backward ---------------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Begin to load what backward needs first: the tensors of the newest call."""
        self._drop_sources(0)
        self._drop_unused()
        if self._calls:
            self._begin_loads(self._calls[-1])

    def _load(
        self,
        stored: Stored,
        dtype: torch.dtype,
        shape: torch.Size,
        stride: tuple[int, ...],
        offset: int,
    ) -> Tensor:
        """The saved tensor on the device. Compute waits for its copy. RuntimeError if it was
        written since it was saved."""
        if stored.call is not self._reading:
            self._read(stored.call)
        loaded = stored.loaded or self._begin_load(stored)
        if stored.source is not None and stored.source._version != stored.version:
            stored.is_written = True  # by a call that still runs
        if stored.is_written:
            refuse_written(dtype, shape)
        self._metrics.waited(WaitCause.FETCH, self._device.compute.wait(loaded.ready))
        self._coming.discard(loaded)
        return loaded.memory.view(dtype).as_strided(shape, stride, offset)

    def _read(self, call: Call) -> None:
        """Backward has come to a call: begin to load its tensors, and those of the call before."""
        self._reading = call
        self._drop_sources(0)
        self._drop_unused()
        self._begin_loads(call)
        calls = iter(reversed(self._calls))
        for other in calls:
            if other is call:
                break
        before = next((other for other in calls if not other.is_dead), None)
        if before is not None:
            self._begin_loads(before)

    def _begin_loads(self, call: Call) -> None:
        for reference in reversed(call.storages):  # backward reads the last one first
            stored = reference()
            if stored is None or stored.loaded is not None:
                continue
            if stored.saved is not None:  # else an interrupt came before its copy
                self._begin_load(stored)

    def _begin_load(self, stored: Stored) -> Loaded:
        device, host, index = self._device, stored.host, stored.call.layer.index
        assert stored.saved is not None
        # The main stream's memory: a call's tensors come while another one runs on a side stream.
        with device.side_streams.on_main():
            memory = torch.empty(host.nbytes, dtype=torch.uint8, device=device.torch_device)
            # Queued work of compute may still use what the allocator gives.
            room = device.compute.record(f"room for activation {index}")
        ready = device.fetch.submit(
            f"onload {index}",
            partial(device.copy, memory, host),
            after=(stored.saved, room),
            nbytes=host.nbytes,
        )
        self._newest_load = ready
        stored.loaded = Loaded(weakref.ref(stored), memory, ready)
        self._coming.add(stored.loaded)
        return stored.loaded

    # -- ends -------------------------------------------------------------------------------------
    def _drop_unused(self) -> None:
        """Drop what is left of graphs that have died ([Note: dead graphs])."""
        while self._calls and self._calls[-1].is_over and self._calls[-1].is_dead:
            self._calls.pop()
        for loaded in [loaded for loaded in self._coming if loaded.owner() is None]:
            self._device.compute.wait_everywhere(loaded.ready)
            self._coming.discard(loaded)

    def forget(self) -> None:
        """After an exception at any place, and with all lanes finished: no call runs. Graphs that
        live may still load what they have here."""
        self._coming.clear()
        for call in self._leaving:
            call.is_over = True
            call.drop_sources()
        self._leaving.clear()

    def close(self) -> None:
        """Wait for all copies, and unpin the host memory."""
        for fence in (self._newest_copy, self._newest_load):
            with contextlib.suppress(LaneError):  # raised by the wait that needed the copy
                fence.wait()
        self.forget()
        self._calls.clear()
        self._pool.close()
