"""Performs the schedule of a step as the model is called and autograd runs.

States of a step: IDLE -> FORWARD at the model's call, FORWARD -> IDLE at its return, IDLE ->
BACKWARD while autograd runs. A forward hook that fires in BACKWARD belongs to recomputation.

[Note: when a layer is fetched] `weights` does the fetch (prefetch, unshard). There are four cases.
1. Ahead: the schedule has releases and fetches before each use (`_perform_before`). What is fetched
   and what leaves is chosen in `plan.schedule._Pass`.
2. Ahead of the next step: weights have changed. The fetches before the next step's first use are
   queued, each after its layer's update (`outdate`, then `fetch_ahead`).
3. On demand: a layer is used, and no slot has its newest weights (`make_ready`). This happens in
   the first step, in an order of uses that was not predicted, and for saved weights of a released
   layer.
4. After a rank fetched for itself: the layers that its slots held before (`_rejoin`).

The executor learns another order of uses when a pass shows one. Entered by the training thread and,
on a GPU, by autograd's thread during backward. The two never run at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from stronghold.devices.compute_span import ComputeSpan
from stronghold.errors import ConfigError
from stronghold.memory.layer import ExpectedGradients, LayerState, Residency
from stronghold.memory.window import Window
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Action, Kind, Position, Schedule, canonical_uses, make_schedule
from stronghold.streaming.gradients import GradientOffload
from stronghold.streaming.ledger import Ledger
from stronghold.streaming.optimizer_step import OptimizerStep
from stronghold.streaming.parameter_views import Bindings
from stronghold.streaming.parts import Parts
from stronghold.streaming.patches.autograd import backward_number
from stronghold.streaming.weights import LayerWeights

# A pass longer than this (token-by-token generation) keeps the schedule that it has.
MAX_RECORDED_USES = 4096
# Times that another order of offloads is learnt. Where threads race, it differs in every pass.
MAX_LEARNT_ORDERS = 4


class Phase(Enum):
    """Phase of the training thread in a step."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(slots=True)
class Track:
    """Schedule of one kind of pass, and the position of the running pass in it.

    `offloads`: the order of offloads in a pass with these uses, learnt `num_orders` times.
    `cursor`: position in the schedule's uses. `recorded`: uses of the running pass.
    """

    schedule: Schedule
    offloads: tuple[int, ...] = ()
    num_orders: int = 0
    cursor: int = 0
    recorded: list[Action] = field(default_factory=list)


