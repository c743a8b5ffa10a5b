"""The gate's numbers, written out: the engine and the oracle of the laws share their code."""

from __future__ import annotations

import math

import pytest

from stronghold.errors import ConfigError
from stronghold.streaming.early_updates import EarlyUpdateRule
from stronghold.streaming.ledger import Ledger
from stronghold.streaming.optimizer_step import norm_and_scale


def test_norms_and_scales_are_torchs_of_unscaled_gradients() -> None:
    assert norm_and_scale([9.0, 16.0], clipping=0.0, loss_scale=1.0) == (5.0, 1.0)
    assert norm_and_scale([9.0, 16.0], clipping=0.0, loss_scale=4.0) == (1.25, 0.25)
    clipped = norm_and_scale([9.0, 16.0], clipping=0.5, loss_scale=4.0)
    assert clipped == (1.25, 0.5 / (1.25 + 1e-6) / 4.0)
    assert norm_and_scale([9.0, 16.0], clipping=2.0, loss_scale=4.0) == (1.25, 0.25)
    assert norm_and_scale([9.0, math.inf], clipping=0.5, loss_scale=1.0) == (math.inf, 0.0)
    assert all(map(math.isnan, norm_and_scale([9.0, math.nan], clipping=0.5, loss_scale=1.0)))


def test_after_a_change_that_did_not_end_no_backward_begins() -> None:
    ledger = Ledger([])
    with pytest.raises(KeyboardInterrupt), ledger.changing("engine.step"):
        raise KeyboardInterrupt
    with pytest.raises(ConfigError, match=r"engine\.step did not end"):
        ledger.begin_backward(boundary=True)
    with ledger.changing("engine.load_checkpoint"):
        pass
    ledger.begin_backward(boundary=True)


# -- whether the next step's early updates are worth their bytes -----------------------------------
def likely(norms: list[float], clipping: float = 1.0) -> str:
    """Before each step, and after the last: "x" where early updates are likely to be committed."""
    worth, said = EarlyUpdateRule(), ""
    for norm in norms:
        said += "x" if worth.is_likely else "."
        worth.end_step(norm=norm, clipping=clipping)
    return said + ("x" if worth.is_likely else ".")


def test_early_updates_go_on_while_no_step_is_clipped() -> None:
    assert likely([0.5] * 5) == "xxxxxx"
    assert likely([9.0] * 5, clipping=0.0) == "xxxxxx"


def test_early_updates_pause_twice_as_long_after_each_further_miss() -> None:
    """Two misses in a row have no consequence."""
    assert likely([1.1] * 12) == "xxx.x..x....x"
    pauses = [len(pause) for pause in likely([1.1] * 400).split("x")]
    assert pauses[:11] == [0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 64]
    assert max(pauses) == 64


def test_a_step_that_is_not_clipped_ends_the_pause() -> None:
    assert likely([1.1] * 4 + [0.9] + [1.1] * 4) == "xxx.xxxx.x"


def test_early_updates_wait_for_a_norm_near_the_clip() -> None:
    assert likely([2.0] * 6) == "xxx...."
    assert likely([2.0] * 5 + [1.2, 2.0, 2.0]) == "xxx...x.."
