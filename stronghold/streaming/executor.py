"""The step: the executor performs the schedule as the model is called and autograd runs.

States of a step. IDLE -> FORWARD at the model's call, -> IDLE at its return; IDLE -> BACKWARD
around autograd's run. Forward hooks that fire in BACKWARD are recomputation.

[Note: when a layer is fetched] There are three cases, and `weights` has how it is done.
1. Ahead: before each use the schedule has releases and fetches (`_perform_before`).
2. Ahead of the next step: once weights have changed, the fetches before its first use are queued,
   each after its update (`weights_changed`).
3. On demand: a layer is used, and no slot has its newest weights (`make_ready`). That is so in the
   first step, in an order of uses that was not predicted, and for saved weights whose layer left.

The executor learns another order of uses when a pass shows one. Entered by the training thread and,
on a GPU, by autograd's thread during backward. The two never run at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from stronghold.errors import ConfigError
from stronghold.memory.layer import ExpectedGradients, LayerState, Residency
from stronghold.memory.window import Window
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import (
    Action,
    Kind,
    Position,
    Schedule,
    canonical_uses,
    make_schedule,
)
from stronghold.streaming.compute_span import ComputeSpan
from stronghold.streaming.gradients import GradientOffload
from stronghold.streaming.optimizer_step import Ledger, OptimizerStep
from stronghold.streaming.parameter_views import Bindings
from stronghold.streaming.parts import Parts
from stronghold.streaming.patches.autograd import backward_number
from stronghold.streaming.weights import LayerWeights

# A pass longer than this (token-by-token generation) keeps the schedule that it has.
MAX_RECORDED_USES = 4096
# Times that another order of offloads is learnt. Where threads race, it differs in every pass.
MAX_LEARNT_ORDERS = 4


class Phase(Enum):
    """Where in the step the training thread is."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(slots=True)
class Track:
    """A kind of pass, in training or in evaluation. `offloads`: the order in which gradients came
    in a pass with these uses, learnt `num_orders` times. `cursor`: the position in the schedule's
    uses. `recorded`: the uses of the running pass."""

    schedule: Schedule
    offloads: tuple[int, ...] = ()
    num_orders: int = 0
    cursor: int = 0
    recorded: list[Action] = field(default_factory=list)


