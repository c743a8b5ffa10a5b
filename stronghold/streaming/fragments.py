"""What DeepSpeed's `safe_get_*` and `safe_set_*` find on a trained parameter: its master, moments
and gradient, read and written wherever they lie.

Owns no bytes. Reads and writes between the operations that use the arrays, and never beside them:
it waits for the layer's lanes first. The training thread alone enters; of several ranks all call
together, as for DeepSpeed's own, and each writes its own elements.

As in DeepSpeed a gradient is the mean over ranks and carries the loss scale; it has the dtype in
which it waits for the step (the sums' fp32 under accumulation, else the compute dtype), and a value
that is written is rounded to that. Unlike DeepSpeed's, a master that is written shows in the
parameter at once. The local functions are for ZeRO-3's partitions, of which one rank has one: the
whole, flat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.memory.layer import LayerState
from stronghold.optim.contract import Moment
from stronghold.optim.states import States
from stronghold.streaming.optimizer_step import OptimizerStep
from stronghold.streaming.patches.parameters import Access

if TYPE_CHECKING:
    from stronghold.streaming.stack import Stack


def fragments(stack: Stack) -> dict[nn.Parameter, Fragment]:
    """One for each parameter that the optimizer of `stack` owns."""
    return {
        state.parameters[k]: Fragment(stack, state, k)
        for state in stack.host.layers
        for k in state.optimizer.trained
    }


class Fragment(Access):
    """Of parameter `position` of a layer. Tensors that it gives are fp32 copies in the parameter's
    shape, on the parameter's device; ConfigError (a ValueError) says what cannot be had now."""

    __slots__ = ("_part", "_position", "_stack", "_state")

    def __init__(self, stack: Stack, state: LayerState, position: int) -> None:
        self._stack = stack
        self._state = state
        self._position = position
        self._part = state.layout.slices[position]

    @property
    def _states(self) -> States:
        return self._state.formats[self._part.format].trained

    def local(self) -> Fragment:
        self._stack.ranks.refuse_local(self._part.name)
        return self

    # -- masters and moments ----------------------------------------------------------------------
    def get(self, optim_state_key: str | None = None) -> torch.Tensor:
        """The fp32 master, or a moment, decoded: zeros before the first update."""
        index, host, part = self._state.index, self._stack.host, self._part
        self._stack.settle((index,))
        if optim_state_key is None:
            return self._whole(host.access.master(index, part).view(-1))
        moment = self._moment(optim_state_key)
        states = self._states
        arrays = states.arrays_of(moment)
        at, flat = part.offset, torch.zeros(part.numel)
        if host.access.has(index, arrays[-1]):
            for own, found in host.access.pieces(index, arrays, at, at + part.numel):
                flat[own] = states.decode(moment, found)
        return self._whole(flat)

    def set(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        """Write the master, and the weights rounded from it, or a moment."""
        flat, stack, index = self._flat(value), self._stack, self._state.index
        stack.check_here("safe_set_*")
        moment = None if optim_state_key is None else self._moment(optim_state_key)
        stack.settle((index,))
        stack.prepare_training()
        self._state.wait_unused()
        part = self._part
        if moment is None:
            stack.host.access.write_master(index, part, 0, flat)
            stack.runtime.loaded((index,))
            stack.settle((index,))
            return
        at, states = part.offset, self._states
        for own, found in stack.host.access.pieces(
            index, states.arrays_of(moment), at, at + part.numel, mode="replace"
        ):
            for array, values in states.encode(moment, flat[own]).items():
                found[array].copy_(values)

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
        """The gradient that waits for the step; zeros where none came. ConfigError when no step's
        gradients are there."""
        updates, state, flat = self._optimizer_step(), self._state, torch.zeros(self._part.numel)
        if self._position in state.gradients.arrived:
            for own, found in updates.gradient_pieces(state, self._position):
                flat[own] = found
        return self._whole(flat)

    def set_gradient(self, value: torch.Tensor) -> None:
        """Write it, before the gate: norm, clipping and update are those of the new value."""
        flat, updates, state = self._flat(value), self._optimizer_step(), self._state
        k = self._position
        if k not in state.gradients.arrived:
            if flat.count_nonzero():
                raise ConfigError(
                    f"{self._part.name}: it got no gradient in this backward, and none can be "
                    "given to it: let the loss depend on it (add 0.0 * parameter.sum())"
                )
            return
        updates.cancel_early((state.index,))
        for own, there in updates.gradient_pieces(state, k, mode="replace"):
            there.copy_(flat[own])
        state.gradients.square_sums.pop(k, None)  # taken again at the gate

    def _optimizer_step(self) -> OptimizerStep:
        """What has the gradient that waits for the step. ConfigError where none does."""
        stack, name = self._stack, self._part.name
        stack.check_process("reading gradients")
        if not stack.runtime.ledger.is_in_step:
            raise ConfigError(
                f"{name}: gradients are only available after engine.backward and before the "
                "engine.step that uses them"
            )
        stack.device.check()
        return stack.runtime.step

    # -- values -----------------------------------------------------------------------------------
    def _flat(self, value: torch.Tensor) -> torch.Tensor:
        part = self._part
        if value.numel() != part.numel:
            raise ConfigError(
                f"{part.name}: got a value of {value.numel()} elements, expected {part.numel}"
            )
        return value.detach().reshape(-1).to("cpu", torch.float32)

    def _whole(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's values from those that this rank has, and zeros."""
        stack, part = self._stack, self._part
        stack.ranks.complete(flat, f"reading {part.name}")
        device = self._state.parameters[self._position].device
        return flat.view(part.shape).to(device)
