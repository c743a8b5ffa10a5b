"""The mean of several ranks: the order of the sum, and one rounding."""

from __future__ import annotations

import pytest
import torch

from stronghold.distributed.process_groups import mean_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_added_in_fp32_in_the_order_of_the_ranks_and_rounded_once(
    dtype: torch.dtype,
) -> None:
    pieces = torch.randn(3, 4097, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = torch.empty(4097, dtype=dtype)
    mean_of(pieces, found, [2, 1, 0])
    rows = pieces.float()
    assert torch.equal(found, (((rows[2] + rows[1]) + rows[0]) / 3).to(dtype))
