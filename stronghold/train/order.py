"""The order of uses: what to prefetch, and what to release.

The uses of one training pass, forward and backward, are the prediction for the next one. Those of
an evaluation likewise. Before a use the window should hold the next `num_slots` different streamed
layers of the prediction. At the turn from forward to backward this keeps the last layers, without a
rule of its own. Residents whose weights the host has updated stand in the order, too, and are
fetched with the layers around them.

A prediction ends with its pass, so nothing is fetched over the end of a step. A wrong prediction
costs time and no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stronghold.errors import ConfigError
from stronghold.train.layer import Layer
from stronghold.train.weights import Weights

MAX_RECORDED_USES = 4096  # a longer pass (generation, token by token) is not learned


@dataclass
class Pass:
    """One kind of pass: its predicted uses, the position in them, and the uses recorded so far."""

    predicted: list[Layer] = field(default_factory=list)
    recorded: list[Layer] = field(default_factory=list)
    cursor: int = 0


class Order:
    """Prefetches and releases.

    running  layers whose forward runs now, the outermost first. They keep their slots
    reading  the block that backward has bound last. It keeps its slot while there is another one
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._passes = {True: Pass(), False: Pass()}
        self._pass = self._passes[True]
        self.running: list[Layer] = []
        self.reading: Layer | None = None

    def begin_pass(self, *, is_training: bool) -> None:
        """A forward or a backward begins. Training and evaluation may take turns within a pass."""
        self._pass = self._passes[is_training]

    def end_pass(self, *, is_complete: bool = True) -> None:
        """End the pass, and free all slots. Between two passes the arrays on the host are the
        truth. A complete pass predicts the next one of its kind."""
        recorded = self._pass.recorded
        if is_complete and 0 < len(recorded) <= MAX_RECORDED_USES:
            self._pass.predicted = recorded
        self._pass.recorded, self._pass.cursor = [], 0
        for layer in tuple(self._weights.held):
            self._weights.release(layer, is_checked=is_complete)

    def forget(self) -> None:
        """An exception has ended every pass, and all slots are empty. The predictions stay."""
        self.running.clear()
        self.reading = None
        for each in self._passes.values():
            each.recorded, each.cursor = [], 0

    def use(self, layer: Layer) -> None:
        """Compute is about to read the layer: bring it, and then those that follow."""
        weights, recorded = self._weights, self._pass.recorded
        if layer.is_on_gpu:
            return
        if not recorded or recorded[-1] is not layer:
            following = self._following(layer)
            if weights.needs_fetch(layer):  # first on its lane
                self._fetch(layer, following)
            for other in tuple(weights.held):
                is_kept = other in self.running or other is self.reading
                if following and other not in following and not is_kept:
                    weights.release(other)
            for other in following:
                if weights.needs_fetch(other) and (other.is_resident or weights.free):
                    weights.fetch(other)
            if len(recorded) <= MAX_RECORDED_USES:
                recorded.append(layer)
        if weights.needs_fetch(layer):
            self._fetch(layer, [])
        weights.use(layer)

    def _following(self, layer: Layer) -> list[Layer]:
        """The next different layers of the prediction, this one first, with as many streamed ones
        as the window has slots. Empty: the use was not predicted."""
        predicted = self._pass.predicted
        try:
            begin = predicted.index(layer, self._pass.cursor)
        except ValueError:
            return []
        self._pass.cursor = begin + 1
        following: list[Layer] = []
        num_streamed = 0
        for other in predicted[begin:]:
            if other in following:
                continue
            if not other.is_resident:
                if num_streamed == self._weights.num_slots:
                    break
                num_streamed += 1
            following.append(other)
        return following

    def _fetch(self, layer: Layer, following: Sequence[Layer]) -> None:
        """Fetch now. If no slot is free, a layer that is needed later or not at all leaves."""
        weights = self._weights
        if not layer.is_resident and not weights.free:
            held = [other for other in weights.held if other not in self.running]
            if not held:
                raise ConfigError(
                    f"{layer.name} is called inside of other blocks, and these have all "
                    f"{weights.num_slots} slots: raise stronghold.window"
                )
            held.sort(key=lambda other: (other is self.reading, other in following))
            weights.release(held[0])
        weights.fetch(layer)
