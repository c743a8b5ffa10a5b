"""The optimizer's step: the global gradient norm, clipping, and the place of each update.

`OptimizerStep` takes gradients that have left their slots. They are pending as they came, or are
added to fp32 sums over micro-batches. At the gate it computes the gradient norm and the clip
coefficient, and queues the updates. `Ledger` knows whether the running micro-batch ends the step,
and whether all arrays belong to one step. `host_updates` and `gpu_updates` do the work, by the home
of the layer. `early_updates` has the updates before the gate. The training thread enters, and
autograd's thread in backward. Lanes write norms. The training thread reads a norm after it has
waited for the norm's access record.

[Note: where it stands in the step]
1. The schedule has the place of each update.
2. Layers behind the gate are updated in forward order.
3. The next forward starts at once. It waits for one layer at a time.

[Note: a gradient that comes twice] All of this is allowed. `take` says where a gradient goes,
`HostUpdates.set_or_add` and `GpuUpdates.set_or_add` add it.
1. Twice in one backward (two forward calls on a GPU, reentrant checkpoints): added to the array
   "gradients", in the compute dtype, as autograd adds.
2. A second backward before the step, without accumulation: the same as 1. `micro_steps` does not
   move: `engine.step` counts, and a backward does not.
3. Accumulation: the gradients of one backward are pending until its end. Then they are added to the
   array "accumulated", in fp32.
4. A second backward of a layer cancels its early update: its gradients have changed.
5. A second backward of one graph (`retain_graph`) fetches weights again, and runs recomputed blocks
   once more (`activations.recompute`). Weights that were written since are refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.memory.tiers import Mode
from stronghold.memory.window import Window
from stronghold.plan.homes import GPU, HOST, Home
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Kind, Schedule
from stronghold.streaming.early_updates import EarlyUpdates
from stronghold.streaming.gpu_updates import GpuUpdates, pending_on_gpu
from stronghold.streaming.host_updates import HostUpdates
from stronghold.streaming.parameter_views import Bindings
from stronghold.streaming.parts import Parts
from stronghold.streaming.pieces import InArray, InBuffer, LayerGradients, PerParameter

logger = logging.getLogger("stronghold")

CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Result of a step.

    `grad_norm`: global L2 norm before clipping, without the loss scale. If nothing depended on the
    norm, it is a function that waits for it. `overflow`: the norm is not finite, and no update was
    made. `grad_norm` is infinity then, as DeepSpeed's, also if a gradient is NaN.
    """

    grad_norm: float | Callable[[], float]
    overflow: bool


def norm_and_scale(
    square_sums: Sequence[float], *, clipping: float, loss_scale: float
) -> tuple[float, float]:
    """Compute the global L2 norm without the loss scale, and the factor of the gradients.

    The factor is min(1, clipping / (norm + 1e-6)) / loss_scale. The clip coefficient is that of
    torch.nn.utils.clip_grad_norm_, also for a norm that is not finite. `clipping`: largest global
    norm, 0 for none. The norm is divided by the loss scale: a product with 1 / loss_scale would
    round once more, unless the scale is a power of two.
    """
    # fsum rounds once: neither the order nor the grouping of parameters into layers can matter.
    norm = math.sqrt(math.fsum(square_sums)) / loss_scale
    clipped = clipping / (norm + CLIPPING_EPSILON) if clipping > 0.0 else 1.0
    return norm, (1.0 if clipped > 1.0 else clipped) / loss_scale


class Ledger:
    """Knows where in a step one engine is, and whether its arrays belong to one step."""

    def __init__(self, layers: Sequence[LayerState]) -> None:
        self._layers = layers
        self.boundary = True  # whether the running micro-batch ends the step
        self._torn: str | None = None  # why arrays belong to two steps or two checkpoints

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