class Executor:
    """Fetches, releases and binds layers as their uses come, and counts expected gradients."""

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
        self._metrics, self._team = parts.metrics, parts.team
        self.outside, self.trainer = parts.outside, parts.trainer
        self.phase = Phase.IDLE
        self.weights = LayerWeights(parts, window, plan, self.bindings)
        self._on_gpu = device.torch_device.type != "cpu"
        self._task: int | None = None  # torch's number of the backward that runs
        self._has_run_backward = False  # of the calls whose gradients are expected
        # blocks whose forward is running now, outermost first
        self._inside: list[int] = []
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
        self.gradients = GradientOffload(parts, window, step.pending, expected, span=self._span)

    def _schedule(
        self,
        uses: Sequence[Action],
        *,
        updates: Mapping[int, Position] | None = None,
        offloads: Sequence[int] | None = None,
    ) -> Schedule:
        """Make the schedule of passes that use layers in this order."""
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
        """Predicted schedule of the training pass."""
        return self._training.schedule

    # -- passes ---------------------------------------------------------------------------------
    def begin_forward_pass(self, *, training: bool) -> None:
        """The model was called. `training`: gradients will be wanted."""
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
        """Give the slots the layers that they had before this rank fetched for itself."""
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
        """Autograd has returned or raised: offload the last gradients, rest every parameter."""
        self._span.end()
        try:
            self.gradients.flush()
            self._step.pending.end_backward()
        finally:
            self.phase = Phase.IDLE
            self._task, self._has_run_backward = None, True
            for state in self.layers:
                state.gradients.expected.chunks = 0
            self.weights.decoded.rest_all()
            for layer in self._window.held_layers():
                self.bindings.rest(layer)
            # Hazard: code that reads a layer may write it. It must cancel the early update first.
            for state in self.layers:
                if state.gradients.early is not None:
                    self.bindings.hide(state.index)
        self._learn(self._training)

    def start_again(self) -> None:
        """Reset after an exception at any place: no pass runs, every slot is empty, every parameter
        rests. The lanes have done all queued operations."""
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
        """Forget expected gradients: no graph waits for its backward."""
        self._task, self._has_run_backward = None, False
        for state in self.layers:
            state.gradients.expected = ExpectedGradients()

    def _learn(self, track: Track) -> None:
        """Adopt the order of uses of this pass, if the schedule predicted another."""
        recorded_uses = tuple(track.recorded)
        track.recorded.clear()
        offloads = self.gradients.take_order() if track is self._training else None
        self._adopt(track, recorded_uses, offloads)
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
        """Compute is about to use the layer: perform the schedule's operations before this use,
        wait for the layer's weights, and bind them."""
        self._device.check()
        if self.phase is Phase.IDLE:
            self._slots.leave()  # the program calls a part of the model
        elif self._current is self._training:
            self._rejoin()
        streamed = self.layers[layer].layout.streamed
        if self._inside and not streamed:
            # The running block shares this module. The running block must keep its slot.
            self.make_ready(layer)
            return
        if self.phase is not Phase.BACKWARD:
            self._step.cancel_early((layer,))
        self._span.end()  # the following waits are not compute of the layer before
        if layer not in self._inside:
            self._take_writes(layer)
        if kind is Kind.FORWARD and streamed:
            self._inside.append(layer)
        if kind is Kind.FORWARD and self.phase is Phase.BACKWARD:
            kind = Kind.BACKWARD  # recomputation
        use = Action(kind=kind, layer=layer)
        if kind is Kind.FORWARD:
            # A resident layer's parameters never change device. So autograd keeps one leaf for all
            # of its calls, and delivers one gradient. A call without gradients may be that of a
            # reentrant checkpoint.
            if self._has_run_backward:
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
        self.weights.decoded.make_ready(layer)
        self._span.begin(use)

    def _take_writes(self, layer: int) -> None:
        """Take over values that the program wrote into the layer's parameters at rest.

        A copy that was fetched before is outdated. A changed version shows a write. If an alias
        exists, the program may have written through it.
        """
        written = self.bindings.written(layer)
        slot = self.layers[layer].on_gpu.slot
        if written:
            self._team.refuse_write(self.layers[layer])
        if layer in self._plan.resident:
            return
        if written:
            self._host.access.flush(layer)
        is_fetched_ahead = slot is not None and self.phase is not Phase.BACKWARD
        if is_fetched_ahead and (written or self.bindings.aliased(layer)):
            self._slots.leave()
            self.weights.release(layer)
            if self.phase is not Phase.IDLE and self._current is self._training:
                self._rejoin()

    def refuse_writes(self, layer: int, *, again: bool) -> None:
        """Raise ConfigError if the layer's forward, which has ended, wrote into its parameters.

        A write into a slot is lost. A forward that runs `again` writes twice.
        """
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
        """The layer's forward returned or raised: rest its parameters. The schedule releases the
        slot later."""
        if layer in self._inside:
            self._inside.remove(layer)
        if self.phase is Phase.BACKWARD:
            return
        self._span.end()
        # A layer may run inside itself, for instance for a gradient that its forward takes.
        if layer in self._inside:
            return
        self.weights.decoded.rest(layer)
        if layer not in self._plan.resident:
            self.bindings.rest(layer)

    def _advance(self, use: Action) -> None:
        """A use begins: perform the schedule's operations before it, if the schedule has it."""
        track = self._current
        self._record(use)
        uses = track.schedule.uses
        for step in range(len(uses)):
            position = (track.cursor + step) % len(uses)
            if uses[position] == use:
                self._perform_before(track, position)
                break
        if use.kind is Kind.BACKWARD:
            self.gradients.reached(use.layer)

    def _record(self, use: Action) -> None:
        if len(self._current.recorded) <= MAX_RECORDED_USES:
            self._current.recorded.append(use)

    def _perform_before(self, track: Track, position: int) -> None:
        """Perform the schedule's operations before the use at `position`."""
        use = track.schedule.uses[position]
        track.cursor = position + 1
        for action in track.schedule.steps[position][:-1]:
            self._perform(action, keep=use.layer)
        self._note(use.kind, use.layer)

    def _perform(self, action: Action, keep: int) -> None:
        if action.kind is Kind.RELEASE:
            is_in_use = action.layer == keep or action.layer in self._inside
            if not is_in_use and action.layer in self._window.held_layers():
                self._release(action.layer)
        elif self.weights.needs_fetch(action.layer) and self.weights.has_room(action.layer):
            self._fetch(action.layer, keep=keep)

    def make_ready(self, layer: int) -> None:
        """Fetch the layer unless a slot has it, make compute wait for it, and bind its parameters.

        A layer that is updated on the GPU is there already: compute writes it in order.
        """
        if layer in self._plan.updated_on_gpu:
            return
        if self.weights.needs_fetch(layer):
            if self.phase is Phase.IDLE:
                self._slots.leave()
            self._fetch(layer, keep=layer)
        self.weights.make_ready(layer)

    def _fetch(self, layer: int, keep: int) -> None:
        """Queue a fetch. Layer `keep` and the running blocks keep their slots."""
        self._note(Kind.FETCH, layer)
        kept_layers = (keep, *self._inside)
        self.weights.fetch(layer, keep=kept_layers, together=self._slots.are_common)

    def _release(self, layer: int) -> None:
        self._note(Kind.RELEASE, layer)
        self.weights.release(layer)

    def _note(self, kind: Kind, layer: int) -> None:
        """Note an operation of a training pass for `engine.inspect()`."""
        if self._current is self._training:
            self.performed.add(kind, layer)

    def weights_of(self, layer: int, user: int) -> torch.Tensor:
        """Return the memory of the slot that holds the layer: a saved tensor's handle resolves to
        it.

        Fetches the layer if it was released. `user`: the layer whose forward saved the tensor.
        """
        if self.layers[layer].on_gpu.residency is not Residency.READY:
            use = Action(kind=Kind.BACKWARD, layer=user)
            if self.phase is Phase.BACKWARD and self._current.recorded[-1:] != [use]:
                # no hooked output announced this use
                self.begin_use(user, Kind.BACKWARD)
            self.make_ready(layer)
        return self.weights.slot_of(layer).weights

    def decoded_weights_of(self, layer: int, user: int) -> torch.Tensor:
        """Return the memory that has the layer's decoded weights: a saved tensor's handle resolves
        to it. Arguments as in `weights_of`."""
        decoded = self.weights.decoded
        if decoded.layer != layer:
            if layer not in self._plan.updated_on_gpu:
                self.weights_of(layer, user)
            decoded.make_ready(layer)
        assert decoded.memory is not None
        return decoded.memory

    # -- gradients --------------------------------------------------------------------------------
    def gradient_arrived(self, state: LayerState, position: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated into `parameter.grad`: add it to the layer's gradient slot."""
        # its data may be elsewhere by now
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        name = state.layout.slices[position].name
        self._check_reached(name)
        if self._on_gpu and gradient.is_cpu:
            # Race: autograd's CPU thread delivers it, beside the GPU's thread, in any order.
            raise ConfigError(
                f"a gradient of {name} came on the CPU: the loss reads it outside of its "
                "layer, where it rests, beside the model on the device. Compute what needs it in a "
                "module that the model calls, set weight_decay for a penalty on weights, or keep "
                "its layer on the device (stronghold.resident_layers)"
            )
        expected = state.gradients.expected
        if expected.resident_calls > 1 and backward_number() != self._task:
            # A backward inside the backward: each call delivers its own gradients.
            expected.num_pending_backwards = max(
                expected.num_pending_backwards, expected.resident_calls
            )
        self.gradients.arrived(state.index, position, self.outside.scaled(gradient))

    def reached(self, *, gradient: bool) -> bool:
        """Autograd has come to an output of a layer, or to a parameter (`gradient`).

        A backward that the user started begins here. Returns True if a backward runs.
        """
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
        """A chunk of the layer is computed, and its gradients will come. `first`: of its call."""
        expected = self.layers[layer].gradients.expected
        expected.chunks += 1
        # each call's gradients come by themselves
        if first and layer in self._plan.resident:
            expected.num_pending_backwards += 1

    def undivided_begun(self, layer: int) -> None:
        """A call is computed whole, while other calls are in chunks. All whole calls of a resident
        layer deliver one gradient."""
        expected = self.layers[layer].gradients.expected
        if layer in self._plan.resident and not expected.is_undivided:
            expected.is_undivided = True
            expected.num_pending_backwards += 1

    def chunk_gathered(
        self, layer: int, gradients: Sequence[tuple[int, torch.Tensor]], last: bool
    ) -> None:
        """Autograd has come through a chunk: add its gradients, (position, gradient).

        `last`: no chunk of the call is left.
        """
        self._check_reached(self.layers[layer].name)
        scaled = [(k, self.outside.scaled(gradient)) for k, gradient in gradients]
        self.gradients.chunk_arrived(layer, scaled, last=last)

    # -- between steps --------------------------------------------------------------------------
    def weights_changed(self, layers: Sequence[int]) -> None:
        """The host weights of `layers` have changed, or will: release slots with outdated weights,
        and fetch the layers that the next forward needs first."""
        self.outdate(layers)
        self.fetch_ahead()

    def outdate(self, layers: Sequence[int]) -> None:
        """Mark the device's copies of `layers` outdated: their host weights have changed, or
        will."""
        self._rejoin()
        for layer in layers:
            if layer in self._plan.updated_on_gpu:
                continue
            if layer in self._plan.resident:
                # Fetched ahead and not used: the weights change twice in a row.
                if self.layers[layer].on_gpu.residency is Residency.FETCHING:
                    self.weights.make_ready(layer)
            elif self.layers[layer].on_gpu.slot is not None:
                self._release(layer)
            self._window.outdate(layer)
            self.bindings.hide(layer)
        for layer in self._plan.updated_on_gpu:  # compute writes them in order
            self.bindings.show(layer)

    def fetch_ahead(self) -> None:
        """Queue the fetches before the first use of the next training pass, each after its layer's
        update."""
        schedule = self._training.schedule
        if schedule.uses:
            for action in schedule.steps[0][:-1]:
                self._perform(action, keep=schedule.uses[0].layer)

    def settle(self, layers: Sequence[int]) -> None:
        """Wait until the layers' parameters have their newest weights, and their arrays are at
        home.

        Within a pass, parameters stay in the slots.
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
        """Return the layers of which code outside keeps an alias ([Note: a storage of their own]
        of `parameter_views`)."""
        return [layer for layer in layers if self.bindings.aliased(layer)]

    def given_out(self, layers: Sequence[int]) -> None:
        """Release copies of layers that were fetched ahead: code outside may write their
        parameters.

        Between a forward and its backward nothing is released.
        """
        waits_for_backward = not self._has_run_backward and any(
            state.gradients.expected.num_pending_backwards for state in self.layers
        )
        if self.phase is Phase.IDLE and not waits_for_backward:
            for layer in set(layers).intersection(self._window.held_layers()):
                self._slots.leave()
                self.weights.release(layer)

    def begin_training(self) -> None:
        """Begin with a training pass, which all ranks make together."""
        self._current = self._training

    def rest(self, layer: int) -> None:
        """Point the layer's parameters at its own arrays."""
        self.bindings.rest(layer)
        self.weights.decoded.rest(layer)
        self.bindings.written(layer)  # before: what is written from now on counts
