"""An emulated device with so many bytes for all tensors, activations too, as a GPU has."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stronghold.devices.emulated import EmulatedDevice, EmulatedMemory
from tests.support.training import initialized


class _Counting(TorchDispatchMode):
    """Counts the storages that operators of this thread make while they live. Lanes are other
    threads: what they touch is host memory, or a buffer that `allocate` has counted."""

    def __init__(self, memory: CountedMemory) -> None:
        super().__init__()
        self._memory = memory
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._memory.allocates:
            return found
        given = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(found):
            is_known = id(storage) in given or id(storage) in self._alive
            if not is_known and storage.device.type != "meta":
                self._count(storage)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        self._memory.take(nbytes)

        def gone(_: object) -> None:
            del self._alive[key]
            self._memory.used_bytes -= nbytes

        self._alive[key] = weakref.ref(storage, gone), nbytes


def _storages(nested: Any) -> list[torch.UntypedStorage]:
    if isinstance(nested, torch.Tensor):
        return [nested.untyped_storage()]
    if isinstance(nested, dict):
        nested = list(nested.values())
    if not isinstance(nested, tuple | list):
        return []
    return [storage for part in nested for storage in _storages(part)]


class CountedMemory(EmulatedMemory):
    """`total_bytes` are all that there is. `used_bytes` are those of tensors that `counted` has
    seen and that live; buffers come beside them."""

    def __init__(self, total_bytes: int, budget_bytes: int | None, *, poison: bool) -> None:
        super().__init__(budget_bytes, poison=poison)
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.allocates = False  # a buffer, which is not counted as a tensor

    def take(self, nbytes: int) -> None:
        if self.allocated_bytes + self.used_bytes + nbytes > self.total_bytes:
            raise torch.OutOfMemoryError(
                f"counted device out of memory. Tried to allocate {nbytes} bytes: of "
                f"{self.total_bytes} buffers have {self.allocated_bytes} and tensors "
                f"{self.used_bytes}"
            )
        self.used_bytes += nbytes

    def allocate(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        peak_bytes, self.allocates = self.peak_bytes, True
        try:
            buffer = super().allocate(numel, dtype, purpose)
        finally:
            self.allocates = False
        if self.allocated_bytes + self.used_bytes > self.total_bytes:
            self.release(buffer)
            self.peak_bytes = peak_bytes
            raise torch.OutOfMemoryError("counted device out of memory, for a buffer")
        return buffer

    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def has_room(self, nbytes: int, beside_bytes: int) -> bool:
        need = self.allocated_bytes + self.used_bytes + nbytes + beside_bytes
        return super().has_room(nbytes, beside_bytes) and need <= self.total_bytes


class CountedDevice(EmulatedDevice):
    """A device with so many bytes."""

    total_bytes: ClassVar[int]

    def __init__(self, *, poison: bool = True, **settings: Any) -> None:
        super().__init__(poison=poison, **settings)
        self.memory = CountedMemory(self.total_bytes, self.memory.budget_bytes, poison=poison)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, tensors of the calling thread are the device's."""
        with _Counting(self.memory):
            yield


def of_bytes(total_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated devices of engines that are made from now on are counted, and have so many bytes."""
    device = type("Counted", (CountedDevice,), {"total_bytes": total_bytes})
    monkeypatch.setattr("stronghold.train.job.EmulatedDevice", device)


@contextlib.contextmanager
def counted(
    factory: Any, settings: dict[str, Any], monkeypatch: Any, total_bytes: int | None = None
) -> Iterator[Any]:
    """An engine on a counted device, of as many bytes as it may use, and batches. Inside, tensors
    are the device's."""
    of_bytes(total_bytes or settings["stronghold"]["gpu_memory"], monkeypatch)
    torch.manual_seed(0)
    model, make_batch = factory()
    engine = initialized(model, settings)
    torch.manual_seed(1)
    try:
        with engine.inspect().device.counted():
            yield engine, make_batch
    finally:
        engine.destroy()