class OptimizerStep:
    """Takes gradients, closes the gate, and updates layers in the schedule's places.

    `window` has the gradient slots on the GPU.
    """

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        plan: Plan,
        window: Window,
        bindings: Bindings,
    ) -> None:
        self._host, self._layers, self._window = parts.host, parts.layers, window
        self._ledger, self._steps, self._team = ledger, parts.steps, parts.team
        self._plan, self._performed = plan, parts.performed
        self._on_host = HostUpdates(parts)
        self._on_gpu = GpuUpdates(parts, window)
        self._at: dict[Home, HostUpdates | GpuUpdates] = {HOST: self._on_host, GPU: self._on_gpu}
        self._early = EarlyUpdates(parts, self._on_host, bindings)
        self._gate_order: Sequence[int] = ()

    def follow(self, schedule: Schedule) -> None:
        """Update layers where `schedule` has their updates, from the next backward on."""
        self._early.follow(schedule)
        self._gate_order = [
            action.layer for action in schedule.behind_gate if action.kind is not Kind.RELEASE
        ]

    # -- gradients come ---------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Backward is about to run."""
        self._early.begin_backward()

    def array_for(self, *, more_may_come: bool) -> str:
        """Return the array for gradients that have left their slot.

        It is "gradients" for pending ones, or "accumulated" for sums over micro-batches. If more
        gradients may come in this backward, they are pending until its end.
        """
        return "gradients" if more_may_come or not self._plan.accumulates else "accumulated"

    def take(
        self, batch: Sequence[LayerGradients], array: str, *, is_complete: bool = False
    ) -> None:
        """Queue the sum of these gradients and those in `array`.

        The layers of `batch` have one home; on the GPU one launch adds all of them. `is_complete`:
        no more gradients of these layers are expected in this backward.
        """
        if not batch:
            return
        self._early.cancel(gradients.state.index for gradients in batch)
        ends_step = self._ledger.boundary if array == "accumulated" else not self._plan.accumulates
        at = self._at[batch[0].state.home]
        at.set_or_add(batch, array, norms=ends_step)
        if at is self._on_host and is_complete and self._ledger.boundary:
            for gradients in batch:
                self._early.complete(gradients.state)

    def cancel_early(self, layers: Iterable[int]) -> None:
        """Leave the updates of these layers to the gate. Code outside the engine may read or write
        their weights."""
        self._early.cancel(layers)

    def end_backward(self) -> None:
        """Backward has ended: add pending gradients to the sums over micro-batches, if the plan has
        such sums. No more gradients will come."""
        for state in self._layers if self._plan.accumulates else ():
            if state.gradients.pending:
                gradients = self._waiting(state, "gradients")
                state.gradients.pending.clear()
                self.take([gradients], "accumulated")
                state.gradients.per_parameter.clear()
                self._window.drop_held_gradients(state.index)

    def abandon_backward(self) -> None:
        """Backward raised: the step's gradients are void."""
        self._ledger.abandon_backward()
        self.forget()

    # -- the gate ---------------------------------------------------------------------------------
    def close_gate(
        self, *, clipping: float, loss_scale: float, skip_on_overflow: bool
    ) -> tuple[GateResult, list[int]]:
        """End the step: wait for the norm, then queue the updates in forward order.

        Nothing is queued if the norm is not finite and `skip_on_overflow` is true. The caller does
        not wait for a norm that lies on the device and decides nothing.

        `clipping`: largest global norm, 0 for none. Gradients carry `loss_scale`. Returns the
        layers on the host that change.
        """
        for state in self._layers:
            state.records["norms"].writer.wait()
        self._ledger.check()
        with self._ledger.changing("engine.step"):
            gate, scale = self._decide(clipping, loss_scale, skip_on_overflow)
            self._performed.add(Kind.GATE)
            self._early.withdraw()
            changed = [] if gate.overflow else self._update(scale)
            norm = gate.grad_norm if isinstance(gate.grad_norm, float) else None
            self._early.end_step(norm=norm, clipping=clipping, loss_scale=loss_scale)
            self.forget()
        return gate, sorted(state.index for state in changed)

    def _update(self, scale: float) -> list[LayerState]:
        """Commit early updates, and queue all others. Returns the layers on the host that have
        gradients."""
        changed = []
        # The schedule's layers come first, all others behind them.
        order = dict.fromkeys([*self._gate_order, *range(len(self._layers))])
        for state in map(self._layers.__getitem__, order):
            if state.gradients.is_empty:
                continue
            if state.home is GPU:  # with all others there, in one launch
                self._performed.add(Kind.UPDATE, state.index)
                continue
            changed.append(state)
            if not self._early.commit(state, scale):
                gradients = self._pending(state)
                steps = self._steps.next(state, gradients.positions, scale)
                self._steps.count(state, gradients.positions)
                self._on_host.update_in_place(gradients, steps)
                self._performed.add(Kind.UPDATE, state.index)
        self._on_gpu.update_prepared(scale)
        return changed

    def _decide(
        self, clipping: float, loss_scale: float, skip_on_overflow: bool
    ) -> tuple[GateResult, float]:
        on_host, read = self._square_sums()
        on_host = self._team.meet(self._layers, on_host)
        if skip_on_overflow or clipping > 0.0 or on_host or read is None:
            sums = on_host + (read() if read is not None else [])
            norm, scale = norm_and_scale(sums, clipping=clipping, loss_scale=loss_scale)
            if skip_on_overflow and not math.isfinite(norm):
                return GateResult(grad_norm=math.inf, overflow=True), scale
            return GateResult(grad_norm=norm, overflow=False), scale

        def read_norm() -> float:
            return norm_and_scale(read(), clipping=0.0, loss_scale=loss_scale)[0]

        return GateResult(grad_norm=read_norm, overflow=False), 1.0 / loss_scale

    def _square_sums(self) -> tuple[list[float], Callable[[], list[float]] | None]:
        """Return the sums of squares of the step's gradients, in any order.

        First those on the host, then a function that waits for those on the GPU, or None. The GPU's
        share of the update is prepared meanwhile.
        """
        on_host: list[float] = []
        on_gpu: list[LayerGradients] = []
        for state in self._layers:
            if state.home is not GPU:
                on_host += self._on_host.square_sums(state)
            elif not state.gradients.is_empty:
                on_gpu.append(self._pending(state))
        return on_host, self._on_gpu.close(on_gpu)

    def _pending(self, state: LayerState) -> LayerGradients:
        """The layer's gradients that the gate will use: pending ones, or sums."""
        return self._waiting(state, state.gradients.array)

    def _waiting(self, state: LayerState, array: str) -> LayerGradients:
        """The layer's gradients in `array`."""
        source: InBuffer | PerParameter | InArray = InArray(array)
        if array == "gradients" and state.home is GPU:
            source = pending_on_gpu(state)
        return LayerGradients(state, frozenset(state.gradients.positions(array)), source)

    def gradient_pieces(
        self, state: LayerState, k: int, *, mode: Mode = "read"
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield this rank's pieces of the gradient of parameter `k` that the step will use.

        Each is (elements of the parameter, a flat tensor of them), as `ArrayAccess.pieces`. The
        caller queues no operation of the layer meanwhile.
        """
        gradients = self._pending(state)
        state.records["norms"].writer.wait()
        gradients.record.wait()
        parameter, source = state.layout.slices[k], gradients.source
        begin, end = parameter.offset, parameter.offset + parameter.numel
        if isinstance(source, InArray):
            for elements, views in self._host.access.pieces(
                state.index, gradients.arrays, begin, end, mode=mode
            ):
                yield elements, views[source.array]
        elif isinstance(source, PerParameter):
            yield slice(0, parameter.numel), source.tensors[k].view(-1)
        else:
            ((_, first, last),) = state.elements((k,))
            flat = state.maps["gradients"].view(source.memory, first, last)
            yield slice(first - begin, last - begin), flat

    def forget(self) -> None:
        """Drop the gradients of a step that has ended, or is abandoned, and its early updates."""
        self._team.forget()
        self._early.forget()
        self._on_gpu.forget()
        for state in self._layers:
            self._window.drop_held_gradients(state.index)
        self._ledger.forget()

    def restart(self, *, keep_gradients: bool = False) -> None:
        """Finish queued operations, before the arrays are written anew, or moved.

        Gradients of a step that has not ended are dropped, unless `keep_gradients`. Sums of whole
        backwards may be kept: they are arrays like others.
        """
        if not keep_gradients:
            self.forget()
        for state in self._layers:
            state.wait_unused()
