"""Laws of the layout: offsets that never overlap, aligned and padded, the same for any device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stronghold.errors import StateError
from stronghold.model.layout import ALIGN_NUMEL, PAGE_NUMEL, LayerLayout, ModelLayout, layout
from stronghold.model.partition import Partition, partition
from tests.models import MODELS, PLAIN


class _Holder(nn.Module):
    """A block with one parameter of each shape; those at odd positions are frozen if asked."""

    def __init__(self, shapes: list[tuple[int, ...]], *, freeze: bool = False) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            trainable = not (freeze and index % 2)
            self.register_parameter(f"p{index}", nn.Parameter(torch.ones(shape), trainable))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def one_layer(*shapes: tuple[int, ...], freeze: bool = False) -> LayerLayout:
    model = nn.Sequential(_Holder(list(shapes), freeze=freeze))
    (layer,) = layout(partition(model, layers="*")).layers
    return layer


def offsets(layer: LayerLayout) -> list[int]:
    return [part.offset for part in layer.slices]


@pytest.fixture(params=PLAIN)
def split(request: pytest.FixtureRequest) -> tuple[Partition, ModelLayout]:
    found = partition(MODELS[request.param]()[0])
    return found, layout(found)


def test_slices_never_overlap_and_stay_in_their_part(split: tuple[Partition, ModelLayout]) -> None:
    for layer in split[1].layers:
        taken = torch.zeros(layer.numel, dtype=torch.int32)
        for part in layer.slices:
            taken[part.offset : part.offset + part.numel] += 1
            end = part.offset + part.numel
            if part.trainable:
                assert end <= layer.trainable_numel
            else:
                assert layer.trainable_numel <= part.offset
                assert end <= layer.numel
        assert int(taken.max()) <= 1
        assert int(taken.sum()) == layer.num_parameters


def test_every_offset_and_size_is_aligned(split: tuple[Partition, ModelLayout]) -> None:
    for layer in split[1].layers:
        assert all(offset % ALIGN_NUMEL == 0 for offset in offsets(layer))
        assert layer.trainable_numel % PAGE_NUMEL == 0
        assert layer.numel % PAGE_NUMEL == 0


def test_counts_are_the_model_s(split: tuple[Partition, ModelLayout]) -> None:
    found, placed = split
    parameters = list(found.model.parameters())
    assert placed.num_parameters == sum(p.numel() for p in parameters)
    assert placed.num_trainable == sum(p.numel() for p in parameters if p.requires_grad)
    assert sorted(placed.streamed + placed.resident) == list(range(len(placed.layers)))
    assert all(placed.layers[index].streamed for index in placed.streamed)


def test_the_offsets_of_the_weird_sizes_are_exactly_these() -> None:
    layer = one_layer((1,), (15,), (17,), (4097,), (), (0, 3), (2, 2))
    assert offsets(layer) == [0, 128, 256, 384, 4608, 4736, 4736]
    assert [part.numel for part in layer.slices] == [1, 15, 17, 4097, 1, 0, 4]
    assert layer.slices[4].shape == ()
    assert layer.slices[5].shape == (0, 3)
    assert (layer.trainable_numel, layer.numel) == (6144, 6144)
    assert (layer.num_parameters, layer.num_trainable) == (4135, 4135)


def test_frozen_parameters_begin_on_the_page_after_the_trainable_ones() -> None:
    layer = one_layer((5,), (2048,), (6,), (1,), freeze=True)
    assert [part.name for part in layer.slices] == ["0.p0", "0.p2", "0.p1", "0.p3"]
    assert [part.trainable for part in layer.slices] == [True, True, False, False]
    assert offsets(layer) == [0, 128, 2048, 4096]
    assert (layer.trainable_numel, layer.numel) == (2048, 6144)
    assert (layer.num_parameters, layer.num_trainable) == (2060, 11)


def test_a_layer_without_elements_takes_no_bytes() -> None:
    model = nn.Sequential(_Holder([(3,)]), _Holder([(0,), (0, 4)]))
    full, empty = layout(partition(model, layers="*")).layers
    assert (full.streamed, empty.streamed) == (True, False)
    assert full.numel == PAGE_NUMEL
    assert (empty.numel, empty.trainable_numel, offsets(empty)) == (0, 0, [0, 0])


@pytest.mark.parametrize("name", ["gpt", "weird_model", "frozen", "tied_blocks"])
def test_the_meta_device_has_the_same_layout(name: str) -> None:
    expected = layout(partition(MODELS[name]()[0]))
    with torch.device("meta"):
        model = MODELS[name]()[0]
    assert next(model.parameters()).is_meta
    assert layout(partition(model)) == expected


def test_requires_grad_that_changed_since_the_partition_is_noticed() -> None:
    model = MODELS["gpt"]()[0]
    found = partition(model)
    next(model.blocks[0].parameters()).requires_grad_(False)
    with pytest.raises(StateError, match=r"blocks\.0.*requires_grad"):
        layout(found)
