"""One layer's arrays as a store holds them, and how its parameters lie in a flat one.

Owns no memory: `memory.host` and `memory.resident` make the arrays. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stronghold.memory.gradients import GradientEntry
from stronghold.model.layout import LayerLayout, ParameterSlice
from stronghold.model.shards import Shards
from stronghold.model.source import WeightSource


def view(flat: torch.Tensor, part: ParameterSlice) -> torch.Tensor:
    """The parameter's own shape inside its layer's flat array."""
    return flat[part.offset : part.offset + part.numel].view(part.shape)


def fill(
    weights: torch.Tensor,
    layout: LayerLayout,
    parameters: Sequence[nn.Parameter],
    source: WeightSource | None,
) -> None:
    """Copy `parameters` (in the layout's order) into the layer's flat host array, cast to its
    dtype; those on the meta device are read from `source`.
    """
    for part, parameter in zip(layout.slices, parameters, strict=True):
        if parameter.is_meta and source is not None:
            source.read_into(parameter, view(weights, part))
        else:
            view(weights, part).copy_(parameter.detach())


@dataclass(slots=True, eq=False)
class LayerState:
    """One layer's arrays; those of training stay None until the first backward, and where they
    lie in files. They are slabs on the host, or `on_device`, where `memory.resident` made them.
    Those of training have the elements [begin, end) of the layer: this rank's of `shards`.
    """

    layout: LayerLayout
    weights: torch.Tensor
    shards: Shards
    on_device: bool = False
    low: torch.Tensor | None = None
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    accumulated: torch.Tensor | None = None
    held: GradientEntry | None = None

    @property
    def begin(self) -> int:
        return self.shards.trained(self.layout)[0]

    @property
    def end(self) -> int:
        return self.shards.trained(self.layout)[1]
