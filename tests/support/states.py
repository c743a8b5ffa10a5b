"""The arrays of parameters that Adam trains, for tests of rooms that never run a step."""

from __future__ import annotations

import torch

from stronghold.optim import DEFAULT
from stronghold.optim.states import EXACT, StateKind, States, states_of

MOMENTS = tuple(moment.name for moment in DEFAULT.moments)


def adam_states(dtype: torch.dtype, kind: StateKind = EXACT) -> States:
    """The arrays of weights of `dtype` that Adam trains."""
    return states_of(dtype, kind, DEFAULT.moments)
