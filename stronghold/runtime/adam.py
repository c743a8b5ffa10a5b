"""Which Adam each parameter gets: groups, hyper-parameters and step counts become kernel segments.

Owns how often every parameter was updated. Never touches a weight and never decides when: the
update lane, the device and the NVMe pipeline do. The training thread calls `advance`; any lane may
turn its result into segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from stronghold import native
from stronghold.errors import ConfigError
from stronghold.model.layout import LayerLayout, ParameterSlice

Group = dict[str, Any]
"""A live parameter group of a `torch.optim.Optimizer`."""


class AdamFlags(NamedTuple):
    """Decoupled weight decay (AdamW) or L2 (Adam), and whether moments are corrected for their
    bias.
    """

    adamw: bool
    bias_correction: bool


class Grouped(Protocol):
    """What is needed of an optimizer: the group and the flags of each parameter that it trains."""

    def group_of(self) -> dict[nn.Parameter, tuple[Group, AdamFlags]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingArrays:
    """Elements [begin, end) of one layer's arrays, on one device: element `begin` of the layer is
    element 0 of each tensor. `low` is None for fp32 weights; `gradients` have the compute dtype or
    are fp32 sums.
    """

    begin: int
    end: int
    weights: torch.Tensor
    low: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradients: torch.Tensor


class ParameterStep(NamedTuple):
    """One parameter's step: its place in the layer, and the numbers that were read for it."""

    part: ParameterSlice
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float
    step: int
    adamw: bool
    bias_correction: bool


class AdamSteps:
    """`parameters[i]` are layer i's parameters in the layout's order; hyper-parameters are read
    from `optimizer.param_groups` at `advance`: schedulers write into the live groups.
    """

    def __init__(
        self,
        optimizer: Grouped | None,
        parameters: Sequence[Sequence[nn.Parameter]],
        layers: Sequence[LayerLayout],
    ) -> None:
        self._parameters = parameters
        self._layers = layers
        self._groups = optimizer.group_of() if optimizer is not None else {}
        self._num_trained = [sum(p in self._groups for p in of_layer) for of_layer in parameters]
        self._frozen = [
            (part.name, parameter)
            for layer, of_layer in zip(layers, parameters, strict=True)
            for part, parameter in zip(layer.slices, of_layer, strict=True)
            if not parameter.requires_grad
        ]
        self.counts: list[list[int]] = [[0] * len(layer.slices) for layer in layers]

    def refuse_unfrozen(self) -> None:
        """ConfigError for a parameter that was frozen when the engine was made, and is not now."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen in stronghold.initialize, and is not now: it has neither "
                    "masters nor moments, and would not be trained. Freeze it after initialize "
                    "(a parameter without a gradient is not updated), or destroy the engine and "
                    "initialize again"
                )

    def num_trained(self, layer: int) -> int:
        """How many of the layer's parameters the optimizer owns."""
        return self._num_trained[layer]

    def trained(self, layer: int) -> frozenset[int]:
        """Positions of the layer's parameters that the optimizer owns."""
        of_layer = enumerate(self._parameters[layer])
        return frozenset(k for k, parameter in of_layer if parameter in self._groups)

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer owns the parameter: gradients of others are dropped."""
        return parameter in self._groups

    def advance(
        self, layer: int, arrived: frozenset[int], scale: float
    ) -> tuple[ParameterStep, ...]:
        """Count one step of the parameters that have a gradient, with this moment's numbers.
        `scale` multiplies the gradients: clip coefficient and 1 / loss scale.
        """
        steps = self.next_steps(layer, arrived, scale)
        self.count(layer, arrived)
        return steps

    def next_steps(
        self, layer: int, positions: Iterable[int], scale: float
    ) -> tuple[ParameterStep, ...]:
        """The next steps of the parameters at `positions`, in order; `count` those that are
        taken."""
        counts, steps = self.counts[layer], []
        for k in sorted(positions):
            group, flags = self._groups[self._parameters[layer][k]]
            steps.append(
                ParameterStep(
                    part=self._layers[layer].slices[k],
                    lr=float(group["lr"]),
                    beta1=float(group["betas"][0]),
                    beta2=float(group["betas"][1]),
                    eps=float(group["eps"]),
                    weight_decay=float(group["weight_decay"]),
                    grad_scale=scale,
                    step=counts[k] + 1,
                    adamw=flags.adamw,
                    bias_correction=flags.bias_correction,
                )
            )
        return tuple(steps)

    def count(self, layer: int, positions: Iterable[int]) -> None:
        """Steps of `next_steps` were taken."""
        for k in positions:
            self.counts[layer][k] += 1

    def retract(self, layer: int, arrived: Iterable[int]) -> None:
        """Undo the count of `advance`: its steps were not taken."""
        for k in arrived:
            self.counts[layer][k] -= 1


def adam_segments(
    steps: Sequence[ParameterStep], arrays: TrainingArrays
) -> list[native.AdamSegment]:
    """The parts of `steps` that lie in the arrays' range. The caller keeps the arrays alive until
    the kernel has run.
    """

    def base(array: torch.Tensor | None) -> tuple[int, int]:
        if array is None:
            return 0, 0
        size = array.element_size()
        return array.data_ptr() - arrays.begin * size, size

    weight, weight_size = base(arrays.weights)
    low, low_size = base(arrays.low)
    exp_avg, _ = base(arrays.exp_avg)
    exp_avg_sq, _ = base(arrays.exp_avg_sq)
    grad, grad_size = base(arrays.gradients)
    segments = []
    for step in steps:
        part = step.part
        begin = max(part.offset, arrays.begin)
        numel = min(part.offset + part.numel, arrays.end) - begin
        if numel > 0:
            segments.append(
                native.AdamSegment(
                    weight + begin * weight_size,
                    low + begin * low_size,
                    exp_avg + begin * 4,
                    exp_avg_sq + begin * 4,
                    grad + begin * grad_size,
                    numel,
                    *step[1:7],
                    *step[7:],
                )
            )
    return segments


def adam_bytes(weight_dtype: torch.dtype, grad_dtype: torch.dtype) -> int:
    """Bytes of memory that Adam reads and writes for one parameter: weight, what makes it an fp32
    master, and two fp32 moments both ways, the gradient one way.
    """
    master = {torch.float32: 8, torch.bfloat16: 8, torch.float16: 12}[weight_dtype]
    return master + 16 + grad_dtype.itemsize
