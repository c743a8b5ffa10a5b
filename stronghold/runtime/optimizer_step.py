"""The optimizer's step: what becomes of gradients, the gate, and the account of the step.

`OptimizerStep` takes the gradients that have left their slots. Each layer's have one of three uses
(`Next`). `Ledger` is the account: whether the running micro-batch ends the step, and whether the
arrays are of one step. The work itself is in `host_updates` and `gpu_updates`, by the home of the
layer. The training thread enters, and autograd's in backward. Lanes write norms, which the training
thread reads behind their access record.

[Note: where it stands in the step] Layers are updated as their gradients come, unless something
decides over all layers: the norm of the whole model (clipping), or a possible overflow. Then
gradients are pending until backward has ended (the gate), and layers are updated in forward order,
so that the next forward starts at once and waits layer by layer. In between stand layers that are
deferred ([Note: deferred updates] of `plan.cost`) or were called several times: they are updated at
the end of backward.

[Note: a gradient that comes twice] A parameter that is used in two autograd leaves (two forward
calls before one backward on a GPU, reentrant checkpoints) has several gradients in one backward.
They are added in the compute dtype, as autograd itself adds them, and so are those of a further
backward that gradient_accumulation_steps does not count. Sums over micro-batches are fp32. So the
gradients of one backward are pending until its end, and are then added to such sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.memory.tiers import Mode
from stronghold.memory.window import Window
from stronghold.plan.homes import GPU, HOST, Home
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Position
from stronghold.runtime.gpu_updates import GpuUpdates, pending_on_gpu
from stronghold.runtime.host_updates import HostUpdates
from stronghold.runtime.parts import Parts
from stronghold.runtime.pieces import Flat, Gradients, InArray, Loose

logger = logging.getLogger("stronghold")

CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class Next(Enum):
    """What becomes of gradients that have left their slot. UPDATE: the optimizer uses them now.
    PENDING: they wait, as they are, in the array "gradients". SUM: they are added to the fp32 sums
    in the array "accumulated"."""

    UPDATE = "update"
    PENDING = "pending"
    SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """`grad_norm`: global L2 norm before clipping, loss scale removed, or what waits for it where
    nothing depended on it. `overflow`: the norm is not finite, and nothing was applied; `grad_norm`
    is infinity then, as DeepSpeed's, also where a gradient is NaN."""

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
    """The account of one engine's layers. `early`: updates may run before the
    gate."""

    def __init__(self, layers: Sequence[LayerState], *, early: bool) -> None:
        self._layers = layers
        self.early = early
        self.boundary = True  # whether the running micro-batch ends the step
        self._torn: str | None = None  # why the arrays are of two steps, or of two checkpoints

    @property
    def is_in_step(self) -> bool:
        """Whether gradients of a step that has not ended are there."""
        return any(not state.gradients.is_empty for state in self._layers)

    @property
    def updated(self) -> list[LayerState]:
        """The layers that were updated before the gate, in this step."""
        return [state for state in self._layers if state.gradients.used]

    def begin_backward(self, *, boundary: bool) -> None:
        """The next gradients belong to a micro-batch that ends the step (`boundary`) or not."""
        self.check()
        if self.early and (not boundary or self.updated):
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
        on before one that does."""
        self._torn = (
            f"{what} did not end: some layers have new values and others have not. Nothing can go "
            "on from that: load a checkpoint (engine.load_checkpoint)"
        )
        yield
        self._torn = None

    def refuse_dropping(self) -> None:
        """ConfigError when gradients shall be dropped that weights have taken already."""
        if updated := self.updated:
            raise ConfigError(
                f"zero_grad between backward and step: {updated[0].name} was updated with these "
                "gradients already, as they came. To throw a batch away set gradient_clipping "
                "above 0 or bf16.check_grad_overflow true, so that updates wait for engine.step; "
                "or look at the loss before engine.backward"
            )

    def refuse_further(self, state: LayerState, positions: Iterable[int]) -> None:
        """ConfigError when gradients of the parameters at `positions` come after the layer's update
        before the gate."""
        names = [state.layout.slices[k].name for k in sorted(positions)]
        if state.gradients.used and names:
            raise ConfigError(
                f"a further gradient of {', '.join(names)} came after its layer was updated; set "
                "gradient_clipping above 0 or bf16.check_grad_overflow true, so that updates wait "
                "for the end of backward"
            )

    def refuse_early(self, layers: Iterable[int], verb: str) -> None:
        """ConfigError when one of these layers was updated before the gate, and is `verb` ("read",
        "written") from outside: until the step ends a plain loop has the weights of the step
        before."""
        for state in (self._layers[layer] for layer in layers):
            if state.gradients.used:
                raise ConfigError(
                    f"weights of {state.name} are {verb} between engine.backward and engine.step, "
                    "and were updated as their gradients came: do that after engine.step(), or set "
                    "gradient_clipping above 0 or bf16.check_grad_overflow true, so that updates "
                    "wait for the step; for several backwards a step set "
                    "gradient_accumulation_steps to the number of backwards"
                )

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void. Weights that it changed cannot be changed
        back: after that no further step is exact, and `begin_backward` refuses it."""
        names = [state.layout.name for state in self.updated]
        if names:
            some = f"{names[0]} and {len(names) - 1} more layers" if names[1:] else names[0]
            self._torn = (
                f"backward failed after {some} had been updated: weights are of two steps. "
                "Start again from a checkpoint; with gradient_clipping above 0 updates wait for "
                "the end of backward, and a failed one changes nothing"
            )
        elif self.is_in_step:
            logger.warning("backward failed: the gradients of this step so far are dropped")

    def forget(self) -> None:
        """Drop the gradients of the step that has ended or is abandoned."""
        for state in self._layers:
            state.gradients.clear()


