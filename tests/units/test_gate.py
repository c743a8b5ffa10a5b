"""The gate's numbers, written out: the engine and the oracle of the laws share their code."""

from __future__ import annotations

import math

import pytest

from stronghold.streaming.early_updates import EarlyUpdateRule
from stronghold.streaming.optimizer_step import norm_and_scale


def test_norms_and_scales_are_torchs_of_unscaled_gradients() -> None:
    assert norm_and_scale([9.0, 16.0], clipping=0.0, loss_scale=1.0) == (5.0, 1.0)
    assert norm_and_scale([9.0, 16.0], clipping=0.0, loss_scale=4.0) == (1.25, 0.25)
    clipped = norm_and_scale([9.0, 16.0], clipping=0.5, loss_scale=4.0)
    assert clipped == (1.25, 0.5 / (1.25 + 1e-6) / 4.0)
    assert norm_and_scale([9.0, 16.0], clipping=2.0, loss_scale=4.0) == (1.25, 0.25)
    assert norm_and_scale([9.0, math.inf], clipping=0.5, loss_scale=1.0) == (math.inf, 0.0)
    assert all(map(math.isnan, norm_and_scale([9.0, math.nan], clipping=0.5, loss_scale=1.0)))


# -- whether the next step's early updates are worth their bytes -----------------------------------
def likely(norms: list[float], clipping: float = 1.0) -> str:
    """Before each step, and after the last: "x" where early updates are likely to be committed."""
    worth, said = EarlyUpdateRule(), ""
    for norm in norms:
        said += "x" if worth.is_likely else "."
        worth.end_step(norm=norm, clipping=clipping)
    return said + ("x" if worth.is_likely else ".")


@pytest.mark.parametrize(
    ("norms", "clipping", "expected"),
    [
        ([0.5] * 5, 1.0, "xxxxxx"),
        ([9.0] * 5, 0.0, "xxxxxx"),
        # Two misses in a row have no consequence. Each further pause is twice as long.
        ([1.1] * 12, 1.0, "xxx.x..x....x"),
        ([1.1] * 4 + [0.9] + [1.1] * 4, 1.0, "xxx.xxxx.x"),
        # A norm near the clip ends a pause.
        ([2.0] * 5 + [1.2, 2.0, 2.0], 1.0, "xxx...x.."),
    ],
)
def test_early_updates_pause_after_clipped_steps(
    norms: list[float], clipping: float, expected: str
) -> None:
    assert likely(norms, clipping) == expected
