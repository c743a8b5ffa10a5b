"""What an engine asks of whatever trains its model: streamed through a window, or whole.

Owns what both have: the account of the step, and its updates. `streaming` and `whole` fulfil the
rest; the engine and its checkpoints do not ask which. The training thread alone calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.memory.window import Window
from stronghold.model.partition import Partition
from stronghold.plan.plan import Plan
from stronghold.plan.schedule import Position
from stronghold.runtime.ledger import GateResult, Ledger
from stronghold.runtime.parts import Parts
from stronghold.runtime.update import Updates

Written = Mapping[int, Collection[int]]
"""Parameters by layer and their positions in it."""


class Runtime(ABC):
    """One model's passes and updates by `plan`. Between steps every parameter of the model holds
    its newest value once `settle` has returned.
    """

    host_activation_bytes = 0  # host memory that holds saved tensors
    # The most bytes of gradients that were ever left in torch's own memory on the device.
    kept_gradient_bytes = 0

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        *,
        window: Window | None = None,
    ) -> None:
        self._device, self._host, self._store = parts.device, parts.host, parts.store
        self._parameters, self._adam = parts.parameters, parts.adam
        self._team = parts.team
        self._plan = plan
        early = any(at is not Position.GATE for at in plan.updates.values())
        self.ledger = Ledger(parts.layers, early=early)
        self.updates = Updates(parts, self.ledger, plan, window)

    # -- what lies in .grad -----------------------------------------------------------------------
    def _with_gradient(self) -> list[tuple[int, int, nn.Parameter]]:
        with torch._C.DisableTorchFunctionSubclass():  # hidden parameters need not be shown
            return [
                (layer, k, parameter)
                for layer, of_layer in enumerate(self._parameters)
                for k, parameter in enumerate(of_layer)
                if parameter.grad is not None
            ]

    def _refuse_strays(self) -> None:
        """ConfigError for gradients that nobody has taken over; they are dropped."""
        strays = []
        for layer, k, parameter in self._with_gradient():
            parameter.grad = None
            if self._adam.trains(parameter):
                strays.append(self._host.layers[layer].layout.slices[k].name)
        if strays:
            raise ConfigError(
                f"{strays[0]}.grad was set by hand, or by a backward of outputs that the engine "
                "has not made: call the engine, not its module, or engine.backward(loss); a "
                "gradient of your own takes deepspeed.utils.safe_set_full_grad after backward"
            )

    # -- life -------------------------------------------------------------------------------------
    @abstractmethod
    def adopted(self, layer: int) -> None:
        """The layer's values are in its arrays: its parameters point there from now on."""

    @abstractmethod
    def start(self, partition: Partition) -> None:
        """Every layer is adopted: the model may be called."""

    @abstractmethod
    def detach(self) -> None:
        """The model is about to be given back: take everything off its modules."""

    @abstractmethod
    def give_back(self) -> None:
        """The lanes have ended: point every parameter at host memory."""

    @abstractmethod
    def close(self) -> None:
        """Drop every buffer."""

    # -- the step ---------------------------------------------------------------------------------
    @abstractmethod
    def forward_pass(self) -> AbstractContextManager[None]:
        """Around a call of the model; what leaves it in whatever way leaves nothing open."""

    @abstractmethod
    def begin_backward(self, *, boundary: bool) -> None:
        """Autograd is about to run on a micro-batch that ends the step (`boundary`) or not.
        ConfigError when no further gradients can be taken.
        """

    @abstractmethod
    def end_backward(self) -> None:
        """Autograd has returned: every gradient is taken over, and no parameter has one."""

    @abstractmethod
    def abandon_backward(self) -> None:
        """Autograd, or a step before it changed anything, raised: the step's gradients so far are
        void, and no parameter has one.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """The user throws the step's gradients so far away. ConfigError where weights have taken
        them already.
        """

    @abstractmethod
    def close_gate(self, *, clipping: float, loss_scale: float, skips: bool) -> GateResult:
        """End the step: wait for the norm, then queue the updates, or nothing where it is not
        finite and a step is skipped then (`skips`).

        `clipping`: largest global norm, 0 for none. Gradients carry `loss_scale`.
        """

    # -- between steps ----------------------------------------------------------------------------
    @abstractmethod
    def settle(self, layers: Sequence[int] | None = None) -> None:
        """Wait until the newest weights of these layers, or of all, are where their parameters
        point.
        """

    @abstractmethod
    def restart(self) -> None:
        """The arrays are about to be written anew: finish what is queued, drop the gradients of a
        step that has not ended, and whatever an exception left half done.
        """

    @abstractmethod
    def loaded(self, layers: Sequence[int] | None = None) -> None:
        """New values were written to the arrays of these layers, or of all: after `settle` the
        parameters show them."""

    @abstractmethod
    def adopt_weights(self, written: Written | None = None) -> None:
        """New values were written where these parameters, or all, point: make them the arrays'
        values and their masters.
        """
