"""Layouts for laws of the planner: of sizes alone, and of a model as an engine has it."""

from __future__ import annotations

import torch
from torch import nn

from stronghold.model.layout import LayerLayout, ModelLayout
from stronghold.model.partition import partition
from stronghold.optim.adam import Adam
from stronghold.optim.states import EXACT, StateKind, page_numel, states_of
from stronghold.train.layer import Groups, layers_of, layout_of

PAGE = page_numel(EXACT)


def layer_of_sizes(
    index: int, trained: int, frozen: int = 0, *, streamed: bool = True
) -> LayerLayout:
    """A layer with a parameter of so many trained elements, and one of so many frozen ones.
    In bf16 under Adam."""
    return LayerLayout(
        index=index,
        name=f"layer{index}",
        streamed=streamed,
        states=states_of(torch.bfloat16, EXACT, Adam().moments) if trained else None,
        trained_numel=-(-trained // PAGE) * PAGE,
        frozen_bytes=2 * -(-frozen // PAGE) * PAGE,
        frozen_dtypes=frozenset({torch.bfloat16} if frozen else ()),
        num_parameters=trained + frozen,
        num_trained=trained,
    )


def laid_out(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, kind: StateKind = EXACT
) -> ModelLayout:
    """The layers of a model whose floating-point parameters compute in `dtype`, under Adam."""
    adam = Adam()
    groups: Groups = {p: ({}, adam) for p in model.parameters() if p.requires_grad}
    parts = partition(model)
    return layout_of(layers_of(parts, groups, dtype_of=lambda _: dtype, kind=kind), parts)
