"""What a step allows: which gradients may still come, and what must not be read or written yet.

Owns whether the running micro-batch ends the step, and whether the arrays are of one step; what has
arrived of a layer stands in the layer. Never computes and never submits. Entered by the training
thread, and by autograd's in backward; the two never run at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState

logger = logging.getLogger("stronghold")

CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """`grad_norm`: global L2 norm before clipping, loss scale removed, or what waits for it where
    nothing depended on it. `overflow`: it is not finite, nothing was applied.
    """

    grad_norm: float | Callable[[], float]
    overflow: bool


def norm_and_scale(
    square_sums: Sequence[float], *, clipping: float, loss_scale: float
) -> tuple[float, float]:
    """The global L2 norm without the loss scale, and the factor of the gradients: min(1, clipping /
    (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_ (also of a norm that is not finite), over
    the loss scale. `clipping`: largest global norm, 0 for none.

    Divided, not multiplied by 1 / loss_scale, which rounds once more unless it is a power of two.
    """
    # fsum rounds once: neither the order nor the grouping of parameters into layers can matter.
    norm = math.sqrt(math.fsum(square_sums)) / loss_scale
    clipped = clipping / (norm + CLIPPING_EPSILON) if clipping > 0.0 else 1.0
    return norm, (1.0 if clipped > 1.0 else clipped) / loss_scale


class Ledger:
    """The account of one engine's layers. `early`: updates may be made as gradients come."""

    def __init__(self, layers: Sequence[LayerState], *, early: bool) -> None:
        self._layers = layers
        self.early = early
        self.boundary = True  # whether the running micro-batch ends the step
        self._torn: str | None = None  # why the arrays are of two steps, or of two checkpoints

    @property
    def pending(self) -> bool:
        """Whether gradients of a step that has not ended are there."""
        return any(state.arrived for state in self._layers)

    @property
    def applied(self) -> list[LayerState]:
        """The layers that were updated before the gate, in this step."""
        return [state for state in self._layers if state.applied]

    def begin_backward(self, *, boundary: bool) -> None:
        """The next gradients belong to a micro-batch that ends the step (`boundary`) or not."""
        self.check()
        if self.early and (not boundary or self.applied):
            raise ConfigError(
                "a second engine.backward before engine.step would change weights that were "
                "updated already: set gradient_accumulation_steps to the number of backward calls "
                "per step, or gradient_clipping above 0"
            )
        self.boundary = boundary

    def check(self) -> None:
        """ConfigError while the arrays are of two steps, or of two checkpoints."""
        if self._torn is not None:
            raise ConfigError(self._torn)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Around a change of many layers, which `what` makes: where it does not end, nothing goes
        on before one that does.
        """
        self._torn = (
            f"{what} did not end: some layers have new values and others have not. Nothing can go "
            "on from that: load a checkpoint (engine.load_checkpoint)"
        )
        yield
        self._torn = None

    def refuse_dropping(self) -> None:
        """ConfigError when gradients shall be dropped that weights have taken already."""
        if applied := self.applied:
            raise ConfigError(
                f"zero_grad between backward and step: {applied[0].name} was updated with these "
                "gradients already, as they came. To throw a batch away set gradient_clipping "
                "above 0 or bf16.check_grad_overflow true, so that updates wait for engine.step; "
                "or look at the loss before engine.backward"
            )

    def refuse_further(self, state: LayerState, repeated: Iterable[int]) -> None:
        """ConfigError when gradients come again for a layer that was updated before the gate."""
        names = [state.layout.slices[k].name for k in sorted(repeated)]
        if state.applied and names:
            raise ConfigError(
                f"a further gradient of {', '.join(names)} came after its layer was updated; set "
                "gradient_clipping above 0 or bf16.check_grad_overflow true, so that updates wait "
                "for the end of backward"
            )

    def refuse_early(self, layers: Iterable[int], verb: str) -> None:
        """ConfigError when one of these layers was updated before the gate, and is `verb` ("read",
        "written") from outside: until the step ends a plain loop has the weights of the step
        before.
        """
        for state in (self._layers[layer] for layer in layers):
            if state.applied:
                raise ConfigError(
                    f"weights of {state.name} are {verb} between engine.backward and engine.step, "
                    "and were updated as their gradients came: do that after engine.step(), or set "
                    "gradient_clipping above 0 or bf16.check_grad_overflow true, so that updates "
                    "wait for the step; for several backwards a step set "
                    "gradient_accumulation_steps to the number of backwards"
                )

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void. Weights that it changed cannot be changed
        back: after that no further step is exact, and `begin_backward` refuses it.
        """
        names = [state.layout.name for state in self.applied]
        if names:
            some = f"{names[0]} and {len(names) - 1} more layers" if names[1:] else names[0]
            self._torn = (
                f"backward failed after {some} had been updated: weights are of two steps. "
                "Start again from a checkpoint; with gradient_clipping above 0 updates wait for "
                "the end of backward, and a failed one changes nothing"
            )
        elif self.pending:
            logger.warning("backward failed: the gradients of this step so far are dropped")

    def forget(self) -> None:
        """Drop the gradients of the step that has ended or is abandoned."""
        for state in self._layers:
            state.forget_step()