class OptimizerStep:
    """Takes gradients, and updates layers where `plan` has the update in the step. `window` has the
    gradient slots on the GPU."""

    def __init__(self, parts: Parts, ledger: Ledger, plan: Plan, window: Window) -> None:
        self._host, self._layers, self._window = parts.host, parts.layers, window
        self._ledger, self._steps, self._team = ledger, parts.steps, parts.team
        self._plan = plan
        self._on_host = HostUpdates(parts, loads_ahead=ledger.early)
        self._on_gpu = GpuUpdates(parts, window)
        self._at: dict[Home, HostUpdates | GpuUpdates] = {HOST: self._on_host, GPU: self._on_gpu}

    # -- gradients come ---------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Backward is about to run."""
        self._on_host.load_ahead()

    def next_of(self, state: LayerState, *, more_may_come: bool) -> Next:
        """What becomes of gradients of the layer, now or, if more may come, at backward's end."""
        if more_may_come:
            return Next.PENDING
        if self._plan.accumulates:
            return Next.SUM
        return Next.UPDATE if self._plan.updates[state.index] is Position.DRAIN else Next.PENDING

    def take(self, batch: Sequence[Gradients], use: Next) -> None:
        """Queue what uses these gradients: on the GPU in one launch for all layers of `batch`,
        which have one home. ConfigError when they come after the update that they were for."""
        if not batch:
            return
        for gradients in batch:
            state, late = gradients.state, gradients.positions
            if use is Next.UPDATE:  # the other parameters of the layer may have been updated
                late = late & state.gradients.used
            self._ledger.refuse_further(state, late)
        at = self._at[batch[0].state.home]
        if use is Next.SUM:
            at.set_or_add(batch, "accumulated", norms=self._ledger.boundary)
        elif use is Next.PENDING:
            at.set_or_add(batch, "gradients", norms=not self._plan.accumulates)
        else:
            for gradients in batch:  # first: they are used also when an update fails halfway
                gradients.state.gradients.used |= gradients.positions
            at.update(batch, 1.0)

    def end_backward(self) -> None:
        """Backward has ended: no more gradients will come. What does not wait for the gate is used
        now, in the order of the next forward."""
        for state in self._layers:
            if not state.gradients.pending:
                continue
            use = self.next_of(state, more_may_come=False)
            if self._plan.updates[state.index] is Position.BACKWARD:
                use = Next.UPDATE
            if use is not Next.PENDING:
                gradients = self._waiting(state, "gradients")
                state.gradients.pending.clear()
                self.take([gradients], use)
                state.gradients.loose.clear()
                self._window.drop_held(state.index)
        self._on_host.forget_loads()

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void, and weights that it changed stay so."""
        self._ledger.abandon_backward()
        self._on_host.forget_loads()
        self.forget()

    # -- the gate ---------------------------------------------------------------------------------
    def close_gate(
        self, *, clipping: float, loss_scale: float, skips: bool
    ) -> tuple[GateResult, list[int]]:
        """End the step: wait for the norm, then queue the updates in forward order, or nothing
        where the norm is not finite and it `skips` then. Where the norm does not decide anything
        and is the device's, nothing waits for it.

        `clipping`: largest global norm, 0 for none. Gradients carry `loss_scale`. Returns the
        layers on the host that change.
        """
        for state in self._layers:
            state.records["norms"].writer.wait()
        self._ledger.check()
        self._steps.refuse_changed()
        with self._ledger.changing("engine.step"):
            gate, scale = self._decide(clipping, loss_scale, skips)
            changed: list[LayerState] = []
            if not gate.overflow:
                on_host = (state for state in self._layers if state.home is not GPU)
                changed = [state for state in on_host if not state.gradients.is_empty]
                waiting = [state for state in changed if not state.gradients.used]
                self._on_host.update([self._pending(state) for state in waiting], scale)
                self._on_gpu.update_prepared(scale)
            self.forget()
        return gate, [state.index for state in changed]

    def _decide(self, clipping: float, loss_scale: float, skips: bool) -> tuple[GateResult, float]:
        on_host, read = self._square_sums()
        on_host = self._team.meet(self._layers, on_host)
        if skips or clipping > 0.0 or on_host or read is None:
            sums = on_host + (read() if read is not None else [])
            norm, scale = norm_and_scale(sums, clipping=clipping, loss_scale=loss_scale)
            if skips and not math.isfinite(norm):
                return GateResult(grad_norm=math.inf, overflow=True), scale
            return GateResult(grad_norm=norm, overflow=False), scale

        def read_norm() -> float:
            return norm_and_scale(read(), clipping=0.0, loss_scale=loss_scale)[0]

        return GateResult(grad_norm=read_norm, overflow=False), 1.0 / loss_scale

    def _square_sums(self) -> tuple[list[float], Callable[[], list[float]] | None]:
        """The sums of squares of the step's gradients, in any order: of those on the host, and what
        reads those on the GPU, whose share of the update is prepared meanwhile."""
        on_host: list[float] = []
        on_gpu: list[Gradients] = []
        for state in self._layers:
            if state.home is not GPU:
                on_host += self._on_host.square_sums(state)
            elif not state.gradients.is_empty and not state.gradients.used:
                on_gpu.append(self._pending(state))
        return on_host, self._on_gpu.close(on_gpu)

    def _pending(self, state: LayerState) -> Gradients:
        """The layer's gradients that wait for the gate."""
        return self._waiting(state, state.gradients.array)

    def _waiting(self, state: LayerState, array: str) -> Gradients:
        """The layer's gradients in `array`."""
        source: Flat | Loose | InArray = InArray(array)
        if array == "gradients" and state.home is GPU:
            source = pending_on_gpu(state)
        return Gradients(state, frozenset(state.gradients.positions(array)), source)

    def gradient_pieces(
        self, state: LayerState, k: int, *, mode: Mode = "read"
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """The gradient of parameter `k` that waits for the step, as `ArrayAccess.pieces`: which of
        the parameter's elements, and a flat tensor of them, of this rank's. No operation of the
        layer's is under way meanwhile."""
        gradients = self._pending(state)
        state.records["norms"].writer.wait()
        gradients.record.wait()
        part, source = state.layout.slices[k], gradients.source
        at, end = part.offset, part.offset + part.numel
        if isinstance(source, InArray):
            for piece, views in self._host.access.pieces(
                state.index, gradients.arrays, at, end, mode=mode
            ):
                yield piece, views[source.array]
        elif isinstance(source, Loose):
            yield slice(0, part.numel), source.tensors[k].view(-1)
        else:
            ((_, first, last),) = state.elements((k,))
            flat = state.maps["gradients"].view(source.memory, first, last)
            yield slice(first - at, last - at), flat

    def forget(self) -> None:
        """Drop the gradients of the step that has ended or is abandoned."""
        self._team.forget()
        self._on_gpu.forget()
        for state in self._layers:
            self._window.drop_held(state.index)
        self._steps.forget()
        self._ledger.forget()

    def restart(self, *, keep_gradients: bool = False) -> None:
        """The arrays are about to be written anew, or moved: finish what is queued, and drop the
        gradients of a step that has not ended, unless they are kept: sums of whole backwards are
        arrays like others."""
        self._on_host.forget_loads()
        if not keep_gradients:
            self.forget()
        for state in self._layers:
            state.wait_unused()
