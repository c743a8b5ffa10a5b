"""A model that is streamed: layers take turns in the window's slots.

Owns the parts of it: window, update lane, executor, activations and hooks, and the order in which
an event of the step reaches them. Each part's own file says what it does. The training thread alone
calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

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
from stronghold.runtime.executor import Executor
from stronghold.runtime.hooks import Hooks
from stronghold.runtime.ledger import GateResult, Ledger
from stronghold.runtime.ranks.sharing import Sharing
from stronghold.runtime.residents import Residents
from stronghold.runtime.updater import Updater
from stronghold.telemetry.metrics import Metrics


class Streaming:
    """A `Runtime`. `store` has the arrays of the layers that are updated on the device, `host`
    those of the others. `parameters[i]` are the parameters of layer i in the layout's order;
    `kernels` run on the update lane.
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
    ) -> None:
        self._sharing = sharing
        self._device = device
        self._host = host
        self._store = store
        self._plan = plan
        self._adam = adam
        self._hooks: Hooks | None = None
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
        self.activations = Activations(plan.activations, device, self.executor, metrics)

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
            self._hooks.close()

    def give_back(self) -> None:
        self.executor.rest_all()

    def close(self) -> None:
        self.activations.close()
        self.window.close()

    # -- the step ---------------------------------------------------------------------------------
    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        self._abandon_forward()  # of a call of the module itself, which nobody saw end
        try:
            yield
        except BaseException:
            self._abandon_forward()
            raise

    def _abandon_forward(self) -> None:
        if self._hooks is not None:
            self._hooks.abandon_forward()

    def begin_backward(self, *, boundary: bool) -> None:
        self._device.check()  # what failed before explains what is refused now
        self._adam.refuse_unfrozen()
        self._ledger.begin_backward(boundary=boundary)
        self._store.prepare_training()
        self.executor.begin_backward_pass()

    def end_backward(self) -> None:
        self.executor.end_backward_pass()
        self.activations.end_backward()
        if self._hooks is not None:
            self._hooks.end_backward()

    def abandon_backward(self) -> None:
        if self._sharing is not None:
            self._sharing.fail("engine.backward raised there")
        self.executor.abandon_backward_pass()
        if self._hooks is not None:
            self._hooks.end_backward()

    def close_gate(self, *, clipping: float, inverse_scale: float) -> GateResult:
        gate, changed = self.updater.close_gate(
            clipping=clipping, inverse_scale=inverse_scale, last_fetch=self.executor.last_fetch
        )
        self.executor.weights_changed(changed)
        return gate

    # -- between steps ----------------------------------------------------------------------------
    def settle(self, layers: Sequence[int] | None = None) -> None:
        self.executor.settle(range(len(self._host.layers)) if layers is None else layers)

    def restart(self) -> None:
        self.updater.restart()
        for layer in range(len(self._host.layers)):
            self.executor.last_fetch(layer).wait()
        self._meet("before a load")

    def _meet(self, operation: str) -> None:
        """Several ranks go on together."""
        if self._sharing is not None:
            self._sharing.meet(operation)

    def loaded(self) -> None:
        if self._sharing is not None:
            self._sharing.spread("after a load")
        self.executor.weights_changed(range(len(self._host.layers)))

    def adopt_weights(self, layers: Sequence[int] | None = None) -> None:
        device = self._device
        written = range(len(self._host.layers)) if layers is None else layers
        for index in written:
            state = self._host.layers[index]
            if index in self._plan.resident and not state.on_device:
                slot = self.window.slot_of(index)
                assert slot is not None
                save = partial(device.copy, state.weights, slot.weights[: state.weights.numel()])
                after = device.record_compute(f"weights {index} written")
                nbytes = state.weights.numel() * state.weights.element_size()
                device.drain.submit(f"save {index}", save, (after,), nbytes=nbytes).wait()
            self._host.flush(index)
        if self._sharing is not None:
            self._sharing.agree("after new weights")
        for index in written:
            self._host.restart_master(index)
        self._meet("after new weights")
        self.executor.weights_changed([i for i in written if i not in self._plan.resident])
