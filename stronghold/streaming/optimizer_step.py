"""The optimizer's step: the global gradient norm, clipping, and the place of each update.

At the gate `OptimizerStep` computes the gradient norm and the clip coefficient, and queues the
updates. `pending_gradients` has the gradients until then. `host_updates` and `gpu_updates` do the
work, by the home of the layer. `early_updates` has the updates before the gate. The training thread
enters, and autograd's thread in backward. Lanes write norms. The training thread reads a norm after
it has waited for the norm's access record.

[Note: where it stands in the step]
1. The schedule has the place of each update.
2. Layers behind the gate are updated in forward order.
3. The next forward starts at once. It waits for one layer at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.plan.homes import GPU
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Kind, Schedule
from stronghold.streaming.early_updates import EarlyUpdates
from stronghold.streaming.gpu_updates import GpuUpdates
from stronghold.streaming.host_updates import HostUpdates
from stronghold.streaming.ledger import Ledger
from stronghold.streaming.parameter_views import Bindings
from stronghold.streaming.parts import Parts
from stronghold.streaming.pending_gradients import PendingGradients
from stronghold.streaming.pieces import LayerGradients

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


class OptimizerStep:
    """Closes the gate, and updates layers in the schedule's places.

    `pending` takes the gradients. `window` has the gradient slots on the GPU.
    """

    def __init__(
        self, parts: Parts, ledger: Ledger, plan: Plan, window: Window, bindings: Bindings
    ) -> None:
        self._layers, self._window, self._ledger = parts.layers, window, ledger
        self._steps, self._team, self._performed = (parts.steps, parts.team, parts.performed)
        self._on_host = HostUpdates(parts)
        self._on_gpu = GpuUpdates(parts, window)
        self._early = EarlyUpdates(parts, self._on_host, bindings)
        self.pending = PendingGradients(parts, ledger, plan, window, self._on_gpu, self._early)
        self._gate_order: Sequence[int] = ()

    def follow(self, schedule: Schedule) -> None:
        """Update layers where `schedule` has their updates, from the next backward on."""
        self._early.follow(schedule)
        self._gate_order = [
            action.layer for action in schedule.behind_gate if action.kind is not Kind.RELEASE
        ]

    def begin_backward(self) -> None:
        """Backward is about to run."""
        self._early.begin_backward()

    def cancel_early(self, layers: Iterable[int]) -> None:
        """Leave the updates of these layers to the gate. Code outside the engine may read or write
        their weights."""
        self._early.cancel(layers)

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
                gradients = self.pending.of(state)
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
            gradients = state.gradients
            if gradients.is_empty:
                continue
            if state.home is not GPU:
                if gradients.without_square_sum:
                    self.pending.sum_squares(state)
                on_host += [gradients.square_sums[k] for k in gradients.arrived]
            else:
                on_gpu.append(self.pending.of(state))
        return on_host, self._on_gpu.close(on_gpu)

    def forget(self) -> None:
        """Drop the gradients of a step that has ended, or is abandoned, and its early updates."""
        self._team.forget()
        self._early.forget()
        self._on_gpu.forget()
        for state in self._layers:
            self._window.drop_held_gradients(state.index)
        self._ledger.forget()

    def restart(self) -> None:
        """Finish queued operations, before the arrays are written anew, or moved.

        Gradients of a step that has not ended are dropped.
        """
        self.forget()
        for state in self._layers:
            state.wait_unused()