class Executor:
    """Moves layers as their uses come."""

    def __init__(
        self,
        parts: Parts,
        window: Window,
        step: OptimizerStep,
        ledger: Ledger,
        plan: Plan,
        bindings: Bindings,
    ) -> None:
        device, host = parts.device, parts.host
        self._device, self._host, self.layers = device, host, host.layers
        self._window, self._step, self._ledger, self._plan = window, step, ledger, plan
        self.bindings, self.performed = bindings, parts.performed
        self._metrics, self._team, self.outside = parts.metrics, parts.team, parts.outside
        self.phase = Phase.IDLE
        self.weights = LayerWeights(parts, window, plan, self.bindings)
        self._on_gpu = device.torch_device.type != "cpu"
        self._task: int | None = None  # torch's number of the backward that runs
        self._counted = False  # whether a backward has run of the calls
        self._inside: list[int] = []  # blocks whose forward is running now, outermost first
        self._span = ComputeSpan(device)
        forward = canonical_uses([layer.index for layer in host.layout.layers], backward=False)
        backward = canonical_uses(
            [layer.index for layer in host.layout.layers if layer.streamed], backward=True
        )
        both = forward + backward[len(backward) // 2 :]
        self._training = Track(self._schedule(both, updates=plan.updates))
        self._evaluation = Track(self._schedule(forward))
        self._current = self._training
        self._slots = parts.team.slots(window, self.weights.refreshed)
        self._step.follow(self.schedule)
        expected = self.schedule.offloads
        self.gradients = GradientOffload(parts, window, step, expected, span=self._span)

    def _schedule(
        self,
        uses: Sequence[Action],
        *,
        updates: Mapping[int, Position] | None = None,
        offloads: Sequence[int] | None = None,
    ) -> Schedule:
        """That of passes that use layers in this order."""
        plan = self._plan
        return make_schedule(
            uses,
            num_slots=plan.window,
            prefetch=plan.prefetch,
            resident=plan.resident,
            on_gpu=plan.updated_on_gpu,
            updates=updates,
            offloads=offloads,
        )

    @property
    def schedule(self) -> Schedule:
        """The training pass as it is predicted now."""
        return self._training.schedule

    # -- passes ---------------------------------------------------------------------------------
    def begin_forward_pass(self, *, training: bool) -> None:
        """The model was called; `training` says that gradients will be wanted."""
        self._device.check()
        self._ledger.check()
        self._turn_to(self._training if training else self._evaluation)
        if self.phase is Phase.IDLE:
            self.phase = Phase.FORWARD

    def _turn_to(self, track: Track) -> None:
        if track is self._evaluation and track is not self._current:
            track.cursor = 0
            track.recorded.clear()
        self._current = track
        if track is self._evaluation:
            self._slots.leave()
        else:
            self._rejoin()

    def _rejoin(self) -> None:
        """Bring back what the slots held before this rank fetched for itself."""
        for layer in self._slots.extra():
            self.weights.release(layer)
        for layer in self._slots.missing():
            self._fetch(layer, keep=layer)
        self._slots.rejoin()

    def end_forward_pass(self) -> None:
        """The model returned or raised."""
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
            if self._current is self._evaluation:
                self._learn(self._evaluation)

    def begin_backward_pass(self) -> None:
        """Autograd is about to run."""
        self._device.check()
        for layer in self._plan.updated_on_gpu:
            self.bindings.check(layer)
        self._window.prepare_training()
        self._host.prepare_training()
        self._team.prepare_training()
        self._step.begin_backward()
        self._turn_to(self._training)
        self.phase = Phase.BACKWARD

    def end_backward_pass(self) -> None:
        """Autograd has returned or raised: drain what is left, put every parameter at rest."""
        self._span.end()
        try:
            self.gradients.flush()
            self._step.end_backward()
        finally:
            self.phase = Phase.IDLE
            self._task, self._counted = None, True
            for state in self.layers:
                state.gradients.expected.chunks = 0
            for layer in self._window.held_layers():
                self.bindings.rest(layer)
            # Code that reads a layer may write it: it must cancel the early update first.
            for state in self.layers:
                if state.gradients.early is not None:
                    self.bindings.hide(state.index)
        self._learn(self._training)

    def start_again(self) -> None:
        """An exception may have ended anything anywhere: no pass is running, no layer is in a slot,
        every parameter is at rest. The lanes have done what was queued."""
        self.phase = Phase.IDLE
        self._inside.clear()
        self._span.drop()
        if self._current is self._training:
            self._slots.forget()
        self._current = self._training
        for track in (self._training, self._evaluation):
            track.cursor = 0
            track.recorded.clear()
        self._device.compute.finish()
        self.weights.start_again()

    def forget_calls(self) -> None:
        """No graph is waiting for its backward."""
        self._task, self._counted = None, False
        for state in self.layers:
            state.gradients.expected = ExpectedGradients()

    def _learn(self, track: Track) -> None:
        """Adopt the order of uses that this pass showed when the schedule predicted another."""
        seen = tuple(track.recorded)
        track.recorded.clear()
        offloads = self.gradients.take_order() if track is self._training else None
        self._adopt(track, seen, offloads)
        if track.cursor >= len(track.schedule.uses):
            track.cursor = 0

    def _adopt(
        self, track: Track, uses: tuple[Action, ...], offloads: tuple[int, ...] | None = None
    ) -> None:
        if not 0 < len(uses) <= MAX_RECORDED_USES:
            return
        is_other_order = (
            offloads is not None
            and offloads != track.offloads
            and track.num_orders < MAX_LEARNT_ORDERS
        )
        if uses != track.schedule.uses or is_other_order:
            track.num_orders += is_other_order
            track.offloads = offloads or ()
            updates = self._plan.updates if track is self._training else None
            schedule = self._schedule(uses, updates=updates, offloads=offloads)
            track.schedule, track.cursor = schedule, 0
            if track is self._training:
                self._step.follow(schedule)

    # -- uses -----------------------------------------------------------------------------------
    def begin_use(self, layer: int, kind: Kind) -> None:
        """Compute is about to touch the layer: do what the schedule says, then wait for its weights
        and bind them."""
        self._device.check()
        if self.phase is Phase.IDLE:
            self._slots.leave()  # a part of the model is called by itself
        elif self._current is self._training:
            self._rejoin()
        streamed = self.layers[layer].layout.streamed
        if self._inside and not streamed:
            # A module shared with the block that is running, which must not be moved away.
            self.make_ready(layer)
            return
        if self.phase is not Phase.BACKWARD:
            self._step.cancel_early((layer,))
        self._span.end()  # what follows may wait, which is not the compute of the layer before
        if layer not in self._inside:
            self._take_writes(layer)
        if kind is Kind.FORWARD and streamed:
            self._inside.append(layer)
        if kind is Kind.FORWARD and self.phase is Phase.BACKWARD:
            kind = Kind.BACKWARD  # recomputation
        use = Action(kind=kind, layer=layer)
        if kind is Kind.FORWARD:
            # A resident layer's parameters never change device, so that autograd keeps one leaf for
            # all of its calls, and hands its gradient over once. A call without gradients may be a
            # reentrant checkpoint's.
            if self._counted:
                self.forget_calls()
            expected = self.layers[layer].gradients.expected
            if not torch.is_grad_enabled():
                expected.num_pending_backwards += (
                    self.phase is Phase.FORWARD and self._current is self._training
                )
            elif layer in self._plan.resident:
                expected.resident_calls += 1
            else:
                expected.num_pending_backwards += 1
            self._advance(use)
        elif not self._current.recorded or self._current.recorded[-1] != use:
            self._advance(use)
        self.make_ready(layer)
        self._span.begin(use)

    def _take_writes(self, layer: int) -> None:
        """What was written into the layer's parameters at rest counts from its next use on: a copy
        that was fetched before is old. A parameter's version tells, and of an alias, through which
        anything may have been written, that there is one."""
        written, slot = self.bindings.written(layer), self.layers[layer].on_gpu.slot
        if written:
            self._team.refuse_write(self.layers[layer])
        if layer in self._plan.resident:
            return
        if written:
            self._host.access.flush(layer)
        ahead = slot is not None and self.phase is not Phase.BACKWARD
        if ahead and (written or self.bindings.aliased(layer)):
            self._slots.leave()
            self.weights.release(layer)
            if self.phase is not Phase.IDLE and self._current is self._training:
                self._rejoin()

    def refuse_writes(self, layer: int, *, again: bool) -> None:
        """ConfigError when the layer's forward, which has ended, wrote into its parameters: what it
        wrote into a slot is lost, and what it writes when it runs `again` is written twice."""
        if layer in self._plan.resident and not again:
            return
        if self.phase is not Phase.BACKWARD and self.bindings.written(layer):
            if layer not in self._plan.resident:
                self.weights.release(layer)
            name = self.layers[layer].name
            way = (
                'set stronghold.activations to "keep", which runs it once'
                if layer in self._plan.resident
                else f"or keep its layer on the device: stronghold.resident_layers ({name})"
            )
            raise ConfigError(
                f"the forward of {name} wrote into its parameters in place (a clamp, a norm that "
                "is kept): the layer is a copy there, and what is written is lost. Write between "
                f"two steps, after engine.step(), {way}"
            )

    def next_backward(self) -> int | None:
        """The layer whose backward the schedule has next, or None."""
        uses = self._current.schedule.uses[self._current.cursor :]
        return next((use.layer for use in uses if use.kind is Kind.BACKWARD), None)

    def end_forward(self, layer: int) -> None:
        """The layer's forward returned or raised: the parameters go to rest, the slot stays until
        the schedule says so."""
        if layer in self._inside:
            self._inside.remove(layer)
        if self.phase is Phase.BACKWARD:
            return
        self._span.end()
        # Else it ran inside of itself: for a gradient that its own forward takes, say.
        if layer not in self._inside and layer not in self._plan.resident:
            self.bindings.rest(layer)

    def _advance(self, use: Action) -> None:
        """A use begins: do what the schedule has before it, if it has this use."""
        track = self._current
        self._record(use)
        uses = track.schedule.uses
        positions = ((track.cursor + k) % len(uses) for k in range(len(uses)))
        position = next((at for at in positions if uses[at] == use), None)
        if position is not None:
            self._perform_before(track, position)
        if use.kind is Kind.BACKWARD:
            self.gradients.reached(use.layer)

    def _record(self, use: Action) -> None:
        if len(self._current.recorded) <= MAX_RECORDED_USES:
            self._current.recorded.append(use)

    def _perform_before(self, track: Track, position: int) -> None:
        """Do what the schedule has before the use at `position`."""
        use, track.cursor = track.schedule.uses[position], position + 1
        for action in track.schedule.steps[position][:-1]:
            self._perform(action, keep=use.layer)
        self._note(use.kind, use.layer)

    def _perform(self, action: Action, keep: int) -> None:
        if action.kind is Kind.RELEASE:
            busy = action.layer == keep or action.layer in self._inside
            if not busy and action.layer in self._window.held_layers():
                self._release(action.layer)
        elif self.weights.needs_fetch(action.layer) and self.weights.has_room(action.layer):
            self._fetch(action.layer, keep=keep)

    def make_ready(self, layer: int) -> None:
        """Fetch the layer unless a slot has it, make compute wait for it, and bind its parameters
        to the slot. A layer that is updated on the GPU is there, written in order with compute."""
        if layer in self._plan.updated_on_gpu:
            return
        if self.weights.needs_fetch(layer):
            if self.phase is Phase.IDLE:
                self._slots.leave()
            self._fetch(layer, keep=layer)
        self.weights.make_ready(layer)

    def _fetch(self, layer: int, keep: int) -> None:
        """Queue a fetch. The slots of `keep`, and of the blocks that are running, are not given
        to the layer."""
        self._note(Kind.FETCH, layer)
        keeps = (keep, *self._inside)
        self.weights.fetch(layer, keep=keeps, together=self._slots.are_common)

    def _release(self, layer: int) -> None:
        self._note(Kind.RELEASE, layer)
        self.weights.release(layer)

    def _note(self, kind: Kind, layer: int) -> None:
        """An operation of a training pass is about to be performed."""
        if self._current is self._training:
            self.performed.add(kind, layer)

    def weights_of(self, layer: int, user: int) -> torch.Tensor:
        """The slot that holds the layer now, after fetching it if it left: what a saved tensor's
        handle resolves to. `user`: the layer whose forward saved it."""
        if self.layers[layer].on_gpu.residency is not Residency.READY:
            use = Action(kind=Kind.BACKWARD, layer=user)
            if self.phase is Phase.BACKWARD and self._current.recorded[-1:] != [use]:
                self.begin_use(user, Kind.BACKWARD)  # no output that hooks know told of it
            self.make_ready(layer)
        return self.weights.slot_of(layer).weights

    # -- gradients --------------------------------------------------------------------------------
    def gradient_arrived(self, state: LayerState, position: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated into `parameter.grad`: bring it to the layer's slot."""
        gradient, parameter.grad = parameter.grad, None  # its data may be elsewhere by now
        assert gradient is not None
        name = state.layout.slices[position].name
        self._check_reached(name)
        if self._on_gpu and gradient.is_cpu:
            # Of a thread of its own: which of the two comes first is not the program's order.
            raise ConfigError(
                f"a gradient of {name} came on the CPU: the loss reads it outside of its "
                "layer, where it rests, beside the model on the device. Compute what needs it in a "
                "module that the model calls, set weight_decay for a penalty on weights, or keep "
                "its layer on the device (stronghold.resident_layers)"
            )
        expected = state.gradients.expected
        if expected.resident_calls > 1 and backward_number() != self._task:
            # A backward inside the backward: each of the calls gives its gradients by itself.
            expected.num_pending_backwards = max(
                expected.num_pending_backwards, expected.resident_calls
            )
        self.gradients.arrived(state.index, position, self.outside.scaled(gradient))

    def reached(self, *, gradient: bool) -> bool:
        """Autograd has come to an output of a layer, or to a parameter (`gradient`). Whether a
        backward is running: the user's own begins here."""
        if self.phase is Phase.IDLE:
            self.outside.reached(gradient)
        if self._task is None:
            self._task = backward_number()
        return self.phase is Phase.BACKWARD

    def _check_reached(self, name: str) -> None:
        if not self.reached(gradient=True):
            raise ConfigError(
                f"a gradient of {name} came while the model's forward runs: call backward "
                "after forward, or freeze the model meanwhile: model.requires_grad_(False)"
            )

    def chunk_begun(self, layer: int, first: bool) -> None:
        """A chunk of the layer is computed whose gradients will come, its call's `first` or not."""
        expected = self.layers[layer].gradients.expected
        expected.chunks += 1
        if first and layer in self._plan.resident:  # each call's gradients come by themselves
            expected.num_pending_backwards += 1

    def undivided_begun(self, layer: int) -> None:
        """A call is computed in one, where others are in chunks: the gradients of all such calls of
        a resident come once."""
        expected = self.layers[layer].gradients.expected
        if layer in self._plan.resident and not expected.is_undivided:
            expected.is_undivided = True
            expected.num_pending_backwards += 1

    def chunk_gathered(
        self, layer: int, gradients: Sequence[tuple[int, torch.Tensor]], last: bool
    ) -> None:
        """Autograd has come through a chunk: its gradients, (position, gradient). `last`: of its
        call none is to come."""
        self._check_reached(self.layers[layer].name)
        scaled = self.outside.scaled
        found = [(k, scaled(gradient)) for k, gradient in gradients]
        self.gradients.chunk_arrived(layer, found, last=last)

    # -- between steps --------------------------------------------------------------------------
    def weights_changed(self, layers: Sequence[int]) -> None:
        """The host weights of `layers` are or will be new. Give back the slots that have old ones,
        and fetch ahead what the next forward needs first."""
        self.outdate(layers)
        self.fetch_ahead()

    def outdate(self, layers: Sequence[int]) -> None:
        """The host weights of `layers` are or will be new: what the device holds of them is old."""
        self._rejoin()
        for layer in layers:
            if layer in self._plan.updated_on_gpu:
                continue
            if layer in self._plan.resident:
                if self.layers[layer].on_gpu.residency is Residency.FETCHING:
                    self.weights.make_ready(
                        layer
                    )  # fetched ahead and not used: changed twice in a row
            elif self.layers[layer].on_gpu.slot is not None:
                self._release(layer)
            self._window.outdate(layer)
            self.bindings.hide(layer)
        for layer in self._plan.updated_on_gpu:  # written in order with compute
            self.bindings.show(layer)

    def fetch_ahead(self) -> None:
        """Queue the fetches before the first use of the next training pass, each after its layer's
        update."""
        schedule = self._training.schedule
        if schedule.uses:
            for action in schedule.steps[0][:-1]:
                self._perform(action, keep=schedule.uses[0].layer)

    def settle(self, layers: Sequence[int]) -> None:
        """Wait until the layers' newest weights are where their parameters point, and all of their
        arrays where they lie between steps. Within a pass parameters stay where the pass has them.
        """
        self._device.check()
        for layer in layers:
            self.layers[layer].wait()
        self._host.tiers.check()
        for layer in sorted(self.weights.refreshed.intersection(layers)):
            if self.weights.needs_fetch(layer):
                self._slots.leave()
            self.make_ready(layer)
        for layer in layers:
            self.bindings.show(layer)
        self._team.settle(layers)

    def aliased(self, layers: Iterable[int]) -> list[int]:
        """Those of which somebody outside keeps an alias ([Note: a storage of their own]
        of `binding`)."""
        return [layer for layer in layers if self.bindings.aliased(layer)]

    def given_out(self, layers: Sequence[int]) -> None:
        """Code outside has these layers' parameters between two passes, and may write into them:
        what was fetched ahead of them is fetched again. Not between a forward and its backward."""
        waiting = not self._counted and any(
            state.gradients.expected.num_pending_backwards for state in self.layers
        )
        if self.phase is Phase.IDLE and not waiting:
            for layer in set(layers).intersection(self._window.held_layers()):
                self._slots.leave()
                self.weights.release(layer)

    def begin_training(self) -> None:
        """All ranks go on together, and nothing is to be fetched again."""
        self._current = self._training

    def rest(self, layer: int) -> None:
        """Point the layer's parameters at its own arrays."""
        self.bindings.rest(layer)
        self.bindings.written(layer)  # before: what is written from now on counts
