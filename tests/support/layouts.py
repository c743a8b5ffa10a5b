"""Layouts for laws of the planner: of sizes alone, and of a model as an engine has it."""

from __future__ import annotations

import torch
from torch import nn

from stronghold.model.layout import PAGE_NUMEL, LayerLayout, ModelLayout, ParameterSlice, Range
from stronghold.model.partition import partition
from stronghold.optim.adam import Adam
from stronghold.optim.states import EXACT, Formats, StateKind
from stronghold.train.layer import Groups, layers_of, layout_of


def layer_of_sizes(
    index: int, trained: int, frozen: int = 0, *, streamed: bool = True
) -> LayerLayout:
    """A layer with a parameter of so many trained elements, and one of so many frozen ones."""
    slices: list[ParameterSlice] = []
    ranges: list[Range] = []
    begin = 0
    for numel, trains in ((trained, True), (frozen, False)):
        if numel:
            made = ParameterSlice(
                name=f"p{trains}",
                shape=(numel,),
                trainable=trains,
                format=0,
                num_weights=None,
                offset=begin,
                numel=numel,
                range=len(ranges),
            )
            slices.append(made)
            end = begin + -(-numel // PAGE_NUMEL) * PAGE_NUMEL
            covers = Range(begin=begin, end=end, format=0, trainable=trains, num_parameters=numel)
            ranges.append(covers)
            begin = end
    return LayerLayout(
        index=index,
        name=f"layer{index}",
        streamed=streamed,
        slices=tuple(slices),
        ranges=tuple(ranges),
        trainable_numel=ranges[0].end if trained else 0,
        numel=begin,
        num_parameters=trained + frozen,
        num_trainable=trained,
    )


def laid_out(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, kind: StateKind = EXACT
) -> tuple[ModelLayout, Formats]:
    """The layers of a model whose floating-point parameters compute in `dtype`, under Adam."""
    adam = Adam()
    groups: Groups = {p: ({}, adam) for p in model.parameters() if p.requires_grad}
    parts = partition(model)
    return layout_of(layers_of(parts, groups, dtype_of=lambda _: dtype, kind=kind), parts)
