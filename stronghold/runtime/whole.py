"""A model that stays whole on the device: nothing stands on its path.

Owns the gradients that autograd left in `.grad`, from the end of a backward to the step. No hooks,
no slots, no copies: parameters are views of the device's arrays for good, and autograd accumulates
as in a plain loop. The training thread alone enters.

States of a gradient: in `.grad` while backward runs -> kept here by reference, `.grad` is None, or
(accumulated) added to fp32 sums -> used by the step. A further backward before the step adds to
what is kept, in the compute dtype. Nothing is updated before the gate, whatever the plan's mode:
a backward that fails changes nothing.

Since nobody is called when a gradient comes, one that comes outside `engine.backward` is found, and
refused, at the next `engine.backward` or `engine.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from stronghold.device.base import Device
from stronghold.errors import ConfigError
from stronghold.memory.host import HostStore
from stronghold.memory.resident import DeviceStore
from stronghold.model.partition import Partition
from stronghold.plan.planner import Gradients, Plan
from stronghold.runtime.adam import AdamSteps
from stronghold.runtime.binding import Bindings
from stronghold.runtime.device_updates import DeviceUpdates, GradientsOfLayers, addresses
from stronghold.runtime.ledger import GateResult, Ledger, norm_and_scale, open_gate
from stronghold.runtime.runtime import Written
from stronghold.telemetry.metrics import Metrics


class Whole:
    """A `Runtime`. `store` has the arrays of every layer; `parameters[i]` are the parameters of
    layer i in the layout's order.
    """

    host_activation_bytes = 0  # autograd keeps what it saves

    def __init__(
        self,
        *,
        device: Device,
        host: HostStore,
        store: DeviceStore,
        plan: Plan,
        parameters: Sequence[Sequence[nn.Parameter]],
        adam: AdamSteps,
        metrics: Metrics,
    ) -> None:
        self._device = device
        self._host = host
        self._store = store
        self._accumulates = plan.gradients is Gradients.ACCUMULATED
        self._gated = plan.gradients is not Gradients.RING
        self._parameters = parameters
        self._adam = adam
        self._bindings = Bindings(host.layers, parameters)
        self._ledger = Ledger(host.layout.layers, Gradients.HELD)  # nothing is updated early
        self._updates = DeviceUpdates(
            device=device,
            states=host.layers,
            parameters=parameters,
            adam=adam,
            ledger=self._ledger,
            metrics=metrics,
        )
        self._kept: dict[int, dict[int, torch.Tensor]] = {}  # by layer and position
        self.kept_gradient_bytes = 0

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    # -- life -------------------------------------------------------------------------------------
    def adopted(self, layer: int) -> None:
        self._bindings.rest(layer)

    def start(self, partition: Partition) -> None:
        """Nothing to do: the model is what it was, on the device."""

    def detach(self) -> None:
        """Nothing to do: there is nothing on the model's modules."""

    def give_back(self) -> None:
        self._drop_gradients()
        self._bindings.rest_all()

    def close(self) -> None:
        """It has no buffers of its own."""

    # -- the step ---------------------------------------------------------------------------------
    def forward_pass(self) -> AbstractContextManager[None]:
        self._device.check()
        self._ledger.check()
        return nullcontext()

    def begin_backward(self, *, boundary: bool) -> None:
        self._device.check()
        self._adam.refuse_unfrozen()
        for layer in range(len(self._parameters)):
            self._bindings.check(layer)
        self._ledger.begin_backward(boundary=boundary)
        self._refuse_strays()
        self._host.prepare_training()
        self._store.prepare_training()

    def end_backward(self) -> None:
        taken: dict[int, dict[int, torch.Tensor]] = {}
        nbytes = sum(g.nbytes for of_layer in self._kept.values() for g in of_layer.values())
        for layer, k, parameter in self._with_gradient():
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            nbytes += gradient.nbytes
            if self._adam.trains(parameter):
                # Sparse, or laid out as nobody asked: the kernels take neither.
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                taken.setdefault(layer, {})[k] = dense.contiguous()
        self.kept_gradient_bytes = max(self.kept_gradient_bytes, nbytes)
        repeated = {layer: self._ledger.arrive(layer, frozenset(taken[layer])) for layer in taken}
        if not self._accumulates:
            self._keep(taken)
        elif taken:
            found = {
                layer: {k: gradient.data_ptr() for k, gradient in of_layer.items()}
                for layer, of_layer in taken.items()
            }
            self._updates.accumulate(found, self._host.dtype, repeated)

    def _keep(self, taken: dict[int, dict[int, torch.Tensor]]) -> None:
        for layer, of_layer in taken.items():
            kept = self._kept.setdefault(layer, {})
            for k, gradient in of_layer.items():
                if k in kept:
                    kept[k].add_(gradient)
                else:
                    kept[k] = gradient

    def abandon_backward(self) -> None:
        self._ledger.abandon_backward()
        self._drop_gradients()

    def drop_gradients(self) -> None:
        self._drop_gradients()

    def close_gate(self, *, clipping: float, loss_scale: float) -> GateResult:
        self._refuse_strays()
        self._ledger.check()
        with self._ledger.changing("engine.step"):
            return self._close(clipping, loss_scale)

    def _close(self, clipping: float, loss_scale: float) -> GateResult:
        gradients, dtype = self._waiting()
        read: Callable[[], list[float]] = list
        prepared = None
        if gradients:
            read = self._device.read_later(self._updates.square_sums(gradients, dtype))
            prepared = self._updates.prepare(gradients, dtype)
        if self._gated or clipping > 0.0:  # the one wait of the training thread for backward
            gate, scale = open_gate(
                read(), clipping=clipping, loss_scale=loss_scale, early=not self._gated
            )
        else:
            gate = GateResult(grad_norm=_norm(read, loss_scale), overflow=False)
            scale = 1.0 / loss_scale
        if prepared is not None and gate.overflow:
            self._updates.cancel(prepared)
        elif prepared is not None:
            self._updates.apply(prepared, scale)
        self._kept.clear()
        self._ledger.forget()
        return gate

    def _waiting(self) -> tuple[GradientsOfLayers, torch.dtype]:
        if not self._accumulates:
            found = {
                layer: {k: of_layer[k].data_ptr() for k in sorted(of_layer)}
                for layer, of_layer in self._kept.items()
            }
            return found, self._host.dtype
        sums: dict[int, dict[int, int]] = {}
        for layer, arrived in enumerate(self._ledger.arrived):
            state = self._host.layers[layer]
            if arrived and state.accumulated is not None:
                sums[layer] = addresses(state.accumulated, state, arrived)
        return sums, torch.float32

    def _with_gradient(self) -> Iterator[tuple[int, int, nn.Parameter]]:
        for layer, of_layer in enumerate(self._parameters):
            for k, parameter in enumerate(of_layer):
                if parameter.grad is not None:
                    yield layer, k, parameter

    def _refuse_strays(self) -> None:
        """ConfigError for gradients that came outside engine.backward; they are dropped."""
        strays = []
        for layer, k, parameter in self._with_gradient():
            parameter.grad = None
            if self._adam.trains(parameter):
                strays.append(self._host.layers[layer].layout.slices[k].name)
        if strays:
            raise ConfigError(
                f"gradient of {strays[0]} outside engine.backward: "
                "call engine.backward(loss), not loss.backward(); where another engine's backward "
                "runs through this model, freeze it meanwhile: model.requires_grad_(False)"
            )

    def _drop_gradients(self) -> None:
        for _, _, parameter in self._with_gradient():
            parameter.grad = None
        self._kept.clear()
        self._ledger.forget()

    # -- between steps ----------------------------------------------------------------------------
    def settle(self, layers: Sequence[int] | None = None) -> None:
        self._device.check()
        for layer in range(len(self._parameters)) if layers is None else layers:
            self._ledger.updated(layer).wait()

    def restart(self) -> None:
        self._device.check()
        self._ledger.restart()
        self._drop_gradients()
        for layer, state in enumerate(self._host.layers):
            self._bindings.point(layer, state.weights)

    def loaded(self) -> None:
        """Nothing to do: parameters are the arrays."""

    def adopt_weights(self, written: Written | None = None) -> None:
        for layer in range(len(self._parameters)) if written is None else written:
            self._host.restart_master(layer, written and written[layer])


def _norm(read: Callable[[], list[float]], loss_scale: float) -> Callable[[], float]:
    """The global norm, when somebody asks."""
    return lambda: norm_and_scale(read(), clipping=0.0, loss_scale=loss_scale)[0]
