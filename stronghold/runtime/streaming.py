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
from torch import nn

from stronghold.device.base import Device
from stronghold.device.kernels import Kernels
from stronghold.memory.host import HostStore
from stronghold.memory.resident import DeviceStore
from stronghold.memory.window import Window
from stronghold.model.partition import Partition
from stronghold.plan.planner import Plan
from stronghold.runtime.activations import Activations
from stronghold.runtime.adam import AdamSteps
from stronghold.runtime.device_updates import DeviceUpdates
from stronghold.runtime.executor import Executor, Phase
from stronghold.runtime.hooks import Hooks
from stronghold.runtime.ledger import GateResult, Ledger
from stronghold.runtime.ranks.sharing import Sharing
from stronghold.runtime.residents import Residents
from stronghold.runtime.runtime import Written
from stronghold.runtime.updater import Updater
from stronghold.telemetry.metrics import Metrics

logger = logging.getLogger("stronghold")


class Streaming:
    """A `Runtime`. `store` has the arrays of the layers that are updated on the device, `host`
    those of the others. `parameters[i]` are the parameters of layer i in the layout's order;
    `kernels` run on the update lane; offloaded activations take `host_room_bytes` of the host at
    most (None: what it has).
    """

    kept_gradient_bytes = 0  # hooks move each gradient to a slot as it comes

    def __init__(
        self,
        *,
        device: Device,
        host: HostStore,
        store: DeviceStore,
        plan: Plan,
        parameters: Sequence[Sequence[nn.Parameter]],
        adam: AdamSteps,
        kernels: Kernels,
        metrics: Metrics,
        sharing: Sharing | None = None,
        host_room_bytes: int | None = None,
    ) -> None:
        self._sharing = sharing
        self._device = device
        self._host = host
        self._store = store
        self._plan = plan
        self._adam = adam
        self._hooks: Hooks | None = None
        self._parameters = parameters
        # Updated on the host, where writes to what is on the device, or to what has a master of
        # its own, do not show; and the versions of their parameters that did.
        everything = range(len(parameters)) if host.dtype is torch.float16 else plan.resident
        self._unseen = [layer for layer in everything if layer not in plan.updated_on_gpu]
        self._versions: dict[int, list[int]] = {}
        self._has_aliases = False  # said once
        self.window = Window(
            device,
            host.dtype,
            host.layout.layers,
            resident=plan.resident,
            num_slots=plan.window,
            num_gradient_slots=plan.gradient_slots,
            elsewhere=plan.updated_on_gpu,
            own_gradients=plan.own_gradients,
        )
        self._ledger = Ledger(host.layout.layers, plan.gradients)
        residents = Residents(
            device=device,
            store=store,
            window=self.window,
            updates=DeviceUpdates(
                device=device,
                states=host.layers,
                parameters=parameters,
                adam=adam,
                ledger=self._ledger,
                metrics=metrics,
            ),
            ledger=self._ledger,
            mode=plan.gradients,
        )
        make_updater = Updater if sharing is None else sharing.make_updater
        self.updater: Updater = make_updater(
            device=device,
            host=host,
            adam=adam,
            mode=plan.gradients,
            kernels=kernels,
            ledger=self._ledger,
            deferred=plan.deferred,
            residents=residents,
        )
        make_executor = Executor if sharing is None else sharing.make_executor
        self.executor: Executor = make_executor(
            device=device,
            host=host,
            window=self.window,
            updater=self.updater,
            plan=plan,
            parameters=parameters,
            adam=adam,
            metrics=metrics,
            residents=residents,
        )
        self.activations = Activations(
            plan.activations,
            device,
            self.executor,
            metrics,
            host_room_bytes=host_room_bytes,
        )

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def host_activation_bytes(self) -> int:
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
        )
        self.settle()

    def detach(self) -> None:
        if self._hooks is not None:
            self._abandon_forward()
            self._hooks.close()
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
        self._ledger.check()
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
        """Nothing is anywhere ([Note: interrupts])."""
        if self._sharing is None:
            self._device.finish()
            self.executor.start_again()
        else:
            self.executor.abandon_forward()

    def _drop_grad(self) -> None:
        """What autograd left in parameters, whose hooks did not come to take it away."""
        for of_layer in self._parameters:
            for parameter in of_layer:
                parameter.grad = None

    def begin_backward(self, *, boundary: bool) -> None:
        self._device.check()
        self._abandon_forward()
        self._adam.refuse_unfrozen()
        self._adopt_edited()
        self._ledger.begin_backward(boundary=boundary)
        self._store.prepare_training()
        self.executor.begin_backward_pass()

    def end_backward(self) -> None:
        self.executor.end_backward_pass()
        if self._hooks is not None:
            self._hooks.end_backward()

    def abandon_backward(self) -> None:
        if self._hooks is not None:
            self._hooks.end_backward()
        if self._sharing is None:
            self.updater.abandon_backward()
            self._start_again()
        elif self.executor.phase is Phase.BACKWARD:  # else all ranks raised, and have abandoned it
            self._sharing.fail("engine.backward raised there")
            self.executor.abandon_backward_pass()
        self.executor.forget_calls()
        self._drop_grad()

    def drop_gradients(self) -> None:
        self._ledger.refuse_dropping()
        self.updater.forget()
        if self._sharing is not None:
            self._sharing.note_dropped()

    def close_gate(self, *, clipping: float, loss_scale: float) -> GateResult:
        self._adopt_edited()
        gate, changed = self.updater.close_gate(
            clipping=clipping, loss_scale=loss_scale, last_fetch=self.executor.last_fetch
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
            self._ledger.refuse_early_read(layers)
        asked = range(len(self._host.layers)) if layers is None else layers
        self.executor.settle(asked)
        if self._sharing is None:  # several ranks fetch together, in the order of all
            self.executor.given_out(asked)
            if self.executor.phase is Phase.IDLE:
                self._adopt_edited()

    def restart(self) -> None:
        self._device.check()
        if self._hooks is not None:
            self._hooks.abandon_forward()
            self._hooks.end_backward()
        self._drop_grad()
        self.updater.restart()
        for layer in range(len(self._host.layers)):
            self.executor.last_fetch(layer).wait()
        self.executor.forget_calls()
        self._start_again()
        self._meet("before a load")

    def _meet(self, operation: str) -> None:
        """Several ranks go on together."""
        if self._sharing is not None:
            self._sharing.meet(operation)

    def loaded(self) -> None:
        if self._sharing is not None:
            self._sharing.spread("after a load")
        self._versions.clear()  # what was written before is gone
        self.executor.weights_changed(range(len(self._host.layers)))

    def _adopt_edited(self) -> None:
        """What was written in place, from outside, where an update on the host would not see it:
        take it over before that. A parameter's version tells. bf16 masters keep their remainders,
        so that weights that come back to what they were are the same masters.
        """
        edited: dict[int, set[int]] = {}
        # Through an alias anything may have been written, but not since an early update.
        silent = self._plan.resident - self._ledger.applied if self._sharing is None else ()
        for layer in self._unseen:
            versions = self._versions_of(layer)
            before = self._versions.setdefault(layer, versions)
            if versions != before:
                self._ledger.refuse_early_write(layer)
                pairs = zip(versions, before, strict=True)
                edited[layer] = {k for k, (now, then) in enumerate(pairs) if now != then}
            elif layer in silent and self.executor.aliased((layer,)):
                self._save(layer)
        if edited and self._sharing is not None:
            self.adopt_weights(edited)
        else:
            for layer, positions in edited.items():
                self._save(layer)
                if self._host.dtype is torch.float16:
                    self._host.restart_master(layer, positions)
        for layer in edited:
            self._versions[layer] = self._versions_of(layer)

    def _versions_of(self, layer: int) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # else those that are hidden take long
            return [parameter._version for parameter in self._parameters[layer]]

    def adopt_weights(self, written: Written | None = None) -> None:
        layers = list(range(len(self._host.layers)) if written is None else written)
        for index in layers:
            self._save(index)
        if self._sharing is not None:
            self._sharing.agree("after new weights")
        for index in layers:
            self._host.restart_master(index, written and written[index])
        self._meet("after new weights")
        self.executor.weights_changed([i for i in layers if i not in self._plan.resident])

    def _save(self, layer: int) -> None:
        """Bring what was written where the layer's parameters point to its arrays."""
        device, state = self._device, self._host.layers[layer]
        if layer in self._plan.resident and not state.on_device:
            slot = self.window.slot_of(layer)
            assert slot is not None
            save = partial(device.copy, state.weights, slot.weights[: state.weights.numel()])
            after = device.record_compute(f"weights {layer} written")
            nbytes = state.weights.numel() * state.weights.element_size()
            device.drain.submit(f"save {layer}", save, (after,), nbytes=nbytes).wait()
        self._host.flush(layer)
