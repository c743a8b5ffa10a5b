"""A block's buffers as they were when its forward began, for the recomputation of that forward.

Owns copies of them, as long as autograd's graph may recompute. Running statistics, power iterations
and counters must not move twice in a step, and a forward that is run again must see what it saw:
its own call's, whichever calls came since, and though it grew a table or registered one. Entered by
autograd's thread in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Held = dict[str, torch.Tensor | None]


class KeptBuffers:
    """A context: inside it `module` and its parts have the buffers that they had when this was
    made; afterwards those that they have now, untouched. It may be entered again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._kept = _copies([part._buffers for part in self._parts])
        self._outside: list[Held] = []

    def __enter__(self) -> KeptBuffers:
        self._outside = [dict(part._buffers) for part in self._parts]
        self._put(_copies(self._kept))
        return self

    def __exit__(self, *_: Any) -> None:
        self._put(self._outside)
        self._outside = []

    def _put(self, buffers: list[Held]) -> None:
        for part, held in zip(self._parts, buffers, strict=True):
            part._buffers.clear()
            part._buffers.update(held)


def _copies(buffers: list[Held]) -> list[Held]:
    """Copies of all tensors; what several parts share they share again."""
    copied: dict[int, torch.Tensor] = {}
    for held in buffers:
        for tensor in held.values():
            if tensor is not None and id(tensor) not in copied:
                copied[id(tensor)] = tensor.detach().clone()
    return [
        {name: None if tensor is None else copied[id(tensor)] for name, tensor in held.items()}
        for held in buffers
    ]
