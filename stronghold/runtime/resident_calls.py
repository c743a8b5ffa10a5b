"""Which resident layers a forward may wait for at their module's call, and which before it begins.

Owns what earlier training passes showed of that. Never moves a byte: `hooks` asks. The training
thread enters, and autograd's in backward; the two never run at once.

[Note: read without a call] A resident layer's weights are waited for when its module is called, so
that the forward begins while the last layers are still updated. A model may read a weight without
that call (`F.linear(x, embedding.weight)`), in training alone perhaps, as fused losses do: a
gradient that comes without a call tells. So a layer is waited for at its call once a training pass
has called it, and never again once it was read without; the others, and all of them in evaluation
or where a part of the model is called by itself, are waited for in advance.
"""

from __future__ import annotations

from collections.abc import Iterable

from stronghold.errors import ConfigError


class ResidentCalls:
    """The resident layers of one model, by index."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.all = tuple(layers)
        self._seen: set[int] = set()  # called by a training pass
        self._read: set[int] = set()  # got a gradient without a call
        self._expected: set[int] = set()  # of the running pass: waited for at the call
        self._called: set[int] = set()  # in the running pass
        self._reached: set[int] = set()  # called since the last backward
        self._missed: set[int] = set()  # expected since the last backward, not called, and old

    def in_advance(self, *, training: bool) -> list[int]:
        """A pass of the whole model begins: the layers to wait for before it does."""
        self._called.clear()
        self._expected = self._seen - self._read if training else set()
        return [layer for layer in self.all if layer not in self._expected]

    def called(self, layer: int) -> None:
        """The layer's module is called."""
        self._called.add(layer)
        self._reached.add(layer)

    def end_pass(self, *, training: bool, stale: Iterable[int]) -> None:
        """The model has returned. `stale`: layers whose newest weights compute has not waited
        for.
        """
        self._missed |= (self._expected - self._called).intersection(stale)
        if training:
            self._seen |= self._called

    def got_gradient(self, layer: int, name: str) -> None:
        """A gradient of the parameter `name` has come. ConfigError when its weights were old."""
        if layer not in self._reached:
            self._read.add(layer)
        if layer in self._missed:
            raise ConfigError(
                f"{name} was read without a call of its module, which the forwards before had "
                "called: its weights may have been those of the step before. They are waited for "
                "from now on: run the same forward and backward again"
            )

    def end_backward(self) -> None:
        """Backward has ended, or was abandoned."""
        self._missed.clear()
        self._reached.clear()
