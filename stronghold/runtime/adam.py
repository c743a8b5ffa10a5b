"""Which Adam each parameter gets: groups, hyper-parameters and step counts become steps of Adam.

Never touches a weight and never decides when (`runtime.update` does). The training thread
calls `advance`, and between two steps `end_step`.

[Note: half a unit] A lean master has 24 bits: of a weight in [2^e, 2^(e+1)) half a unit in the last
place is 2^(e-16), and what is less than that is rounded away, in every step. Adam's steps are about
as large as the learning rate, most of them smaller. So weights from 2^(floor(log2(lr)) + 17) on
stand still, but for steps that are larger than the rate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from stronghold.errors import ConfigError
from stronghold.memory.host import HostStore
from stronghold.memory.layer import LayerState
from stronghold.model.layout import ParameterSlice

logger = logging.getLogger("stronghold")

Group = dict[str, Any]
"""A live parameter group of a `torch.optim.Optimizer`."""


class AdamFlags(NamedTuple):
    """Decoupled weight decay (AdamW) or L2 (Adam), and whether moments are corrected for their
    bias."""

    adamw: bool
    bias_correction: bool


Groups = Mapping[nn.Parameter, tuple[Group, AdamFlags]]
"""The live group and the flags of each parameter that is trained."""


class ParameterStep(NamedTuple):
    """One parameter's step: the numbers that were read for it."""

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
    """Hyper-parameters are read from the live `groups` at `advance`: schedulers write into
    them. The counts, and which parameters are trained, stand in the layers."""

    def __init__(self, groups: Groups, layers: Sequence[LayerState]) -> None:
        self._groups = groups
        self._read: dict[int, tuple[Group, tuple[float, ...]]] = {}  # since the last step
        self._frozen: list[tuple[str, nn.Parameter]] = []
        for state in layers:
            numbered = list(enumerate(state.parameters))
            state.counts = [0] * len(numbered)
            state.trained = frozenset(k for k, p in numbered if p in self._groups)
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

    def advance(
        self, state: LayerState, arrived: frozenset[int], scale: float
    ) -> tuple[ParameterStep, ...]:
        """Count one step of the parameters that have a gradient, with this moment's numbers.
        `scale` multiplies the gradients: clip coefficient and 1 / loss scale."""
        counts, steps = state.counts, []
        read: Group | None = None
        for k in sorted(arrived):
            group, flags = self._groups[state.parameters[k]]
            if group is not read:
                read, numbers = group, _numbers(group)
                self._read.setdefault(id(group), (group, numbers))
            counts[k] += 1
            steps.append(ParameterStep(*numbers, scale, counts[k], *flags))
        return tuple(steps)

    def refuse_changed(self) -> None:
        """ConfigError where updates of this step have taken other numbers than stand there now."""
        if any(_numbers(group) != numbers for group, numbers in self._read.values()):
            raise ConfigError(
                "optimizer.param_groups were changed between engine.backward and engine.step, when "
                "weights had been updated as their gradients came. Change them before "
                "engine.backward, or set gradient_clipping above 0 or bf16.check_grad_overflow "
                "true, so that updates wait for the step; and load a checkpoint"
            )

    def forget(self) -> None:
        """The step has ended, or is void."""
        self._read.clear()

    def rates(self) -> list[float]:
        """The learning rate of each parameter that is trained."""
        return [float(group["lr"]) for group, _ in self._groups.values()]

    def rates_of(self, state: LayerState) -> list[tuple[ParameterSlice, float]]:
        """The layer's parameters that are trained, with their learning rates."""
        of_layer = zip(state.layout.slices, state.parameters, strict=True)
        return [(s, float(self._groups[p][0]["lr"])) for s, p in of_layer if p in self._groups]

    def retract(self, state: LayerState, arrived: Iterable[int]) -> None:
        """Undo the count of `advance`: its steps were not taken."""
        for k in arrived:
            state.counts[k] -= 1


def _numbers(group: Group) -> tuple[float, float, float, float, float]:
    """As `ParameterStep` begins."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    return float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(decay)


SHOWN = 3  # layers that are named
PIECE_NUMEL = 1 << 22  # compared at once


class Standstill:
    """Warns, once or never, of steps that are too small to move the largest weights, by one look in
    the first step whose rates are no larger than those of the step before: a warm-up's first rates
    say nothing. Without effect for exact states, whose masters have every bit."""

    def __init__(self, host: HostStore, adam: AdamSteps) -> None:
        self._host, self._adam = host, adam
        self._before: list[float] | None = None
        self._looks = host.states.is_lean

    def end_step(self) -> None:
        """A step was taken."""
        if not self._looks:
            return
        rates, before = self._adam.rates(), self._before
        self._before = rates
        if before is None or any(now > then for now, then in zip(rates, before, strict=True)):
            return
        self._looks = False
        found = [(state, *self._standing(state)) for state in self._host.layers]
        standing = [(state, count, numel) for state, count, numel in found if count]
        if standing:
            named = ", ".join(f"{c} of {n} in {s.name}" for s, c, n in standing[:SHOWN])
            if len(standing) > SHOWN:
                named += f" and more in {len(standing) - SHOWN} other layers"
            logger.warning(
                "lean states: a step of the learning rate (%s) does not move %s: it is less than "
                "half a unit of masters of 24 bits that are so large. Raise the rate, or set "
                'stronghold.states to "exact", whose masters have all bits',
                ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)),
                named,
            )

    def _standing(self, state: LayerState) -> tuple[int, int]:
        """How many of this rank's weights of the layer stand still, and of how many."""
        state.records["weights"].writer.wait()
        count = numel = 0
        for part, rate in self._adam.rates_of(state):
            if rate <= 0.0:  # as asked
                continue
            least = 2.0 ** (math.floor(math.log2(rate)) + 17)  # [Note: half a unit]
            end = part.offset + part.numel
            for _, found in self._host.pieces(state.index, ("weights",), part.offset, end):
                numel += found["weights"].numel()
                for piece in found["weights"].split(PIECE_NUMEL):
                    count += int((piece.abs() >= least).sum())
        return count, numel
