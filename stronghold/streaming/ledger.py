"""Knows where in a step one engine is, and whether its arrays belong to one step.

Owns no array. The training thread enters, and autograd's thread reads in backward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState

logger = logging.getLogger("stronghold")


class Ledger:
    """Knows where in a step one engine is, and whether its arrays belong to one step."""

    def __init__(self, layers: Sequence[LayerState]) -> None:
        self._layers = layers
        self.boundary = True  # whether the running micro-batch ends the step
        # why arrays belong to two steps or two checkpoints
        self._torn: str | None = None

    @property
    def is_in_step(self) -> bool:
        """True if a layer has gradients of a step that has not ended."""
        return any(not state.gradients.is_empty for state in self._layers)

    def begin_backward(self, *, boundary: bool) -> None:
        """The next gradients belong to a micro-batch that ends the step (`boundary`) or not."""
        self.check()
        self.boundary = boundary

    def check(self) -> None:
        """Raise ConfigError while the arrays belong to two steps, or to two checkpoints."""
        if self._torn is not None:
            raise ConfigError(self._torn)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Context manager around a change of many layers, named `what`. If the change does not end,
        `check` refuses everything until a later change ends."""
        self._torn = (
            f"{what} did not end: some layers have new values and others have not. Nothing can go "
            "on from that: load a checkpoint (engine.load_checkpoint)"
        )
        yield
        self._torn = None

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void."""
        if self.is_in_step:
            logger.warning("backward failed: the gradients of this step so far are dropped")

    def forget(self) -> None:
        """Drop the gradients of a step that has ended, or is abandoned."""
        for state in self._layers:
            state.gradients.clear()
