"""A method with a bug that others really had: of several micro-batches only the last one's
gradients count.

`benchmarks/compare.py` runs it as tests.support.wrong_method:LosesMicroBatches.
"""

from __future__ import annotations

import torch
from methods.plain import Plain
from methods.task import Batch


class LosesMicroBatches(Plain):
    """Fast, and wrong."""

    def step(self, batches: list[Batch]) -> torch.Tensor:
        with torch.no_grad():
            unseen = [self._model(**batch).loss for batch in batches[:-1]]
        return torch.stack([*unseen, super().step(batches[-1:])]).mean()
