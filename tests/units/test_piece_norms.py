"""Norms over pieces: the bits of the whole, wherever a layer is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from stronghold import native
from stronghold.devices.base import Record
from stronghold.memory.layer import LayerState
from stronghold.model.layout import PAGE_NUMEL, ParameterShape, Shards, layer_layout
from stronghold.native import Pool
from stronghold.streaming.host_gradients import SUM_BLOCK_NUMEL, PieceNorms
from stronghold.streaming.pieces import InBuffer, LayerGradients, Piece
from tests.support.states import adam_formats

NUMELS = (1, 17, 3 * SUM_BLOCK_NUMEL + 4097, SUM_BLOCK_NUMEL, 0, PAGE_NUMEL, 2 * SUM_BLOCK_NUMEL)


@pytest.fixture
def kernels() -> Iterator[Pool]:
    pool = native.Pool(1)
    yield pool
    pool.close()


def cuts(numel: int, seed: int) -> Iterator[tuple[int, int]]:
    """Pieces that cover so many elements, at multiples of a page; none for seed 0."""
    chance, begin = random.Random(seed), 0
    while begin < numel:
        pages = chance.choice([1, 2, 31, 32, 40]) if seed else numel // PAGE_NUMEL
        yield begin, min(begin + pages * PAGE_NUMEL, numel)
        begin += pages * PAGE_NUMEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_have_the_norms_of_the_whole(kernels: Pool, dtype: torch.dtype, seed: int) -> None:
    shapes = [
        ParameterShape(name=f"p{k}", shape=(n,), trainable=True) for k, n in enumerate(NUMELS)
    ]
    layout = layer_layout(shapes, index=0, name="layer", streamed=True)
    state = LayerState(
        layout=layout, weights=torch.empty(0), formats=adam_formats(dtype), shards=Shards()
    )
    flat = torch.randn(layout.trainable_numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    arrived = frozenset(range(len(NUMELS))) - {3}
    gradients = LayerGradients(
        state, state.updated_elements(arrived), InBuffer(flat.view(torch.uint8), Record())
    )
    sums: dict[int, float] = {3: 7.0}
    norms = PieceNorms(kernels, sums)
    for begin, end in cuts(layout.trainable_numel, seed):
        norms.add(Piece(gradients, begin, end, {}))
    parts = [flat[p.offset : p.offset + p.numel] for p in layout.slices]
    expected = kernels.sum_squares(dtype, [(part.data_ptr(), part.numel()) for part in parts])
    assert sums == {**dict(enumerate(expected)), 3: 7.0}
