"""Steps of the optimizer: live hyper-parameters and step counts become a kernel's numbers.

Never touches a weight and never decides when a step is made (`runtime.optimizer_step` does). The
training thread calls `next` and `count` when it queues an update, and `Standstill.end_step` between
steps.

[Note: half a unit] A lean master has 24 bits. For a weight in [2^e, 2^(e+1)) half a unit in the
last place is 2^(e-16). A smaller change is rounded away, in every step. Where an optimizer's steps
are about as large as a known size s (often the learning rate), weights from
2^(floor(log2(s)) + 17) on do not move, except in steps that are larger.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from stronghold.errors import ConfigError
from stronghold.memory.host import HostStore
from stronghold.memory.layer import LayerState
from stronghold.model.layout import ParameterSlice
from stronghold.native import MAX_NUMBERS
from stronghold.optim.contract import Group, Optimizer

logger = logging.getLogger("stronghold")

Groups = Mapping[nn.Parameter, tuple[Group, Optimizer]]
"""The live group of each trained parameter, and how that group is updated."""


class ParameterStep(NamedTuple):
    """One parameter's step, as `native.UpdateSegment` ends: the kernel's numbers, with zeros up to
    `MAX_NUMBERS`, the factor of the gradient, the number of the step from 1, and the flags."""

    numbers: tuple[float, ...]
    grad_scale: float
    step: int
    flags: int


class OptimizerSteps:
    """Reads hyper-parameters from the live `groups` at `next`: schedulers write into them. The
    layers hold the counts, and which parameters are trained."""

    def __init__(self, groups: Groups, layers: Sequence[LayerState]) -> None:
        self._groups = groups
        self._frozen: list[tuple[str, nn.Parameter]] = []
        for state in layers:
            numbered = list(enumerate(state.parameters))
            state.optimizer.counts = [0] * len(numbered)
            state.optimizer.trained = frozenset(k for k, p in numbered if p in self._groups)
            slices = state.layout.slices
            self._frozen += [(slices[k].name, p) for k, p in numbered if not p.requires_grad]

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

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer owns the parameter: gradients of others are dropped."""
        return parameter in self._groups

    def optimizers_of(self, state: LayerState) -> dict[int, Optimizer]:
        """How each trained parameter of the layer is updated, by position."""
        return {k: self._groups[state.parameters[k]][1] for k in sorted(state.optimizer.trained)}

    def next(
        self, state: LayerState, positions: frozenset[int], scale: float
    ) -> tuple[ParameterStep, ...]:
        """The next step of the parameters at these positions, in order, with this moment's
        numbers. `scale` multiplies the gradients: clip coefficient and 1 / loss scale."""
        counts, steps = state.optimizer.counts, []
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
        """The next step of these parameters was taken, or will be."""
        for k in positions:
            state.optimizer.counts[k] += 1

    def step_sizes(self) -> list[float]:
        """About how far a step moves a weight, of each trained parameter whose optimizer knows."""
        sizes = (optimizer.step_size(group) for group, optimizer in self._groups.values())
        return [size for size in sizes if size is not None]

    def step_sizes_of(self, state: LayerState) -> list[tuple[ParameterSlice, float]]:
        """The same of the layer's parameters, with their slices."""
        sizes = []
        for part, parameter in zip(state.layout.slices, state.parameters, strict=True):
            if parameter in self._groups:
                group, optimizer = self._groups[parameter]
                size = optimizer.step_size(group)
                if size is not None:
                    sizes.append((part, size))
        return sizes


SHOWN = 3  # layers that are named
PIECE_NUMEL = 1 << 22  # compared at once


class Standstill:
    """Warns, once or never, of steps that are too small to move the largest weights. It looks once,
    in the first step whose sizes are no larger than those of the step before: a warm-up's first
    rates mean nothing. It does nothing for exact states, whose masters have every bit."""

    def __init__(self, host: HostStore, steps: OptimizerSteps) -> None:
        self._host, self._steps = host, steps
        self._before: list[float] | None = None
        self._looks = any(made.states and made.states.is_lean for made in host.formats)

    def end_step(self) -> None:
        """A step was taken."""
        if not self._looks:
            return
        sizes, before = self._steps.step_sizes(), self._before
        self._before = sizes
        if before is None or any(now > then for now, then in zip(sizes, before, strict=True)):
            return
        self._looks = False
        counted = [(state, *self._standing(state)) for state in self._host.layers]
        standing = [(state, count, numel) for state, count, numel in counted if count]
        if standing:
            named = ", ".join(f"{c} of {n} in {s.name}" for s, c, n in standing[:SHOWN])
            if len(standing) > SHOWN:
                named += f" and more in {len(standing) - SHOWN} other layers"
            logger.warning(
                "lean states: a step of the learning rate (%s) does not move %s: it is less than "
                "half a unit of masters of 24 bits that are so large. Raise the rate, or set "
                'stronghold.states to "exact", whose masters have all bits',
                ", ".join(f"{size:g}" for size in dict.fromkeys(sizes)),
                named,
            )

    def _standing(self, state: LayerState) -> tuple[int, int]:
        """How many of this rank's weights of the layer stand still, and of how many."""
        state.records["weights"].writer.wait()
        count = numel = 0
        for part, size in self._steps.step_sizes_of(state):
            is_lean = state.formats[part.format].trained.is_lean
            if size <= 0.0 or not is_lean:  # as asked, or with every bit
                continue
            least = 2.0 ** (math.floor(math.log2(size)) + 17)  # [Note: half a unit]
            end = part.offset + part.numel
            for _, views in self._host.access.pieces(state.index, ("weights",), part.offset, end):
                numel += views["weights"].numel()
                for piece in views["weights"].split(PIECE_NUMEL):
                    count += int((piece.abs() >= least).sum())
        return count, numel
