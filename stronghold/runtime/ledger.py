"""What became of every layer's gradients in this step, and since when its weights are new.

Owns, by layer: the parameters whose gradients have arrived, whether the layer was updated before
the gate, the fence of its newest weights, and what still reads its arrays. Never computes and never
submits: whoever updates a layer writes here what it did. Entered by the training thread, and by
autograd's in backward; the two never run at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stronghold.device.base import Fence, completed
from stronghold.errors import ConfigError
from stronghold.model.layout import LayerLayout
from stronghold.plan.planner import Gradients

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
    """The global L2 norm without the loss scale (NaN where a sum is not finite), and the factor of
    the gradients: min(1, clipping / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_, over the
    loss scale. `clipping`: largest global norm, 0 for none.

    Divided, not multiplied by 1 / loss_scale, which rounds once more unless it is a power of two.
    """
    # fsum rounds once: neither the order nor the grouping of parameters into layers can matter.
    finite = all(map(math.isfinite, square_sums))
    norm = math.sqrt(math.fsum(square_sums)) / loss_scale if finite else math.nan
    coefficient = min(1.0, clipping / (norm + CLIPPING_EPSILON)) if clipping > 0.0 else 1.0
    return norm, coefficient / loss_scale


def open_gate(
    square_sums: Sequence[float], *, clipping: float, loss_scale: float, early: bool
) -> tuple[GateResult, float]:
    """What the sums of squares of every gradient decide, and the factor of the gradients.

    `early`: updates were made as gradients came, so that nothing is left to decide.
    """
    norm, scale = norm_and_scale(square_sums, clipping=clipping, loss_scale=loss_scale)
    overflow = not early and not math.isfinite(norm)
    return GateResult(grad_norm=norm, overflow=overflow), scale


def further_gradient(names: Sequence[str]) -> str:
    """The words of the error when more gradients come of parameters that were updated."""
    return (
        f"a further gradient of {', '.join(names)} came after its layer was updated; set "
        "gradient_clipping above 0 or bf16.check_grad_overflow true, so that updates wait for the "
        "end of backward"
    )


class Ledger:
    """The account of one engine's layers. `early`: `Gradients.RING`, updates as gradients come."""

    def __init__(self, layers: Sequence[LayerLayout], mode: Gradients) -> None:
        self._layers = layers
        self.early = mode is Gradients.RING
        self.arrived: list[set[int]] = [set() for _ in layers]
        self.applied: set[int] = set()  # layers updated before the gate, in this step
        self.boundary = True  # whether the running micro-batch ends the step
        self._updated = [completed("update", "initial weights") for _ in layers]
        self._stored = list(self._updated)
        # What still reads a layer's arrays: the next update of it may not overtake that.
        self._read = [completed("io", "nothing reads") for _ in layers]
        self._torn: str | None = None  # why the arrays are of two steps, or of two checkpoints

    # -- fences -----------------------------------------------------------------------------------
    def updated(self, layer: int) -> Fence:
        """The fence of the layer's newest weights, where they lie between steps."""
        return self._updated[layer]

    def stored(self, layer: int) -> Fence:
        """The fence of all of the layer's newest arrays, where they lie between steps."""
        return self._stored[layer]

    def update(self, layer: int, fence: Fence, *, stored: Fence | None = None) -> None:
        """The layer's weights are new after `fence`, its other arrays after `stored` (the same)."""
        self._updated[layer] = fence
        self._stored[layer] = stored or fence

    def read(self, layer: int) -> Fence:
        """The fence of the layer's newest reader: an update must not write before it."""
        return self._read[layer]

    def update_after(self, layer: int, read: Fence) -> None:
        """The layer's next update waits for `read`, which is submitted already: a snapshot without
        a copy.
        """
        self._read[layer] = read

    def wait_for_readers(self) -> None:
        """Block until nothing reads the arrays: before they are written from outside."""
        for fence in self._read:
            fence.wait()

    # -- the step ---------------------------------------------------------------------------------
    @property
    def pending(self) -> bool:
        """Whether gradients of a step that has not ended are there."""
        return any(self.arrived)

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
        if self.applied:
            name = self._layers[min(self.applied)].name or "the root"
            raise ConfigError(
                f"zero_grad between backward and step: {name} was updated with these gradients "
                "already, as they came. To throw a batch away set gradient_clipping above 0 or "
                "bf16.check_grad_overflow true, so that updates wait for engine.step; or look at "
                "the loss before engine.backward"
            )

    def refuse_further(self, layer: int, repeated: frozenset[int]) -> None:
        """ConfigError when gradients come again for a layer that was updated before the gate."""
        if layer in self.applied and repeated:
            names = [self._layers[layer].slices[k].name for k in sorted(repeated)]
            raise ConfigError(further_gradient(names))

    def refuse_early_read(self, layers: Sequence[int]) -> None:
        """ConfigError when one of these layers was updated before the gate: until the step ends
        a plain loop has the weights of the step before.
        """
        for layer in layers:
            self._refuse_early(layer, "read")

    def refuse_early_write(self, layer: int) -> None:
        """The same, when its weights were written from outside."""
        self._refuse_early(layer, "written")

    def _refuse_early(self, layer: int, verb: str) -> None:
        if layer in self.applied:
            raise ConfigError(
                f"weights of {self._layers[layer].name or 'the root'} are {verb} between "
                "engine.backward and engine.step, and were updated as their gradients came: do "
                "that after engine.step(), or set gradient_clipping above 0 or "
                "bf16.check_grad_overflow true, so that updates wait for the step; for several "
                "backwards a step set gradient_accumulation_steps to the number of backwards"
            )

    def arrive(self, layer: int, arrived: frozenset[int]) -> frozenset[int]:
        """Gradients of `arrived` have come; returns those that had come before in this step."""
        repeated = arrived & self.arrived[layer]
        self.arrived[layer] |= arrived
        return repeated

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void. Weights that it changed cannot be changed
        back: after that no further step is exact, and `begin_backward` refuses it.
        """
        names = [self._layers[layer].name for layer in sorted(self.applied)]
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
        self.applied.clear()
        for arrived in self.arrived:
            arrived.clear()

    def restart(self) -> None:
        """The arrays are about to be written anew: wait for what writes and reads them, and drop a
        step that has not ended.
        """
        for fence in (*self._updated, *self._stored, *self._read):
            fence.wait()
        self.forget()
