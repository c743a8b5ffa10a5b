"""Arguments of the kernels: one row for each parameter, as the C ABI lays it out.

Owns the layouts alone. The caller owns the memory behind each address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from stronghold.errors import ConfigError


class UpdateSegment(NamedTuple):
    """The arguments of one step for one array of parameters.

    weight, low, grad, moment*, scale*  addresses in host memory; 0 for an array that the states
                                        (`stronghold.optim.states`) do not have
    numel                               elements of each array
    number*, flags                      those of the optimizer, in its order; see `stronghold.h`
    grad_scale                          multiplies the gradient
    step                                counts from 1

    A tuple, in the order and with the types of the C structure, because a step makes hundreds. Make
    it with keywords.
    """

    weight: int
    low: int
    grad: int
    numel: int
    moment0: int = 0
    moment1: int = 0
    scale0: int = 0
    scale1: int = 0
    number0: float = 0.0
    number1: float = 0.0
    number2: float = 0.0
    number3: float = 0.0
    number4: float = 0.0
    number5: float = 0.0
    grad_scale: float = 1.0
    step: int = 1
    flags: int = 0


class Target(NamedTuple):
    """The destinations of one segment's step: an address for each array that it writes.

    0, or the segment's address, means in place. Some arrays may be in place and others not. The
    step reads an array that is not in place from the segment's address, and does not change it. It
    writes all of the segment's elements of the target, and nothing before or after them. A target
    overlaps no other array of the call. [Note: targets] of `stronghold.h` has the whole contract.

    A tuple in the order of the C structure, which is that of `States.kernel_arrays`.
    """

    weight: int = 0
    low: int = 0
    moment0: int = 0
    moment1: int = 0
    scale0: int = 0
    scale1: int = 0


_C_TYPES = {int: np.int64, float: np.float64}


def _row_dtype(structure: type) -> np.dtype[Any]:
    """The NumPy dtype of a C structure. `library` checks its size."""
    hints = get_type_hints(structure)
    return np.dtype([(name, _C_TYPES[hint]) for name, hint in hints.items()])


ROW = _row_dtype(UpdateSegment)
TARGET_ROW = _row_dtype(Target)
Rows = npt.NDArray[Any]
"""Segments or targets as a NumPy structured array [segments], with their fields."""
Segments = Sequence[UpdateSegment] | Rows
Targets = Sequence[Target] | Rows
"""A target for each segment of a call."""


def rows(segments: Segments) -> Rows:
    """A copy of `segments` as rows. A field can be assigned for all rows at once."""
    return np.array(segments, dtype=ROW)


def target_rows(targets: Targets, num_segments: int) -> Rows:
    """A copy of `targets` as rows. ConfigError unless there is one for each segment."""
    if len(targets) != num_segments:
        raise ConfigError(f"targets: got {len(targets)}, expected one for each of {num_segments}")
    return np.array(targets, dtype=TARGET_ROW)


def targets_of(rows: Rows) -> Rows:
    """Targets where the arrays of these segments are."""
    targets = np.zeros(len(rows), TARGET_ROW)
    for name in Target._fields:
        targets[name] = rows[name]
    return targets
