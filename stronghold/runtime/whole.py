"""A model that stays whole on the device: nothing stands on its path.

Owns what is particular to it: no hooks, no slots, no copies. Parameters are views of the device's
arrays for good, and autograd accumulates as in a plain loop; when a backward has ended its
gradients are taken out of `.grad`, and wait for the step where they are. The training thread alone
enters.

Since nobody is called when a gradient comes, one of outputs that the engine did not make is found,
and refused, at the next backward or `engine.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from stronghold.model.partition import Partition
from stronghold.plan.plan import Plan
from stronghold.runtime.binding import Bindings
from stronghold.runtime.ledger import GateResult
from stronghold.runtime.parts import Parts
from stronghold.runtime.runtime import Runtime, Written
from stronghold.runtime.update import Gathered


class Whole(Runtime):
    """`store` of `parts` has the arrays of every layer."""

    def __init__(self, parts: Parts, plan: Plan) -> None:
        super().__init__(parts, plan)
        self._bindings = Bindings(parts.layers, parts.parameters)
        self._outside = parts.outside

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
        self.ledger.check()
        return nullcontext()

    def begin_backward(self, *, boundary: bool) -> None:
        self._device.check()
        self._adam.refuse_unfrozen()
        for layer in range(len(self._parameters)):
            self._bindings.check(layer)
        self.ledger.begin_backward(boundary=boundary)
        self._refuse_strays()
        self._host.prepare_training()
        self._store.prepare_training()

    def end_backward(self) -> None:
        taken: dict[int, dict[int, torch.Tensor]] = {}
        nbytes = sum(g.nbytes for state in self._host.layers for g in state.kept.values())
        for layer, k, parameter in self._with_gradient():
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            nbytes += gradient.nbytes
            if self._adam.trains(parameter):
                # Sparse, or laid out as nobody asked: the kernels take neither.
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                dense = self._outside.scaled(dense)
                taken.setdefault(layer, {})[k] = dense.contiguous()
        self.kept_gradient_bytes = max(self.kept_gradient_bytes, nbytes)
        batch = [
            Gathered(
                state=self._host.layers[layer],
                arrived=frozenset(each),
                dtype=self._host.dtype,
                each=each,
            )
            for layer, each in taken.items()
        ]
        if self._plan.accumulates and batch:
            arrive = self.ledger.arrive
            repeated = {found.state.index: arrive(found.state, found.arrived) for found in batch}
            self.updates.accumulate(batch, repeated)
        for found in batch if not self._plan.accumulates else ():
            self.updates.gathered(found)

    def abandon_backward(self) -> None:
        self.ledger.abandon_backward()
        self._drop_gradients()

    def drop_gradients(self) -> None:
        self._drop_gradients()

    def close_gate(self, *, clipping: float, loss_scale: float, skips: bool) -> GateResult:
        self._refuse_strays()
        return self.updates.close_gate(
            clipping=clipping, loss_scale=loss_scale, skips=skips and self._plan.gated
        )[0]

    def _drop_gradients(self) -> None:
        for _, _, parameter in self._with_gradient():
            parameter.grad = None
        self.updates.forget()

    # -- between steps ----------------------------------------------------------------------------
    def settle(self, layers: Sequence[int] | None = None) -> None:
        self._device.check()
        for layer in range(len(self._parameters)) if layers is None else layers:
            self._host.layers[layer].wait()

    def restart(self) -> None:
        self._device.check()
        self.updates.restart()
        self._drop_gradients()
        for layer, state in enumerate(self._host.layers):
            self._bindings.point(layer, state.weights)

    def loaded(self, layers: Sequence[int] | None = None) -> None:
        """Parameters are the arrays; a graph that needs what they were is refused by autograd."""
        chosen = range(len(self._parameters)) if layers is None else layers
        torch.autograd.graph.increment_version([p for i in chosen for p in self._parameters[i]])

    def adopt_weights(self, written: Written | None = None) -> None:
        for layer in range(len(self._parameters)) if written is None else written:
            self._host.restart_master(layer, written and written[layer])
