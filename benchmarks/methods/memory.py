"""Bytes on the device: torch's allocator on CUDA, every live tensor on the emulated device.

Owns the cap and the peak of one process. The emulated device is CPU memory, so what stands for the
GPU's is counted tensor by tensor, in the operators that make them; this costs time, and is on in
warm-up steps alone. Entered by the training thread.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from methods.task import Task


class DeviceMemory(ABC):
    """The cap on the device's memory, and its peak so far."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int: ...

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Count what is allocated inside."""
        return contextlib.nullcontext()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027
        """These live on the device, though they were not made while counting."""

    def host(self) -> contextlib.AbstractContextManager[Any]:
        """What is allocated inside is host memory."""
        return contextlib.nullcontext()

    def add_source(self, live_bytes: Callable[[], int]) -> None:  # noqa: B027
        """Bytes that somebody else counts are on the device too."""


class CudaMemory(DeviceMemory):
    """Torch's allocator; past the cap it raises torch.OutOfMemoryError."""

    def __init__(self, task: Task) -> None:
        if task.gpu_memory is not None:
            total = torch.cuda.get_device_properties(task.device).total_memory
            if task.gpu_memory < total:
                fraction = task.gpu_memory / total
                torch.cuda.set_per_process_memory_fraction(fraction, task.device)
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(task.device)
        self._device = task.device

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class EmulatedMemory(DeviceMemory):
    """Counts storages that operators make, from their first tensor to their last."""

    def __init__(self, cap_bytes: int | None) -> None:
        self._cap_bytes = cap_bytes
        self._live: dict[int, int] = {}
        self._live_bytes = 0
        self._peak_bytes = 0
        self._sources: list[Callable[[], int]] = []
        self._mode = _Counter(self)

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        return self._mode

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        before, self._mode.paused = self._mode.paused, True
        try:
            yield
        finally:
            self._mode.paused = before

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self.add(tensor.untyped_storage())

    def add_source(self, live_bytes: Callable[[], int]) -> None:
        self._sources.append(live_bytes)
        self._check()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it dies; torch.OutOfMemoryError past the cap."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or size == 0:
            return
        self._live[key] = size
        self._live_bytes += size
        weakref.finalize(storage, self._forget, key).atexit = False
        self._check()

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)

    def _check(self) -> None:
        total = self._live_bytes + sum(source() for source in self._sources)
        if self._cap_bytes is not None and total > self._cap_bytes:
            raise torch.OutOfMemoryError(
                f"{total} bytes are live on the emulated device, the cap is {self._cap_bytes}"
            )
        self._peak_bytes = max(self._peak_bytes, total)


class _Counter(TorchDispatchMode):
    """Hands every storage that an operator makes to its memory; views and in-place results are not
    new."""

    def __init__(self, memory: EmulatedMemory) -> None:
        super().__init__()
        self._memory = memory
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            if made:
                given = {
                    t.untyped_storage()._cdata
                    for t in tree_leaves((args, kwargs))
                    if isinstance(t, torch.Tensor)
                }
                for tensor in made:
                    storage = tensor.untyped_storage()
                    if storage._cdata not in given:
                        self._memory.add(storage)
        return result


def device_memory(task: Task) -> DeviceMemory:
    return CudaMemory(task) if task.machine == "cuda" else EmulatedMemory(task.gpu_memory)
