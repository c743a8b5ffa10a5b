"""Interprets the schedule: the only issuer of fetches and releases.

Owns the phase of the step and, per layer, which fence says that its host weights are up to date.
Entered by the training thread and, on a GPU, by autograd's thread during backward; the two never
run at once.

States of a step. IDLE -> FORWARD at the model's call, -> IDLE at its return; IDLE -> BACKWARD
around autograd's run. Forward hooks that fire in BACKWARD are recomputation. Races and what
prevents them:
  * a slot is overwritten while compute reads it      -> the fetch waits for the fence recorded at
  the release
  * compute reads a slot before it is filled          -> compute waits for the fetch's fence before
  RESIDENT
  * a fetch reads weights that Adam is writing        -> the fetch waits for `updated(layer)`
  * Adam writes weights that a late fetch still reads -> the update waits for the layer's last fetch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import torch
from torch import nn

from stronghold.device.base import Device, Fence, completed, timed
from stronghold.errors import ConfigError
from stronghold.memory.host import HostStore
from stronghold.memory.window import Residency, Slot, Window
from stronghold.model.layout import ParameterSlice
from stronghold.plan.planner import Plan
from stronghold.plan.schedule import Action, Kind, Schedule, canonical_uses
from stronghold.runtime.adam import AdamSteps
from stronghold.runtime.aliases import refuse_aliases
from stronghold.runtime.binding import Bindings
from stronghold.runtime.drains import GradientDrains
from stronghold.runtime.residents import Residents
from stronghold.runtime.spans import ComputeSpan
from stronghold.runtime.track import Track, make_track
from stronghold.runtime.updater import Updater
from stronghold.telemetry.metrics import Metrics

# A pass longer than this (token-by-token generation) keeps the schedule that it has.
MAX_RECORDED_USES = 4096


class Phase(Enum):
    """Where in the step the training thread is."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Executor:
    """Moves layers as their uses come. `parameters[i]` are the parameters of layer i in the
    layout's order.
    """

    def __init__(
        self,
        *,
        device: Device,
        host: HostStore,
        window: Window,
        updater: Updater,
        plan: Plan,
        parameters: Sequence[Sequence[nn.Parameter]],
        adam: AdamSteps,
        metrics: Metrics,
        residents: Residents | None = None,
    ) -> None:
        self._device = device
        self._host = host
        self._window = window
        self._updater = updater
        self._plan = plan
        self._bindings = Bindings(host.layers, parameters, plan.resident)
        self._metrics = metrics
        self.phase = Phase.IDLE
        num_layers = len(host.layers)
        self._last_fetch: list[Fence] = [
            completed("fetch", "never fetched") for _ in range(num_layers)
        ]
        # Resident layers whose weights come from the host; the others' are never old.
        self._refreshed = plan.resident - plan.updated_on_gpu
        self._stale = set(self._refreshed)
        staying = [host.layers[layer].weights for layer in plan.updated_on_gpu]
        staying += [slot.weights for layer in self._refreshed if (slot := window.slot_of(layer))]
        # Storages of weights that stay on the device: saved, they need no copy. They are where
        # the weights begin, since parameters are bound to a storage of their own.
        self.staying = {weights.data_ptr() for weights in staying}
        # Storage of a slot -> the streamed layer that is in it, for saved tensors.
        self.layer_at: dict[int, int] = {}
        self._calls = [0] * num_layers  # forward calls with gradients since the last backward
        self._streams = [layer.streamed for layer in host.layout.layers]
        self._inside: list[int] = []  # blocks whose forward is running now, outermost first
        self._span = ComputeSpan(device)
        forward = canonical_uses([layer.index for layer in host.layout.layers], backward=False)
        backward = canonical_uses(
            [layer.index for layer in host.layout.layers if layer.streamed], backward=True
        )
        self._training = make_track(plan, forward + backward[len(backward) // 2 :])
        self._evaluation = make_track(plan, forward)
        self._current = self._training
        self.num_fetches = 0
        self.fetched_bytes = 0
        self.drains: GradientDrains = GradientDrains(
            device=device,
            host=host,
            window=window,
            updater=updater,
            adam=adam,
            metrics=metrics,
            last_fetch=self.last_fetch,
            residents=residents,
            span=self._span,
            aliased=self._aliased_at_rest,
        )

    @property
    def schedule(self) -> Schedule:
        """The training pass as it is predicted now."""
        return self._training.schedule

    # -- passes ---------------------------------------------------------------------------------
    def begin_forward_pass(self, *, training: bool) -> None:
        """The model was called; `training` says that gradients will be wanted."""
        self._device.check()
        self._updater.ledger.check()
        self._turn_to(self._training if training else self._evaluation)
        if self.phase is Phase.IDLE:
            self.phase = Phase.FORWARD

    def _turn_to(self, track: Track) -> None:
        if track is not self._current:
            self._current = track
            track.cursor = 0
            track.recorded.clear()

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
            self._bindings.check(layer)
        self._window.prepare_training()
        self._host.prepare_training()
        self._updater.begin_backward()
        self.phase = Phase.BACKWARD

    def end_backward_pass(self) -> None:
        """Autograd has returned or raised: drain what is left, put every parameter at rest."""
        try:
            self.end_span()
            self.drains.flush(self._calls)
            self._updater.end_backward(self.last_fetch)
        finally:
            self.phase = Phase.IDLE
            self._calls = [0] * len(self._calls)
            for layer in self._window.held_layers():
                self._bindings.rest(layer)
            # What the last pass has left in slots of their own is of before.
            self._hide(self._updater.ledger.applied - self._refreshed)
        self._learn(self._training)

    def start_again(self) -> None:
        """An exception may have ended anything anywhere: no pass is running, no layer is in a slot,
        every parameter is at rest. The lanes have done what was queued.
        """
        self.phase = Phase.IDLE
        self._inside.clear()
        self._span.drop()
        self._current = self._training
        for track in (self._training, self._evaluation):
            track.cursor = 0
            track.recorded.clear()
        free = self._device.record_compute("before a new start")
        free.wait()
        self.layer_at.clear()
        self._last_fetch[:] = [free] * len(self._last_fetch)
        self._stale = set(self._refreshed)
        self._window.start_again(free)
        for layer, state in enumerate(self._host.layers):
            # A resident layer's never change device: autograd keeps one leaf for its calls.
            slot = self._window.slot_of(layer)
            self._bindings.point(layer, state.weights if slot is None else slot.weights)

    def abandon_forward(self) -> None:
        """An interrupt ended the forwards that were running."""
        for layer in reversed(list(self._inside)):
            self.end_forward(layer)
        self.end_forward_pass()

    def forget_calls(self) -> None:
        """No graph is waiting for its backward."""
        self._calls = [0] * len(self._calls)

    def abandon_backward_pass(self) -> None:
        """Autograd raised: the micro-batch's gradients are void, parameters go to rest."""
        self._span.drop()
        self.phase = Phase.IDLE
        self._calls = [0] * len(self._calls)
        self.drains.abandon()
        self._updater.abandon_backward()
        for layer in self._window.held_layers():
            self._bindings.rest(layer)

    def _learn(self, track: Track) -> None:
        """Adopt the order of uses that this pass showed when the schedule predicted another."""
        seen = tuple(track.recorded)
        if 0 < len(seen) <= MAX_RECORDED_USES and seen != track.schedule.uses:
            relearned = make_track(self._plan, seen)
            track.schedule, track.cursor = relearned.schedule, 0
        elif track.cursor >= len(track.schedule.uses):
            track.cursor = 0
        track.recorded.clear()

    # -- uses -----------------------------------------------------------------------------------
    def begin_use(self, layer: int, kind: Kind) -> None:
        """Compute is about to touch the layer: do what the schedule says, then wait for its weights
        and bind them.
        """
        self._device.check()
        if self._inside and not self._streams[layer]:
            # A module shared with the block that is running, which must not be moved away.
            self.make_resident(layer)
            return
        if self.phase is not Phase.BACKWARD:
            self._updater.ledger.refuse_early_read((layer,))
        self.end_span()  # what follows may wait, which is not the compute of the layer before
        if self._streams[layer] and layer not in self._inside:
            self._take_writes(layer)
        if kind is Kind.FORWARD and self._streams[layer]:
            self._inside.append(layer)
        if kind is Kind.FORWARD and self.phase is Phase.BACKWARD:
            kind = Kind.BACKWARD  # recomputation
        use = Action(kind=kind, layer=layer)
        if kind is Kind.FORWARD:
            # A resident layer's parameters never change device, so that autograd keeps one leaf for
            # all of its calls, and hands its gradient over once.
            if torch.is_grad_enabled() and layer not in self._plan.resident:
                self._calls[layer] += 1
            self._advance(use)
        elif not self._current.recorded or self._current.recorded[-1] != use:
            self._advance(use)
        self.make_resident(layer)
        self._span.begin(str(use))

    def _take_writes(self, layer: int) -> None:
        """What was written into the layer's parameters at rest counts from its next use on: a copy
        that was fetched before is old. A parameter's version tells, and of an alias, through which
        anything may have been written, that there is one.
        """
        written, slot = self._bindings.written(layer), self._window.slot_of(layer)
        if layer in self._plan.resident:
            return
        if written:
            self._wrote(layer)
        ahead = slot is not None and self.phase is not Phase.BACKWARD
        if ahead and (written or self._bindings.aliased(layer)):
            self._release(layer)

    def _wrote(self, layer: int) -> None:
        self._host.flush(layer)

    def refuse_writes(self, layer: int, *, again: bool) -> None:
        """ConfigError when the layer's forward, which has ended, wrote into its parameters: what it
        wrote into a slot is lost, and what it writes when it runs `again` is written twice.
        """
        if layer in self._plan.resident and not again:
            return
        if self.phase is not Phase.BACKWARD and self._bindings.written(layer):
            if layer not in self._plan.resident:
                self._release(layer)
            name = self._host.layers[layer].layout.name
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
        the schedule says so.
        """
        if layer in self._inside:
            self._inside.remove(layer)
        if self.phase is Phase.BACKWARD:
            return
        self.end_span()
        if layer not in self._plan.resident:
            self._bindings.rest(layer)

    def _advance(self, use: Action) -> None:
        track = self._current
        if len(track.recorded) <= MAX_RECORDED_USES:
            track.recorded.append(use)
        uses = track.schedule.uses
        for k in range(len(uses)):
            position = (track.cursor + k) % len(uses)
            if uses[position] == use:
                self._follow(track, position)
                return

    def _follow(self, track: Track, position: int) -> None:
        track.cursor = position + 1
        for action in track.schedule.steps[position][:-1]:
            self._perform(action, keep=track.schedule.uses[position].layer)

    def _perform(self, action: Action, keep: int) -> None:
        if action.kind is Kind.RELEASE:
            busy = action.layer == keep or action.layer in self._inside
            if not busy and action.layer in self._window.held_layers():
                self._release(action.layer)
        elif self._needs_fetch(action.layer):
            self._prefetch(action.layer, keep)

    def _prefetch(self, layer: int, keep: int) -> None:
        """Fetch ahead where there is room: an order of uses that was not predicted finds none."""
        if layer in self._plan.resident or self._window.free_slot() is not None:
            self._fetch(layer, keep=keep)

    def _needs_fetch(self, layer: int) -> bool:
        if layer in self._plan.resident:
            return layer in self._stale  # never one that is updated on the device
        return self._window.residency[layer] is Residency.HOST

    def make_resident(self, layer: int) -> None:
        """Fetch the layer if nobody has, make compute wait for it, and bind its parameters to the
        slot. What is updated on the device is there, and was written in order with compute.
        """
        if layer in self._plan.updated_on_gpu:
            return
        if self._needs_fetch(layer):
            self._fetch(layer, keep=layer)
        slot = self._window.slot_of(layer)
        assert slot is not None
        if self._window.residency[layer] is Residency.FETCHING:
            assert slot.ready is not None
            updated = self._updater.ledger.updated(layer)
            if not updated.done:
                self._metrics.waited("update", timed(updated.wait))
            self._metrics.waited("fetch", self._device.compute_wait(slot.ready))
            self._window.move(layer, Residency.RESIDENT)
        self._bindings.bind(layer, slot.weights)
        self._bindings.show(layer)

    def stale_residents(self) -> list[int]:
        """Resident layers whose newest weights compute has not waited for."""
        here = {i for i, at in self._window.residency.items() if at is Residency.RESIDENT}
        return [layer for layer in self._refreshed if layer in self._stale or layer not in here]

    def weights_of(self, layer: int) -> torch.Tensor:
        """The slot that holds the layer now, after fetching it if it left: what a saved tensor's
        handle resolves to.
        """
        if self._window.residency[layer] is not Residency.RESIDENT:
            self.make_resident(layer)
        slot = self._window.slot_of(layer)
        assert slot is not None
        return slot.weights

    def epoch(self, layer: int) -> int:
        """How often the layer's values changed: what was saved of another one is old."""
        return self._bindings.epochs[layer]

    def name_of(self, layer: int) -> str:
        """The layer's dotted name in the model."""
        return self._host.layers[layer].layout.name

    # -- transfers ------------------------------------------------------------------------------
    def _fetch(self, layer: int, keep: int) -> None:
        window = self._window
        slot = window.slot_of(layer) if layer in self._plan.resident else window.free_slot()
        if slot is None:
            busy = (keep, layer, *self._inside)
            victim = next((held for held in window.held_layers() if held not in busy), None)
            if victim is None:
                raise ConfigError(
                    f"layer {self._host.layers[layer].layout.name} is called inside "
                    f"another layer, and the window of {self._plan.window} slots is full; "
                    "raise stronghold.window"
                )
            self._release(victim)
            slot = window.free_slot()
            assert slot is not None
        if layer in self._plan.resident:
            slot.free_after = self._device.record_compute(f"before fetch {layer}")
        window.claim(slot, layer)
        self._stale.discard(layer)
        nbytes = self._fill(slot, layer)
        if layer not in self._plan.resident:
            self.layer_at[slot.weights.untyped_storage().data_ptr()] = layer
        self.num_fetches += 1
        self.fetched_bytes += nbytes

    def _fill(self, slot: Slot, layer: int) -> int:
        source = self._host.layers[layer].weights
        target = slot.weights[: source.numel()]
        slot.ready = self._updater.spills.fetch(layer, target, slot.free_after)
        self._last_fetch[layer] = slot.ready
        return source.nbytes

    def _release(self, layer: int) -> None:
        slot = self._window.slot_of(layer)
        assert slot is not None
        self.layer_at.pop(slot.weights.untyped_storage().data_ptr(), None)
        self._bindings.rest(layer)
        used = self._window.residency[layer] is Residency.RESIDENT
        self._window.release(layer, self._device.record_compute(f"release {layer}"))
        if used:
            ours = self._bindings.views_at(slot.weights.data_ptr())
            refuse_aliases(self._host.layers[layer].layout, slot.weights, ours)

    def gradient_arrived(
        self, layer: int, position: int, part: ParameterSlice, parameter: torch.Tensor
    ) -> None:
        """Autograd has accumulated into `parameter.grad`: send it on its way to the host."""
        if self.phase is not Phase.BACKWARD:
            parameter.grad = None
            raise ConfigError(
                f"gradient of {part.name} outside engine.backward: "
                "call engine.backward(loss), not loss.backward(); where another engine's backward "
                "runs through this model, freeze it meanwhile: model.requires_grad_(False)"
            )
        self.drains.arrived(layer, position, part, parameter, self._calls)

    # -- between steps --------------------------------------------------------------------------
    def last_fetch(self, layer: int) -> Fence:
        """The fence of the layer's newest fetch: an update must not write before it."""
        return self._last_fetch[layer]

    def weights_changed(self, layers: Sequence[int]) -> None:
        """The host weights of `layers` are or will be new: what the device holds of them is stale.
        Fetch ahead what the next forward needs first, each after its update."""
        for layer in layers:
            if layer in self._plan.updated_on_gpu:
                continue
            if layer in self._plan.resident:
                if self._window.residency[layer] is Residency.FETCHING:
                    self.make_resident(layer)  # fetched ahead and not used: changed twice in a row
                self._stale.add(layer)
            elif self._window.slot_of(layer) is not None:
                self._release(layer)
        self._hide(set(layers) - self._plan.updated_on_gpu)
        for layer in self._plan.updated_on_gpu:  # written in order with compute
            self._bindings.show(layer)
        track = self._training
        for use in track.schedule.uses[: 2 + self._plan.prefetch]:
            if self._needs_fetch(use.layer):
                if use.layer not in self._plan.resident and self._window.free_slot() is None:
                    break
                self._fetch(use.layer, keep=use.layer)

    def settle(self, layers: Sequence[int]) -> None:
        """Wait until the layers' newest weights are where their parameters point, and all of their
        arrays where they lie between steps. Within a pass parameters stay where the pass has them.
        """
        self._device.check()
        for layer in layers:
            self._updater.ledger.stored(layer).wait()
        self._host.tiers.check()
        for layer in sorted(self._refreshed.intersection(layers)):
            self.make_resident(layer)
        for layer in layers:
            self._bindings.show(layer)

    def _hide(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._bindings.hide(layer)

    def _aliased_at_rest(self, layer: int) -> bool:
        return layer not in self._plan.resident and self._bindings.aliased(layer, at_rest=True)

    def aliased(self, layers: Iterable[int]) -> list[int]:
        """Those of which somebody outside keeps an alias ([Note: a storage of their own]
        of `binding`)."""
        return [layer for layer in layers if self._bindings.aliased(layer)]

    def given_out(self, layers: Sequence[int]) -> None:
        """Code outside has these layers' parameters between two passes, and may write into them:
        what was fetched ahead of them is fetched again. Not between a forward and its backward.
        """
        if self.phase is Phase.IDLE and not any(self._calls):
            for layer in set(layers).intersection(self._window.held_layers()):
                self._release(layer)

    def rest(self, layer: int) -> None:
        """Point the layer's parameters at its own arrays."""
        self._bindings.rest(layer)
        self._bindings.written(layer)  # before: what is written from now on counts

    def rest_all(self) -> None:
        """Point every parameter at its layer's own arrays: so the model is given back."""
        self._bindings.rest_all()

    def end_span(self) -> None:
        """Close the compute lane's open span in the trace."""
        self._span.end()
