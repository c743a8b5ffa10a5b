"""What all ranks decide together at the end of a step, in one exchange of numbers.

Owns the exchange: the norm's parts, which parameters have a gradient on any rank, and whether the
ranks did the same. Where updates came early (`early`) it says what they were; nothing is left to
decide. Every rank computes the decision from the same numbers in the same order, so it
is the same to the bit. The training thread alone enters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from stronghold.runtime.distributed import Ranks
from stronghold.runtime.ranks.drains import SharedDrains
from stronghold.runtime.ranks.early import check_marks
from stronghold.runtime.ranks.executor import SharedExecutor
from stronghold.runtime.ranks.gathers import Gathers

PARTS = 5  # numbers before the parameters' flags: a sum, two checksums of lanes, two of orders


class Gate:
    """`parameters[i]` are the parameters of layer i in the layout's order."""

    def __init__(
        self,
        ranks: Ranks,
        gathers: Gathers,
        parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self._ranks = ranks
        self._gathers = gathers
        self._sizes = [len(of_layer) for of_layer in parameters]
        # As DeepSpeed does: of parameters that every model-parallel rank has whole, one counts.
        self._counted = [
            [ranks.counts_duplicates or _is_split(parameter) for parameter in of_layer]
            for of_layer in parameters
        ]
        self._executor: SharedExecutor | None = None
        self._drains: SharedDrains | None = None

    def connect(self, executor: SharedExecutor, drains: SharedDrains) -> None:
        self._executor, self._drains = executor, drains

    def meet(self, square_sums: Sequence[dict[int, float]]) -> tuple[list[float], list[set[int]]]:
        """Sums of squares of every gradient of the step, one per rank, and the parameters that have
        one on any rank, by layer. `square_sums` are of this rank's elements. RankError when the
        ranks did not do the same.
        """
        assert self._executor is not None
        assert self._drains is not None
        self._gathers.quiet()
        seen = [self._executor.seen_uses(), self._drains.seen_order()]
        sums = [
            value
            for layer, of_layer in enumerate(square_sums)
            for position, value in of_layer.items()
            if self._counted[layer][position] or not math.isfinite(value)
        ]
        total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan
        touched = [
            float(position in of_layer)
            for of_layer, size in zip(self._drains.touched, self._sizes, strict=True)
            for position in range(size)
        ]
        marks = [
            *map(float, self._gathers.issued.values()),
            *(float(zlib.crc32(s.encode())) for s in seen),
        ]
        mine = torch.tensor([total, *marks, *touched], dtype=torch.float64)
        rows = self._ranks.control.numbers(mine, "gate")
        check_marks(self._ranks, rows[:, 1:3].tolist(), used=self._drains.early)
        for column, adopt in ((3, self._executor.adopt_uses), (4, self._drains.adopt_order)):
            if len(set(rows[:, column].tolist())) == 1:
                adopt()
        flags = (rows[:, PARTS:] > 0).any(dim=0).split(self._sizes)
        arrived = [set(of_layer.nonzero().flatten().tolist()) for of_layer in flags]
        self._drains.taken(arrived)
        return self._over_model_parallel(rows[:, 0].tolist()), arrived

    def _over_model_parallel(self, sums: list[float]) -> list[float]:
        if self._ranks.norms is None:
            return sums
        total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan
        mine = torch.tensor([total], dtype=torch.float64)
        found: list[float] = self._ranks.norms.numbers(mine, "norm").flatten().tolist()
        return found

    def publishing(self, layer: int, work: Callable[[], object]) -> Callable[[], None]:
        """`work` updates this rank's part of the layer: the node's others learn when it is done."""
        return self._gathers.publishing(layer, work)

    def forget(self) -> None:
        """The step has ended or is abandoned."""
        if self._drains is not None:
            self._drains.forget()


def _is_split(parameter: nn.Parameter) -> bool:
    """Whether a model-parallel rank has a part of the parameter that no other has."""
    names = ("model_parallel", "tensor_model_parallel")
    return any(bool(getattr(parameter, name, False)) for name in names)
