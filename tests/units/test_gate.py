"""The gate's numbers, written out: the engine and the oracle of the laws share their code."""

from __future__ import annotations

import math

import pytest
import torch

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.model.layout import ParameterShape, Shards, layer_layout
from stronghold.runtime.optimizer_step import Ledger, norm_and_scale
from tests.support.states import adam_formats


def test_norms_and_scales_are_torchs_of_unscaled_gradients() -> None:
    assert norm_and_scale([9.0, 16.0], clipping=0.0, loss_scale=1.0) == (5.0, 1.0)
    assert norm_and_scale([9.0, 16.0], clipping=0.0, loss_scale=4.0) == (1.25, 0.25)
    clipped = norm_and_scale([9.0, 16.0], clipping=0.5, loss_scale=4.0)
    assert clipped == (1.25, 0.5 / (1.25 + 1e-6) / 4.0)
    assert norm_and_scale([9.0, 16.0], clipping=2.0, loss_scale=4.0) == (1.25, 0.25)
    assert norm_and_scale([9.0, math.inf], clipping=0.5, loss_scale=1.0) == (math.inf, 0.0)
    assert all(map(math.isnan, norm_and_scale([9.0, math.nan], clipping=0.5, loss_scale=1.0)))


def test_after_an_early_update_no_second_backward_begins() -> None:
    shape = ParameterShape(name="p", shape=(8,), trainable=True)
    layout = layer_layout([shape], index=0, name="layer", streamed=True)
    state = LayerState(
        layout=layout, weights=torch.empty(0), formats=adam_formats(torch.float32), shards=Shards()
    )
    ledger = Ledger([state], early=True)
    ledger.begin_backward(boundary=True)
    state.gradients.used.add(0)
    with pytest.raises(ConfigError, match=r"a second engine\.backward"):
        ledger.begin_backward(boundary=True)
    ledger.forget()
    ledger.begin_backward(boundary=True)
