"""The order in which layers' gradients leave their slots (reduce-scatter).

`Order` serves one process, `OneOrder` several ranks. The thread that runs autograd's hooks enters,
and the training thread at the gate.

[Note: one order]
1. Every backward reduces every trained layer once, in one order on all ranks. Where a rank has no
   gradient of a parameter (experts that no token chose), it takes part with zeros.
2. A layer is closed when all of its gradients have come, when a slot is needed for another, or when
   backward ends.
3. Closed layers are reduced as soon as those before them in the order are.
4. Gradients that come later (of a layer that is called twice) gather in memory of torch's. They are
   reduced in rounds that the ranks agree on when backward ends.

[Note: no wait in a circle]
1. Rank 0 waits for a gradient slot, so for the reduction of the layer in it, so for rank 1.
2. Rank 1 waits for a gather, so for rank 0 to come as far.
3. Rank 0 has queued every gather up to the layer that it computes. Rank 1 waits for a later one.
4. A rank that comes to a layer first closes the layers whose slots another could need there
   (`reached`), whether their gradients have come or not. In the expected order these are as many
   places before it as there are slots. In another order (a first pass) they are all layers that
   backward came to before the last one. So rank 1 has reduced the layer of step 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from stronghold.distributed.process_groups import Group


class Order:
    """The order of one process: each layer is due when it is complete.

    Every method but `passed` returns the layers whose gradients are due now.
    """

    def complete(self, layer: int) -> list[int]:
        """All gradients of the layer have come."""
        return [layer]

    def reached(self, layer: int) -> list[int]:
        """Backward has come to the layer."""
        return []

    def making_room(self, gathering: Sequence[int]) -> Sequence[int]:
        """A gradient slot is needed. These layers have all slots."""
        return gathering[:1]

    def rest(self) -> list[int]:
        """Backward has ended."""
        return []

    def further(self, gathering: Sequence[int]) -> list[int]:
        """These layers still have gradients. Call it until no layer is due."""
        return list(gathering)

    def passed(self, layer: int) -> bool:
        """True if the layer was due in this backward. A later gradient of it waits for
        `further`."""
        return False

    def begin_again(self) -> None:
        """The next backward begins."""


class OneOrder(Order):
    """The order of several ranks ([Note: one order]).

    `trained`: layers in the order in which they are expected to be complete. Blocks take turns in
    `num_slots` gradient slots.
    """

    def __init__(self, control: Group, trained: Sequence[int], num_slots: int) -> None:
        self._control = control
        self._layers = list(trained)
        self._num_slots = max(1, num_slots)
        self._next = 0
        self._closed: set[int] = set()
        # places in `_layers`, in the order of this backward
        self._reached: list[int] = []
        self._complete: list[int] = []  # layers, in the order of this backward
        self._seen = list(trained)  # layers, in the order of the last backward

    def complete(self, layer: int) -> list[int]:
        if self.passed(layer):
            return []
        self._complete.append(layer)
        return self._close([layer])

    def reached(self, layer: int) -> list[int]:
        """Close the layers whose slots another rank could need ([Note: no wait in a circle])."""
        if layer not in self._layers:
            return []
        self._reached.append(self._layers.index(layer))
        end = self._reached[-1] + 1 - self._num_slots
        if self._reached != sorted(self._reached):
            end = max(end, 1 + max(self._reached[:-2], default=-1))
        return self._close(self._layers[: max(0, end)])

    def making_room(self, gathering: Sequence[int]) -> Sequence[int]:
        return self._close(self._layers[: min(map(self._layers.index, gathering)) + 1])

    def rest(self) -> list[int]:
        return self._close(self._layers)

    def further(self, gathering: Sequence[int]) -> list[int]:
        if not self._layers:
            return []
        flags = torch.tensor([layer in gathering for layer in self._layers], dtype=torch.uint8)
        wanted = self._control.numbers(flags, "further gradients").any(dim=0)
        return [self._layers[place] for place in wanted.nonzero().flatten().tolist()]

    def passed(self, layer: int) -> bool:
        return layer in self._layers[: self._next]

    def begin_again(self) -> None:
        complete = dict.fromkeys(self._complete)
        self._seen = [*complete, *(layer for layer in self._layers if layer not in complete)]
        self._next = 0
        self._closed.clear()
        self._reached.clear()
        self._complete.clear()

    def _close(self, layers: Iterable[int]) -> list[int]:
        self._closed.update(layers)
        begin = self._next
        while self._next < len(self._layers) and self._layers[self._next] in self._closed:
            self._next += 1
        return self._layers[begin : self._next]

    # -- agreed on at the gate --------------------------------------------------------------------
    @property
    def seen(self) -> str:
        """Text of the order in which this rank's layers were complete in the last backward."""
        return str(self._seen)

    def adopt(self) -> None:
        """Expect the last order from now on. Every rank saw the same one."""
        self._layers = list(self._seen)
