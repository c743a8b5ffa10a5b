"""Optimizer steps: turns live hyper-parameters and step counts into a kernel's numbers.

This file never touches a weight. It never decides when a step is made (`streaming.optimizer_step`
does). The training thread calls `next` and `count` when it queues an update, and
`StalledWeights.end_step` between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from stronghold.errors import ConfigError
from stronghold.memory.host import HostStore
from stronghold.memory.layer import LayerState
from stronghold.model.layout import ParameterSlice
from stronghold.native import MAX_NUMBERS
from stronghold.optim.contract import Group, Optimizer
from stronghold.optim.states import count_standing

logger = logging.getLogger("stronghold")

Groups = Mapping[torch.Tensor, tuple[Group, Optimizer]]
"""Live group of each trained parameter, and the optimizer of that group."""


class ParameterStep(NamedTuple):
    """Numbers of one parameter's step, in the order of the last fields of `native.UpdateSegment`.

    `numbers` are the kernel's, with zeros up to `MAX_NUMBERS`. `grad_scale` multiplies the
    gradient. `step` counts from 1.
    """

    numbers: tuple[float, ...]
    grad_scale: float
    step: int
    flags: int


class OptimizerSteps:
    """Makes the numbers of each update from the live `groups`, which schedulers write.

    The layers hold the step counts, and the set of trained parameters. `num_changes` grows with
    each update of a layer, and with each load of weights.
    """

    def __init__(self, groups: Groups, layers: Sequence[LayerState]) -> None:
        self._groups = groups
        self.num_changes = 0
        self._frozen: list[tuple[str, torch.Tensor]] = []
        for state in layers:
            numbered = list(enumerate(state.parameters))
            state.optimizer.counts = [0] * len(numbered)
            state.optimizer.trained = frozenset(k for k, p in numbered if p in self._groups)
            slices = state.layout.slices
            self._frozen += [(slices[k].name, p) for k, p in numbered if not p.requires_grad]
            self._frozen += [(packed.name, packed.parameter) for packed in state.packed]

    def refuse_unfrozen(self) -> None:
        """Raise ConfigError if a parameter was frozen when the engine was made, and is not now."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen in stronghold.initialize, and is not now: it has neither "
                    "masters nor moments, and would not be trained. Freeze it after initialize "
                    "(a parameter without a gradient is not updated), or destroy the engine and "
                    "initialize again"
                )

    def trains(self, parameter: torch.Tensor) -> bool:
        """True if the optimizer owns the parameter. Gradients of other parameters are dropped."""
        return parameter in self._groups

    def optimizers_of(self, state: LayerState) -> dict[int, Optimizer]:
        """Optimizer of each trained parameter of the layer, by position."""
        return {k: self._groups[state.parameters[k]][1] for k in sorted(state.optimizer.trained)}

    def next(
        self, state: LayerState, positions: frozenset[int], scale: float
    ) -> tuple[ParameterStep, ...]:
        """Make the next step of the parameters at these positions, in order, with the present
        hyper-parameters. `scale` multiplies the gradients: clip coefficient over loss scale."""
        counts = state.optimizer.counts
        steps: list[ParameterStep] = []
        last: Group | None = None
        numbers: tuple[float, ...] = ()
        for k in sorted(positions):
            group, optimizer = self._groups[state.parameters[k]]
            if group is not last:
                last, numbers = group, optimizer.numbers(group)
                numbers += (0.0,) * (MAX_NUMBERS - len(numbers))
            steps.append(ParameterStep(numbers, scale, counts[k] + 1, optimizer.flags))
        return tuple(steps)

    def count(self, state: LayerState, positions: Iterable[int]) -> None:
        """Count one more step of these parameters. It was taken, or is about to be."""
        self.num_changes += 1
        for k in positions:
            state.optimizer.counts[k] += 1

    def step_sizes(self) -> list[float]:
        """Estimate how far a step moves a weight, for each trained parameter whose optimizer can
        tell."""
        sizes = (optimizer.step_size(group) for group, optimizer in self._groups.values())
        return [size for size in sizes if size is not None]

    def step_sizes_of(self, state: LayerState) -> list[tuple[ParameterSlice, float]]:
        """Return (slice, step size) of the layer's parameters, as `step_sizes`."""
        sizes = []
        for parameter_slice, parameter in zip(state.layout.slices, state.parameters, strict=True):
            if parameter in self._groups:
                group, optimizer = self._groups[parameter]
                size = optimizer.step_size(group)
                if size is not None:
                    sizes.append((parameter_slice, size))
        return sizes


SHOWN = 3  # layers that are named


class StalledWeights:
    """Warns once if steps are too small to move the largest weights of lean states.

    It compares once, in the first step whose sizes are no larger than those of the step before. The
    first rates of a warm-up mean nothing. Exact states have every bit of their masters, so it does
    nothing for them.
    """

    def __init__(self, host: HostStore, steps: OptimizerSteps) -> None:
        self._host, self._steps = host, steps
        self._before: list[float] | None = None
        self._looks = any(made.states and made.states.is_lean for made in host.formats)

    def end_step(self) -> None:
        """A step was taken: compare its size with the weights, if that was not done yet."""
        if not self._looks:
            return
        sizes, before = self._steps.step_sizes(), self._before
        self._before = sizes
        rises = before is None or any(now > then for now, then in zip(sizes, before, strict=True))
        if rises or not any(sizes):
            return
        self._looks = False
        stalled: list[str] = []
        for state in self._host.layers:
            num_stalled, numel = self._count_stalled(state)
            if num_stalled:
                stalled.append(f"{num_stalled} of {numel} in {state.name}")
        if stalled:
            named = ", ".join(stalled[:SHOWN])
            if len(stalled) > SHOWN:
                named += f" and more in {len(stalled) - SHOWN} other layers"
            logger.warning(
                "lean states: a step of the learning rate (%s) does not move %s: it is less than "
                "half a unit of masters of 24 bits that are so large. Raise the rate, or set "
                'stronghold.states to "exact", whose masters have all bits',
                ", ".join(f"{size:g}" for size in dict.fromkeys(sizes)),
                named,
            )

    def _count_stalled(self, state: LayerState) -> tuple[int, int]:
        """Count this rank's weights of the layer that do not move. Returns that number, and the
        number of weights that were compared."""
        state.records["weights"].writer.wait()
        num_stalled = numel = 0
        for parameter_slice, size in self._steps.step_sizes_of(state):
            is_lean = state.formats[parameter_slice.format].trained.is_lean
            # a rate of zero is wanted; exact states move
            if size <= 0.0 or not is_lean:
                continue
            begin = parameter_slice.offset
            end = begin + parameter_slice.numel
            for _, views in self._host.access.pieces(state.index, ("weights",), begin, end):
                weights = views["weights"]
                numel += weights.numel()
                num_stalled += count_standing(weights, size)
        return num_stalled, numel
