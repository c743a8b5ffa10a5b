"""Answers DeepSpeed's `safe_get_full_*` for a trained parameter.

Reads its master, moments and gradient, wherever they lie. Owns no bytes. It waits for the layer's
lanes before it reads an array, so that there is no race with an operation. The training thread
alone enters. With several ranks, all call together, as for DeepSpeed's own functions.

As in DeepSpeed, a gradient is the mean over ranks and carries the loss scale. Its values are those
that wait for the step: fp32 sums under accumulation, else of the compute dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.optim.contract import Moment
from stronghold.optim.states import States
from stronghold.streaming.patches.parameters import Access
from stronghold.streaming.pending_gradients import PendingGradients

if TYPE_CHECKING:
    from stronghold.streaming.stack import Stack


def fragments(stack: Stack) -> dict[torch.Tensor, Fragment]:
    """Return one `Fragment` for each parameter that the optimizer of `stack` owns."""
    return {
        state.parameters[k]: Fragment(stack, state, k)
        for state in stack.host.layers
        for k in state.optimizer.trained
    }


class Fragment(Access):
    """Master, moments and gradient of one parameter: the one at `position` of a layer.

    Tensors that it returns are fp32 copies in the parameter's shape, on the parameter's device.
    Raises ConfigError (a ValueError) for a value that does not exist now.
    """

    __slots__ = ("_part", "_position", "_stack", "_state")

    def __init__(self, stack: Stack, state: LayerState, position: int) -> None:
        self._stack = stack
        self._state = state
        self._position = position
        self._part = state.layout.slices[position]

    @property
    def _states(self) -> States:
        return self._state.formats[self._part.format].trained

    # -- masters and moments ----------------------------------------------------------------------
    def get(self, optim_state_key: str | None = None) -> torch.Tensor:
        """Return the fp32 master (None), or the moment of this name, decoded. A moment is zeros
        before the first update."""
        index, host, part = self._state.index, self._stack.host, self._part
        self._stack.settle((index,))
        if optim_state_key is None:
            return self._whole(host.access.master(index, part).view(-1))
        moment = self._moment(optim_state_key)
        states = self._states
        arrays = states.arrays_of(moment)
        begin, end = part.offset, part.offset + part.numel
        flat = torch.zeros(part.numel)
        if host.access.has(index, arrays[-1]):
            for elements, views in host.access.pieces(index, arrays, begin, end):
                flat[elements] = states.decode(moment, views)
        return self._whole(flat)

    def _moment(self, key: str) -> Moment:
        states = self._states
        moment = states.moment(key)
        if moment is None:
            names = [known.name for known in states.moments]
            raise ConfigError(
                f"{self._part.name}: optimizer state {key!r} not found: expected one of {names}"
            )
        return moment

    # -- gradients --------------------------------------------------------------------------------
    def get_gradient(self) -> torch.Tensor:
        """Return the gradient that waits for the step. Zeros if the parameter got none.

        Raises ConfigError if no gradients wait for a step.
        """
        pending, state, position = (self._pending_gradients(), self._state, self._position)
        flat = torch.zeros(self._part.numel)
        if position in state.gradients.arrived:
            for elements, gradient in pending.pieces(state, position):
                flat[elements] = gradient
        return self._whole(flat)

    def _pending_gradients(self) -> PendingGradients:
        """Return the owner of gradients that wait for the step. ConfigError if none wait."""
        stack, name = self._stack, self._part.name
        stack.check_process("reading gradients")
        if not stack.runtime.ledger.is_in_step:
            raise ConfigError(
                f"{name}: gradients are only available after engine.backward and before the "
                "engine.step that uses them. The Trainer's on_pre_optimizer_step comes later: let "
                "parameter.register_hook(function), or register_post_accumulate_grad_hook, see "
                "each gradient as it arrives"
            )
        stack.device.check()
        return stack.runtime.step.pending

    # -- values -----------------------------------------------------------------------------------
    def refuse(self, *args: object, **kwargs: object) -> None:
        """Raise ConfigError: nothing is written in this way."""
        raise ConfigError(
            f"{self._part.name}: safe_set_full_* is not supported: change gradients in a hook of "
            "the parameter (parameter.register_hook), and weights in place or by load_state_dict: "
            "masters follow them"
        )

    def _whole(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's values. `flat` has this rank's elements, and zeros for others."""
        stack, part = self._stack, self._part
        stack.ranks.complete(flat, f"reading {part.name}")
        device = self._state.parameters[self._position].device
        return flat.view(part.shape).to(device)
