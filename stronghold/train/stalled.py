"""Says once that steps are too small to move the largest weights of lean states."""

from __future__ import annotations

import logging
from itertools import chain

from stronghold.optim.states import count_standing
from stronghold.train.layer import Layer
from stronghold.train.trainer import Trainer

SHOWN = 3  # layers that are named

logger = logging.getLogger("stronghold")


class StalledWeights:
    """Compares once, in the first step whose sizes are no larger than those of the step before: the
    rates of a warm-up, and of 0, mean nothing. Exact states have every bit of their masters."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._layers = [x for x in trainer.layers if x.states is not None and x.states.is_lean]
        self._before: list[float] | None = None

    def end_step(self) -> None:
        """A step was taken. Waits for its updates if it is the one that is compared."""
        if not self._layers:
            return
        of_layers = {layer: self._sizes(layer) for layer in self._layers}
        sizes, before = [*chain.from_iterable(of_layers.values())], self._before
        self._before = sizes
        rises = before is None or any(now > then for now, then in zip(sizes, before, strict=True))
        if rises or not any(sizes):
            return
        self._layers = []
        counts = {layer.name: self._count(layer, own) for layer, own in of_layers.items()}
        stalled = [f"{few} of {numel} in {name}" for name, (few, numel) in counts.items() if few]
        if stalled:
            more = len(stalled) - SHOWN
            logger.warning(
                "lean states: a step of the learning rate (%s) does not move %s%s: it is less than "
                "half a unit of masters of 24 bits that are so large. Raise the rate, or set "
                'stronghold.states to "exact", whose masters have all bits',
                ", ".join(f"{size:g}" for size in dict.fromkeys(sizes) if size),
                ", ".join(stalled[:SHOWN]),
                f" and more in {more} other layers" if more > 0 else "",
            )

    def _sizes(self, layer: Layer) -> list[float]:
        """How far a step moves each trained parameter, about. 0 if unknown, and for a rate of 0,
        which is wanted."""
        groups = self._trainer.updates.groups_of[layer]
        return [optimizer.step_size(group) or 0.0 for group, optimizer in groups]

    def _count(self, layer: Layer, sizes: list[float]) -> tuple[int, int]:
        """Count the weights that do not move, and those that were compared."""
        self._trainer.settle(layer, "looking at the weights")
        weights = self._trainer.arrays.of(layer, "weights")
        num_stalled = num_compared = 0
        for k, size in enumerate(sizes):
            if size <= 0.0:
                continue
            begin, numel = layer.element(k), layer.parameters[k].numel()
            num_compared += numel
            num_stalled += count_standing(weights[begin : begin + numel], size)
        return num_stalled, num_compared
