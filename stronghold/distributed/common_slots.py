"""The layers that the slots of every rank hold ([Note: one order of uses] of `sharding`).

Owns the list of them while one rank fetches for itself. It never fetches: `streaming.executor`
does. The training thread enters, and autograd's thread in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window


class SlotAgreement:
    """Slots of one process: no other rank depends on their contents.

    `are_common`: the slots hold the same layers on every rank, so that a fetch is a collective.
    """

    are_common = True

    def leave(self) -> None:
        """This rank is about to fetch, or release, a layer by itself."""

    def extra(self) -> list[int]:
        """Streamed layers that this rank's slots hold beyond the common ones."""
        return []

    def missing(self) -> list[int]:
        """Layers that the common slots hold, and this rank's do not. Call it when no layer is
        extra."""
        return []

    def rejoin(self) -> None:
        """No layer is extra or missing: the slots are common again."""

    def forget(self) -> None:
        """The slots are empty on every rank."""


class CommonSlots(SlotAgreement):
    """Slots of `window` on one of several ranks.

    `refreshed`: resident layers that are fetched after an update.
    """

    def __init__(
        self, window: Window, layers: Sequence[LayerState], refreshed: Sequence[int]
    ) -> None:
        self._window, self._layers, self._refreshed = window, layers, refreshed
        # While this rank fetches for itself: the layers in the common slots, in order, and the
        # resident layers that no rank has fetched since their update.
        self._places: list[int | None] = []
        self._outdated: list[int] = []

    def leave(self) -> None:
        if self.are_common:
            self._places = self._window.places()
            self._outdated = [k for k in self._refreshed if not self._layers[k].is_fetched]
            self.are_common = False

    def extra(self) -> list[int]:
        if self.are_common:
            return []
        return sorted(set(self._window.held_layers()).difference(self._places))

    def missing(self) -> list[int]:
        if self.are_common:
            return []
        common = {layer for layer in self._places if layer is not None}
        common.update(set(self._refreshed).difference(self._outdated))
        return sorted(layer for layer in common if not self._layers[layer].is_fetched)

    def rejoin(self) -> None:
        if not self.are_common:
            self._window.arrange(self._places)
            for layer in self._outdated:
                self._window.outdate(layer)
            self.forget()

    def forget(self) -> None:
        self._places, self._outdated, self.are_common = [], [], True
