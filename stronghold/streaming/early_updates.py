"""Early updates: layers that are updated before the norm of all gradients is known.

Owns the decision to start one, to take it back, and to commit it. The training thread enters, and
autograd's in backward; the two never run at once.

[Note: early updates] Most steps are not clipped, and do not overflow. Their gradients have the
factor 1, so that an update that ran before the norm was known has the right bits.
1. Backward queues the offload of a layer's last gradients. `complete` queues the early update.
   The update reads the layer's arrays and its gradients, and writes its second arrays.
2. Backward goes on. The gradients stay where they are until the gate. The layer's arrays do not
   change: a reader sees those of the step before.
3. The gate knows the norm. `withdraw` takes back the updates that have not begun. Their layers
   come last in the queue, and first in the next forward.
4. `commit` compares the numbers of each update that has begun with those that the gate would use
   now: factor, learning rate, step. If they are equal, the second arrays become the layer's. No
   byte is copied. The next fetches wait for the update by the arrays' access records.
5. The gate updates all other layers in place, in forward order, from their gradients. A skipped
   step updates no layer.
Hazard: gradients or weights of a layer change between 1 and 4. Each of these cancels the layer's
early update: a further gradient, a write to a parameter, code of yours that reads a parameter (it
may write, too), an alias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stronghold.devices.base import Fence
from stronghold.memory.layer import EarlyUpdate, LayerState
from stronghold.plan.schedule import Kind, Schedule
from stronghold.streaming.host_updates import HostUpdates
from stronghold.streaming.parameter_views import Bindings
from stronghold.streaming.parts import Parts
from stronghold.streaming.pieces import gradients_in_array
from stronghold.telemetry.metrics import EarlyOutcome

# Layers that are ready and wait for the one that the schedule has before them. A layer that gets no
# gradient in this step must not hold up all others.
PATIENCE = 2
# Of the rule when early updates are worth while. The figures are in
# benchmarks/results/speculation-rule_emulated-cpu_2026-11-24.md.
FREE_MISSES = 2
NEAR = 1.25  # times the clip: a norm up to which the next step may well not be clipped
LONGEST_PAUSE = 64  # steps


class EarlyUpdateRule:
    """Predicts whether the next step's early updates will be committed.

    `FREE_MISSES` attempts in a row may fail without a consequence. After each further one early
    updates pause for 1, 2, 4, ... steps, and go on once the norm is at most `NEAR` times the clip.
    A step that is not clipped ends all of it.
    """

    def __init__(self) -> None:
        self._misses = 0  # attempts in a row
        self._left = 0  # steps of the pause
        self._is_near = True

    @property
    def is_likely(self) -> bool:
        return self._left == 0 and (self._is_near or self._misses <= FREE_MISSES)

    def end_step(self, *, norm: float, clipping: float) -> None:
        """A step ended with this global norm; `clipping` is 0 for none."""
        if not clipping > 0.0 or norm <= clipping:
            self._misses, self._left, self._is_near = 0, 0, True
            return
        was_likely, self._is_near = self.is_likely, norm <= NEAR * clipping
        if self._left:
            self._left -= 1
        elif was_likely:
            self._misses += 1
            if self._misses > FREE_MISSES:
                self._left = min(2 ** (self._misses - FREE_MISSES - 1), LONGEST_PAUSE)


class EarlyUpdates:
    """Starts, withdraws and commits early updates of layers that have second arrays."""

    def __init__(self, parts: Parts, on_host: HostUpdates, bindings: Bindings) -> None:
        self._device, self._layers, self._steps = (parts.device, parts.layers, parts.steps)
        self._metrics, self._on_host = parts.metrics, on_host
        self._bindings, self._performed = bindings, parts.performed
        self._worth = EarlyUpdateRule()
        self._order: Sequence[int] = ()
        self._next = 0  # position in the order
        self._ready: list[int] = []  # layers that are complete, and not yet started
        self._started: list[LayerState] = []
        # Values of the last gate. The next gate probably has the same.
        self._scale = 1.0
        self._clip_square_sum = math.inf  # clipping begins at this sum of squares
        self._square_sum = 0.0  # of this step's gradients whose norms are known
        self._unsummed: list[LayerState] = []
        # layers whose early update began in vain in this step
        self._dropped: set[int] = set()

    def follow(self, schedule: Schedule) -> None:
        """Start updates in the order of `schedule` from the next backward on."""
        self._order = schedule.early

    # -- start ------------------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """Backward is about to run."""
        self._next = 0
        self._ready.clear()

    def complete(self, state: LayerState) -> None:
        """The layer's gradients are queued to the host, and no more are expected in this step.
        Start its early update, and those that have waited for it, in the schedule's order."""
        self._unsummed.append(state)
        if state.index not in self._order:
            return
        self._ready.append(state.index)
        while self._ready and self._next < len(self._order):
            layer = self._order[self._next]
            if layer in self._ready:
                self._ready.remove(layer)
                self._start(self._layers[layer])
            elif len(self._ready) <= PATIENCE:
                return
            self._next += 1

    def _start(self, state: LayerState) -> None:
        if not self._may_start(state):
            self._performed.add(Kind.WITHDRAW, state.index)
            return
        gradients = gradients_in_array(state, state.gradients.array)
        positions = gradients.positions
        steps = self._steps.next(state, positions, self._scale)
        fence = self._on_host.update_early(gradients, steps)
        state.gradients.early = EarlyUpdate(
            fence=fence,
            positions=positions,
            steps=steps,
            version_sum=self._bindings.version_sum(state.index),
        )
        self._started.append(state)
        self._performed.add(Kind.UPDATE, state.index)

    def _may_start(self, state: LayerState) -> bool:
        if state.second is None or not self._worth.is_likely or self._bindings.is_seen(state.index):
            return False
        summed = [layer for layer in self._unsummed if layer.records["norms"].writer.done]
        for layer in summed:
            self._unsummed.remove(layer)
            self._square_sum += math.fsum(layer.gradients.square_sums.values())
        return self._square_sum <= self._clip_square_sum  # False for NaN, too

    # -- take back --------------------------------------------------------------------------------
    def cancel(self, layers: Iterable[int]) -> None:
        """Cancel early updates of layers whose gradients or weights change, or may change. The gate
        updates these layers."""
        for layer in layers:
            early = self._layers[layer].gradients.early
            if early is not None:
                if not self._device.update.withdraw([early.fence]):
                    self._drop(layer)
                self._layers[layer].gradients.early = None

    def _drop(self, layer: int) -> None:
        """Count an early update that has begun, and will not be committed."""
        self._dropped.add(layer)
        self._metrics.count_early(EarlyOutcome.DROPPED)

    def withdraw(self) -> None:
        """The norm is known: take back the updates that have not begun, the newest first."""
        newest_first: list[LayerState] = []
        fences: list[Fence] = []
        for state in reversed(self._started):
            if state.gradients.early is not None:
                newest_first.append(state)
                fences.append(state.gradients.early.fence)
        num_withdrawn = self._device.update.withdraw(fences)
        for state in newest_first[:num_withdrawn]:
            state.gradients.early = None
            self._performed.add(Kind.WITHDRAW, state.index)

    # -- the gate ---------------------------------------------------------------------------------
    def commit(self, state: LayerState, scale: float) -> bool:
        """Make the layer's second arrays its arrays, if the gate would compute the same now.

        `scale` is the gate's factor of the gradients. Returns True if the arrays were exchanged.
        """
        early = state.gradients.early
        if early is None or not self._is_right(state, early, scale):
            self._count_uncommitted(state)
            return False
        before = state.weights
        state.swap_second_arrays()
        self._steps.count(state, early.positions)
        self._bindings.move_rest(state.index, before)
        self._performed.add(Kind.COMMIT, state.index)
        state.gradients.early = None
        self._metrics.count_early(EarlyOutcome.COMMITTED)
        return True

    def _is_right(self, state: LayerState, early: EarlyUpdate, scale: float) -> bool:
        """True if the gate would write the same values as the early update has."""
        if self._bindings.is_seen(state.index):
            return False
        is_same = early.positions == state.gradients.arrived
        version_sum = self._bindings.version_sum(state.index)
        steps = self._steps.next(state, early.positions, scale)
        return is_same and early.version_sum == version_sum and early.steps == steps

    def _count_uncommitted(self, state: LayerState) -> None:
        if state.gradients.early is not None:
            self._drop(state.index)
            state.gradients.early = None
        elif state.index in self._order and state.index not in self._dropped:
            self._metrics.count_early(EarlyOutcome.LEFT)

    def end_step(self, *, norm: float | None, clipping: float, loss_scale: float) -> None:
        """The gate has closed with this norm. None: the norm is not read yet."""
        self._scale = 1.0 / loss_scale
        self._clip_square_sum = (clipping * loss_scale) ** 2 if clipping > 0.0 else math.inf
        if norm is not None and math.isfinite(norm):
            self._worth.end_step(norm=norm, clipping=clipping)

    def forget(self) -> None:
        """The step has ended, or is void: cancel its early updates."""
        self.cancel(state.index for state in reversed(self._started))
        self._started.clear()
        self._dropped.clear()
        self._unsummed.clear()
        self._square_sum = 0.0
