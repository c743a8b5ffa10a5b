"""Bytes in passing: what forward and backward of a layer have at once beside what is kept.

Owns the timeline of storages that come and go while a model runs on tensors without memory. Knows
nothing of layers but their numbers; `costs` says who runs. One thread enters.

[Note: replay] Whether a storage will be kept is known only after the operation that made it. So the
timeline is recorded first and judged when everything is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Passing(TorchDispatchMode):
    """Records what every operation makes, and when it is gone. `running` names the layer."""

    def __init__(self, running: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = running
        self._events: list[tuple[int, int, int]] = []  # (storage, bytes or minus them, layer)
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._num_storages = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def number(self, storage: torch.UntypedStorage) -> int:
        """The storage's number in the timeline; addresses are used again, numbers are not."""
        return self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> int:
        key, nbytes = int(storage._cdata), storage.nbytes()
        if key in self._alive:
            return self._alive[key][0]
        self._num_storages += 1
        number = self._num_storages

        def gone(_: Any) -> None:
            del self._alive[key]
            self._events.append((number, -nbytes, -1))

        self._alive[key] = (number, weakref.ref(storage, gone))
        self._events.append((number, nbytes, self._running()))
        return number

    def most(self, num_layers: int, kept: Container[int]) -> list[int]:
        """Per layer the most bytes at once, while it ran, of storages not in `kept`."""
        most, now = [0] * num_layers, 0
        for number, nbytes, layer in self._events:
            if number in kept:
                continue
            now += nbytes
            if layer >= 0:
                most[layer] = max(most[layer], now)
        return most
