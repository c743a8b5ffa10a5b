"""Sums of squares of arrays that come in pieces, with the bits that the whole would give.

Owns the sums so far. The kernel adds up blocks of a fixed size, counted from a parameter's first
element, and then the blocks in order ([Note: same bits] of `stronghold.h`); pieces of a layer end
wherever a page does. So a block that is cut is put together here before it is summed. Entered by
one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stronghold.device.kernels import Kernels
from stronghold.model.layout import ParameterSlice

SUM_BLOCK_NUMEL = 65536  # kSumBlock of the kernels: a part of the result's definition


class PieceNorms:
    """Sums of squares of parameters in fp32, by position, in `sums`: complete once every element
    was added, in order.
    """

    def __init__(self, kernels: Kernels, sums: dict[int, float]) -> None:
        self._kernels = kernels
        self._sums = sums
        self._totals: dict[int, float] = {}  # `sums` may have an older one
        self._cut: torch.Tensor | None = None  # the block that the last piece cut

    def add(
        self,
        flat: torch.Tensor,
        begin: int,
        end: int,
        parts: Sequence[tuple[int, ParameterSlice]],
    ) -> None:
        """Add what lies in `flat`, elements [begin, end) of the layer, of each of `parts`."""
        if flat.is_meta:  # a simulation's, of which blocks would be most of its time
            self._sums.update((position, 0.0) for position, _ in parts)
            return
        blocks: list[tuple[int, torch.Tensor]] = []
        for position, part in parts:
            at, stop = max(begin, part.offset), min(end, part.offset + part.numel)
            while at < stop:
                done = (at - part.offset) // SUM_BLOCK_NUMEL + 1
                last = part.offset + min(part.numel, done * SUM_BLOCK_NUMEL)
                block = flat[at - begin : min(stop, last) - begin]
                if self._cut is not None:
                    block, self._cut = torch.cat([self._cut, block]), None
                if stop < last:
                    self._cut = block.clone()
                else:
                    blocks.append((position, block))
                at = min(stop, last)
        segments = [(block.data_ptr(), block.numel()) for _, block in blocks]
        found = self._kernels.sum_squares(torch.float32, segments)
        for (position, _), value in zip(blocks, found, strict=True):
            self._sums[position] = self._totals[position] = self._totals.get(position, 0.0) + value
