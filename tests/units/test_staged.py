"""What is written to a range of an array in a file leaves the elements beside it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from stronghold.memory.staging import open_ring
from stronghold.memory.tiers import Tiers
from stronghold.model.layout import PAGE_NUMEL, ModelLayout, ParameterShape, layer_layout
from stronghold.plan.homes import FILE, make_homes
from tests.support.pages import PAGE
from tests.support.states import adam_formats
from tests.support.stores import pages, store_of


@pytest.mark.parametrize("mode", ["edit", "replace"])
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 5), (PAGE_NUMEL - 1, PAGE_NUMEL + 1), (17, 5 * PAGE_NUMEL - 3)]
)
def test_elements_beside_a_written_range_stay(
    mode: str, begin: int, end: int, folders: list[Path]
) -> None:
    shape = ParameterShape(name="p", shape=(5 * PAGE_NUMEL,), trainable=True)
    layer = layer_layout([shape], index=0, name="layer", streamed=True)
    count = layer.numel * 4 // PAGE
    layout, formats = ModelLayout(layers=(layer,)), adam_formats(torch.float32)
    homes = make_homes(layout, formats, staged=[{"exp_avg"}])
    with ExitStack() as undo:
        ring = open_ring(1, 4 * PAGE, undo)
        store = undo.enter_context(store_of(folders[:1], pages(count, "exp_avg")))
        tiers = Tiers(layout, formats, homes, {FILE: store}, ring)
        expected = torch.arange(layer.numel, dtype=torch.float32)
        for first, last, found in tiers.staged_pieces(0, ("exp_avg",), 0, layer.numel, "replace"):
            found["exp_avg"].copy_(expected[first:last])
        for first, last, found in tiers.staged_pieces(0, ("exp_avg",), begin, end, mode):  # type: ignore[arg-type]
            if mode == "edit":
                assert torch.equal(found["exp_avg"], expected[first:last])
            found["exp_avg"].copy_(-expected[first:last])
        expected[begin:end] *= -1
        for first, last, found in tiers.staged_pieces(0, ("exp_avg",), 0, layer.numel, "read"):
            assert torch.equal(found["exp_avg"], expected[first:last])
