"""Targets of updates out of place, with guard bytes around them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from stronghold import native

GUARD = 192  # bytes: more than a vector of any kernel, and than a line of the cache
OLD, FENCE = 0xA5, 0x5A  # what targets and guards hold before a step


class Targets:
    """A target for each array of a segment that a step writes, `skip` bytes past a multiple of 64;
    of the fields `in_place` none. `views` are the targets' bytes, by field."""

    def __init__(
        self, parts: dict[str, torch.Tensor], skip: int = 0, in_place: Collection[str] = ()
    ) -> None:
        self._rooms: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.views: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            if name != "grad" and name not in in_place:
                self.views[name] = self._make(part.nbytes, skip)

    def _make(self, nbytes: int, skip: int) -> torch.Tensor:
        raw = torch.full((nbytes + 2 * GUARD + 64 + skip,), FENCE, dtype=torch.uint8)
        start = -raw.data_ptr() % 64 + GUARD + skip
        buffer = np.frombuffer(raw.numpy().data, dtype=np.uint8, offset=start, count=nbytes)
        view = torch.from_numpy(buffer).fill_(OLD)
        guards = torch.ones(len(raw), dtype=torch.bool)
        guards[start : start + nbytes] = False
        self._rooms.append((raw, guards))
        return view

    def target(self) -> native.Target:
        return native.Target(**{name: view.data_ptr() for name, view in self.views.items()})

    def are_guards_untouched(self) -> bool:
        return all(bool((raw[guards] == FENCE).all()) for raw, guards in self._rooms)
