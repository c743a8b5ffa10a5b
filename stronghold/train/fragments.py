"""Answers DeepSpeed's `safe_get_full_*` for a trained parameter: master, moments, gradient.

[Note: DeepSpeed's attributes]
1. `deepspeed.utils.safe_get_full_fp32_param` and the functions beside it look for attributes of the
   parameter. Without them they return None, or do nothing.
2. While an engine lives, `torch.nn.Parameter` has descriptors of these names. They raise
   AttributeError for a parameter that no engine trains.
3. So a parameter has no attributes of ours, and no copy or pickle takes them along. DeepSpeed's own
   engine writes the same names on its parameters, and finds what it wrote.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stronghold.errors import ConfigError
from stronghold.optim.states import items, join_master
from stronghold.train.layer import Layer
from stronghold.train.trainer import Trainer

# Attributes that DeepSpeed looks for, and the method of `Fragment` that answers. The first is the
# `Fragment` itself.
ATTRIBUTES = {
    "_hp_mapping": "",
    "get_full_hp_param": "get",
    "set_full_hp_param": "refuse",
    "get_full_hp_grad": "get_gradient",
    "set_full_hp_grad": "refuse",
}
# Of the trained parameters of all engines, by identity.
_fragments: dict[int, Fragment] = {}


class _Attribute:
    """One of `ATTRIBUTES`. It defines no `__set__`: an attribute of an instance comes first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, parameter: Tensor | None, owner: type) -> Any:
        fragment = _fragments.get(id(parameter))
        if fragment is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        method = ATTRIBUTES[self._name]
        return getattr(fragment, method) if method else fragment


class Fragment:
    """Master, moments and gradient of one parameter: the one at `position` of a layer.

    Tensors that it returns are fp32 copies in the parameter's shape, on the parameter's device.
    Raises ConfigError (a ValueError) for a value that does not exist now, and in another thread
    than the one that trains.
    """

    def __init__(self, trainer: Trainer, layer: Layer, position: int) -> None:
        self._trainer, self._layer, self._position = trainer, layer, position
        self._name = layer.names[position]

    def get(self, optim_state_key: str | None = None) -> Tensor:
        """Return the fp32 master (None), or the moment of this name, decoded. A moment is zeros
        before the first update."""
        layer, position = self._layer, self._position
        assert layer.states is not None
        optimizer = self._trainer.updates.optimizers(layer)[position]
        states, array_of = layer.states.of(optimizer.moments), layer.arrays_of(optimizer)
        self._trainer.settle(layer, f"reading {self._name}")
        if optim_state_key is None:
            low = None if states.low is None else self._array("low")
            return self._whole(join_master(self._array("weights"), low))
        moment = states.moment(optim_state_key)
        if moment is None:
            known = [moment.name for moment in states.moments]
            raise ConfigError(
                f"{self._name}: optimizer state {optim_state_key!r} not found: expected one of "
                f"{known}"
            )
        arrays = {array: self._array(array_of[array]) for array in states.arrays_of(moment)}
        return self._whole(states.decode(moment, arrays))

    def _array(self, array: str) -> Tensor:
        """The parameter's items of one of the layer's arrays, flat."""
        begin = self._layer.element(self._position)
        numel = self._layer.parameters[self._position].numel()
        return self._trainer.arrays.of(self._layer, array)[items(array, begin, begin + numel)]

    def get_gradient(self) -> Tensor:
        """Return the gradient that waits for the step, as DeepSpeed with its loss scale: the sum
        over micro-batches. Zeros if the parameter got none.

        ConfigError if no gradients wait for a step, and within a forward or a backward.
        """
        layer, position = self._layer, self._position
        self._trainer.check_between_passes("reading gradients")
        self._trainer.settle(layer, f"reading the gradient of {self._name}")
        if not self._trainer.is_in_step:
            raise ConfigError(
                f"{self._name}: gradients are only available after engine.backward and before the "
                "engine.step that uses them. The Trainer's on_pre_optimizer_step comes later: let "
                "parameter.register_hook(function), or register_post_accumulate_grad_hook, see "
                "each gradient as it arrives"
            )
        if position not in layer.waiting:
            return self._whole(torch.zeros(layer.parameters[position].numel()))
        layer.gradient_record.wait()
        return self._whole(self._trainer.arrays.gradient(layer, position))

    def refuse(self, *args: object, **kwargs: object) -> None:
        """Raise ConfigError: nothing is written in this way."""
        raise ConfigError(
            f"{self._name}: safe_set_full_* is not supported: change gradients in a hook of "
            "the parameter (parameter.register_hook), and weights in place or by load_state_dict: "
            "masters follow them"
        )

    def _whole(self, flat: Tensor) -> Tensor:
        parameter = self._layer.parameters[self._position]
        copied = flat.to(parameter.device, torch.float32, copy=True)
        return copied.view(parameter.shape)


def attach(trainer: Trainer) -> list[int]:
    """Answer for all trained parameters of a model. Returns what `detach` needs."""
    own = {
        id(layer.parameters[k]): Fragment(trainer, layer, k)
        for layer in trainer.layers
        for k in range(layer.num_trained)
    }
    _fragments.update(own)
    for name in ATTRIBUTES:
        setattr(nn.Parameter, name, _Attribute(name))
    return list(own)


def detach(identities: list[int]) -> None:
    """Answer for these no longer. After the last engine nothing is left on `nn.Parameter`."""
    for identity in identities:
        _fragments.pop(identity, None)
    if not _fragments:
        for name in ATTRIBUTES:
            if name in vars(nn.Parameter):
                delattr(nn.Parameter, name)
