"""A model that is streamed: layers take turns in the window's slots.

Owns the parts of it: window, update lane, executor, activations and hooks, and the order in which
an event of the step reaches them. Each part's own file says what it does. The training thread alone
calls.

[Note: interrupts] Ctrl-C, or an exception in a user's hook, may end any of this at any bytecode.
What it may leave:
  * a layer in two states at once: claimed and not fetched, released in the window and still bound,
    some of its parameters in a slot and others at rest
  * an operation that a lane performs and whose fence nobody has
  * gradients: in `.grad`, in slots that gather, on their way, counted as arrived or not
  * a pass that nobody ended: its phase, its blocks, its saved-tensor hooks, its place among uses
  * steps of Adam that were counted, with or without their update
None of it is repaired one by one. The lanes end what is queued, and then nothing is anywhere: no
layer in a slot, no gradient, no pass, every parameter at rest. The arrays are whole, for the lanes
alone write them; whether they are of one step is what the ledger knows, which is told before the
first of them changes, and after the last. Arrays of two steps, and counts, are what a load writes.
Of several ranks one that raises ends them all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from stronghold.memory.window import Window
from stronghold.model.partition import Partition
from stronghold.plan.plan import Plan
from stronghold.runtime.activations import Activations
from stronghold.runtime.executor import Executor, Phase
from stronghold.runtime.hooks import Hooks
from stronghold.runtime.ledger import GateResult
from stronghold.runtime.parts import Parts
from stronghold.runtime.runtime import Runtime, Written

logger = logging.getLogger("stronghold")


class Streaming(Runtime):
    """Trains by `plan`. Offloaded activations take `host_room_bytes` of the host at most (None:
    what it has).
    """

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        *,
        host_room_bytes: int | None = None,
    ) -> None:
        host, device = parts.host, parts.device
        self.window = Window(
            device,
            host.dtype,
            host.layers,
            resident=plan.resident,
            num_slots=plan.window,
            num_gradient_slots=plan.gradient_slots,
            own_gradients=plan.own_gradients,
            sums=plan.chunk is not None,
        )
        super().__init__(parts, plan, window=self.window)
        self._hooks: Hooks | None = None
        # Updated on the host, where writes to what is on the device, or to what has a master of
        # its own, do not show; and the versions of their parameters that did.
        everything = range(len(parts.layers)) if host.dtype is torch.float16 else plan.resident
        self._unseen = [layer for layer in everything if layer not in plan.updated_on_gpu]
        for state in parts.layers:
            state.versions = None
        self._has_aliases = False  # said once
        self.executor = Executor(parts, self.window, self.updates, self.ledger, plan)
        self.activations = Activations(
            plan.activations,
            device,
            self.executor,
            parts.metrics,
            host_room_bytes=host_room_bytes,
        )

    @property
    def host_activation_bytes(self) -> int:  # type: ignore[override]
        return self.activations.host_bytes

    # -- life -------------------------------------------------------------------------------------
    def adopted(self, layer: int) -> None:
        self.executor.rest(layer)

    def start(self, partition: Partition) -> None:
        self._hooks = Hooks(
            partition=partition,
            layout=self._host.layout,
            executor=self.executor,
            activations=self.activations,
            trained=self._adam.trains,
            chunk=self._plan.chunk,
        )
        self.settle()

    def detach(self) -> None:
        if self._hooks is not None:
            self._abandon_forward()
            self._hooks.close()
            self._hooks = None
            self._adopt_edited()

    def give_back(self) -> None:
        self.executor.rest_all()

    def close(self) -> None:
        self.activations.close()
        self.window.close()

    # -- the step ---------------------------------------------------------------------------------
    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        self._device.check()  # what failed before explains what is refused now
        self.ledger.check()
        self._abandon_forward()  # of a call of the module itself, which nobody saw end
        try:
            yield
        except BaseException as error:
            self._abandon_forward(interrupted=not isinstance(error, Exception))
            raise

    def _abandon_forward(self, *, interrupted: bool = False) -> None:
        left_open = self._hooks is not None and self._hooks.abandon_forward()
        if left_open or interrupted:
            self._start_again()

    def _start_again(self) -> None:
        """Nothing is anywhere ([Note: interrupts]); but what lies in slots stays where other ranks
        count on it."""
        if self._team.lockstep:
            self.executor.abandon_forward()
        else:
            self._device.finish()
            self.executor.start_again()

    def _drop_grad(self) -> None:
        """What autograd left in parameters, whose hooks did not come to take it away."""
        for _, _, parameter in self._with_gradient():
            parameter.grad = None

    def begin_backward(self, *, boundary: bool) -> None:
        self._device.check()
        self._abandon_forward()
        self._adam.refuse_unfrozen()
        self._adopt_edited()
        if torch._C._current_graph_task_id() == -1:  # else what is there is of this very backward
            self._refuse_strays()
        self.ledger.begin_backward(boundary=boundary)
        self._store.prepare_training()
        if self._hooks is not None:
            self._hooks.begin_backward()
        self.executor.begin_backward_pass()

    def end_backward(self) -> None:
        self.executor.end_backward_pass()
        if self._hooks is not None:
            self._hooks.end_backward()

    def abandon_backward(self) -> None:
        if self._hooks is not None:
            self._hooks.end_backward()
        if self._team.lockstep:
            if self.executor.phase is Phase.BACKWARD:  # else all ranks have raised
                self._team.fail("engine.backward raised")
            self.executor.abandon_backward_pass()
        else:
            self.updates.abandon_backward()
            self._start_again()
        self.executor.forget_calls()
        self._drop_grad()

    def drop_gradients(self) -> None:
        self.ledger.refuse_dropping()
        self.updates.forget()
        self._team.dropped()

    def close_gate(self, *, clipping: float, loss_scale: float, skips: bool) -> GateResult:
        self._refuse_strays()
        self._adopt_edited()
        gate, changed = self.updates.close_gate(
            clipping=clipping, loss_scale=loss_scale, skips=skips and self._plan.gated
        )
        self.executor.weights_changed(changed)
        if kept := self.executor.aliased(changed):
            self._wait_for_aliased(kept)
        return gate

    def _wait_for_aliased(self, layers: Sequence[int]) -> None:
        if not self._has_aliases:
            self._has_aliases = True
            logger.warning(
                "something keeps aliases of weights (p.data, p.detach(), a view, a state dict), of "
                "%s first: engine.step() waits for the updates of these layers, so that they show "
                "the newest values. Keep clones, or the parameters themselves, and it need not",
                self._host.layers[layers[0]].layout.name,
            )
        self.settle(layers)

    # -- between steps ----------------------------------------------------------------------------
    def settle(self, layers: Sequence[int] | None = None) -> None:
        if layers is not None:
            self.ledger.refuse_early_read(layers)
        asked = range(len(self._host.layers)) if layers is None else layers
        self.executor.settle(asked)
        self.executor.given_out(asked)
        if self.executor.phase is Phase.IDLE and not self._team.lockstep:
            self._adopt_edited()

    def restart(self) -> None:
        self._device.check()
        if self._hooks is not None:
            self._hooks.abandon_forward()
            self._hooks.end_backward()
        self._drop_grad()
        self.updates.restart()
        self.executor.forget_calls()
        self._start_again()
        self._team.barrier("before a load")

    def loaded(self, layers: Sequence[int] | None = None) -> None:
        self._team.spread("after a load")
        chosen = range(len(self._host.layers)) if layers is None else layers
        for layer in chosen:
            self._host.layers[layer].versions = None  # what was written before is gone
            if layer in self._plan.updated_on_gpu:
                torch.autograd.graph.increment_version(self._parameters[layer])
        self.executor.weights_changed(chosen)

    def _adopt_edited(self) -> None:
        """What was written in place, from outside, where an update on the host would not see it:
        take it over before that. A parameter's version tells. bf16 masters keep their remainders,
        so that weights that come back to what they were are the same masters.
        """
        edited: dict[int, set[int]] = {}
        # Through an alias anything may have been written, but not since an early update.
        applied = {state.index for state in self.ledger.applied}
        silent = () if self._team.lockstep else self._plan.resident - applied
        for layer in self._unseen:
            versions = self._versions_of(layer)
            state = self._host.layers[layer]
            if state.versions is None:
                state.versions = versions
            before = state.versions
            if versions != before:
                self.ledger.refuse_early_write(layer)
                pairs = zip(versions, before, strict=True)
                edited[layer] = {k for k, (now, then) in enumerate(pairs) if now != then}
            elif layer in silent and self.executor.aliased((layer,)):
                self._save(layer)
        if edited and self._team.lockstep:
            self.adopt_weights(edited)
        else:
            for layer, positions in edited.items():
                self._save(layer)
                if self._host.dtype is torch.float16:
                    self._host.restart_master(layer, positions)
        for layer in edited:
            self._host.layers[layer].versions = self._versions_of(layer)

    def _versions_of(self, layer: int) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # else those that are hidden take long
            return [parameter._version for parameter in self._parameters[layer]]

    def adopt_weights(self, written: Written | None = None) -> None:
        layers = list(range(len(self._host.layers)) if written is None else written)
        for index in layers:
            self._save(index)
        self._team.agree("after new weights")
        for index in layers:
            self._host.restart_master(index, written and written[index])
        self._team.barrier("after new weights")
        self.executor.weights_changed([i for i in layers if i not in self._plan.resident])

    def _save(self, layer: int) -> None:
        """Bring what was written where the layer's parameters point to its arrays."""
        device, state = self._device, self._host.layers[layer]
        if layer in self._plan.resident and not state.on_device:
            slot = state.slot
            assert slot is not None
            save = partial(device.copy, state.weights, slot.weights[: state.weights.numel()])
            nbytes = state.weights.numel() * state.weights.element_size()
            device.drain.submit(
                f"save {layer}",
                save,
                (device.record_compute(f"weights {layer} written"),),
                reads=(slot.record,),
                writes=(state.records["weights"],),
                nbytes=nbytes,
            ).wait()
        self._host.flush(layer)
