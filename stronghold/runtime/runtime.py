"""The contract between an engine and what trains its model: streamed through a window, or whole.

Owns nothing. `streaming` and `whole` fulfil it; `stack` builds one of them, and the engine and its
checkpoints do not ask which. The training thread alone calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from stronghold.model.partition import Partition
from stronghold.runtime.ledger import GateResult, Ledger

Written = Mapping[int, Collection[int]]
"""Parameters by layer and their positions in it."""


class Runtime(Protocol):
    """One model's passes and updates. Between steps every parameter of the model holds its newest
    value once `settle` has returned.
    """

    @property
    def ledger(self) -> Ledger:
        """What has arrived, and the fences of the layers' arrays."""
        ...

    @property
    def host_activation_bytes(self) -> int:
        """Host memory that holds saved tensors."""
        ...

    @property
    def kept_gradient_bytes(self) -> int:
        """The most bytes of gradients that were ever left in torch's own memory on the device."""
        ...

    # -- life -------------------------------------------------------------------------------------
    def adopted(self, layer: int) -> None:
        """The layer's values are in its arrays: its parameters point there from now on."""
        ...

    def start(self, partition: Partition) -> None:
        """Every layer is adopted: the model may be called."""
        ...

    def detach(self) -> None:
        """The model is about to be given back: take everything off its modules."""
        ...

    def give_back(self) -> None:
        """The lanes have ended: point every parameter at host memory."""
        ...

    def close(self) -> None:
        """Drop every buffer."""
        ...

    # -- the step ---------------------------------------------------------------------------------
    def forward_pass(self) -> AbstractContextManager[None]:
        """Around a call of the model; what leaves it in whatever way leaves nothing open."""
        ...

    def begin_backward(self, *, boundary: bool) -> None:
        """Autograd is about to run on a micro-batch that ends the step (`boundary`) or not.
        ConfigError when no further gradients can be taken.
        """
        ...

    def end_backward(self) -> None:
        """Autograd has returned: every gradient is taken over, and no parameter has one."""
        ...

    def abandon_backward(self) -> None:
        """Autograd, or a step before it changed anything, raised: the step's gradients so far are
        void, and no parameter has one.
        """
        ...

    def drop_gradients(self) -> None:
        """The user throws the step's gradients so far away. ConfigError where weights have taken
        them already.
        """
        ...

    def close_gate(self, *, clipping: float, loss_scale: float) -> GateResult:
        """End the step: wait for the norm, then queue the updates, or nothing on overflow.

        `clipping`: largest global norm, 0 for none. Gradients carry `loss_scale`.
        """
        ...

    # -- between steps ----------------------------------------------------------------------------
    def settle(self, layers: Sequence[int] | None = None) -> None:
        """Wait until the newest weights of these layers, or of all, are where their parameters
        point.
        """
        ...

    def restart(self) -> None:
        """The arrays are about to be written anew: finish what is queued, drop the gradients of a
        step that has not ended, and whatever an exception left half done.
        """
        ...

    def loaded(self) -> None:
        """New values were written to the arrays: after `settle` the parameters show them."""
        ...

    def adopt_weights(self, written: Written | None = None) -> None:
        """New values were written where these parameters, or all, point: make them the arrays'
        values and their masters.
        """
        ...
