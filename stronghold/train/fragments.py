"""What an engine holds of a trained parameter: master, moments, gradient. Calls of a program that
mean these find them: DeepSpeed's `safe_get_full_*`, torch's `zero_grad` and `clip_grad_norm_`.

[Note: DeepSpeed's attributes]
1. `deepspeed.utils.safe_get_full_fp32_param` and the functions beside it look for attributes of the
   parameter. Without them they return None, or do nothing.
2. While an engine lives, `torch.nn.Parameter` has descriptors of these names. They raise
   AttributeError for a parameter that no engine trains.
3. So a parameter has no attributes of ours, and no copy or pickle takes them along. DeepSpeed's own
   engine writes the same names on its parameters, and finds what it wrote.

[Note: torch's calls]
1. Between backward and step no parameter has a `grad`. So torch's calls would change nothing.
2. `zero_grad` drops the gradients that wait of just its parameters. A later norm is without them.
3. `clip_grad_norm_` finds no gradient. It calls `_clip_grads_with_norm_`, also where a program has
   it under another name. So that function is replaced. It refuses another norm than the config's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from stronghold.errors import ConfigError
from stronghold.optim.states import items, join_master
from stronghold.private import Replacements
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
_replacements = Replacements()


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
    than the one that trains. With several ranks each of them makes the same calls.

    clipping  largest norm of the engine's step, 0 for none
    """

    def __init__(self, trainer: Trainer, layer: Layer, position: int, *, clipping: float) -> None:
        self._trainer, self._layer, self._position = trainer, layer, position
        self.clipping = clipping
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
            low = None if states.low is None else "low"
            return self._whole(
                lambda: join_master(
                    self._array("weights"), None if low is None else self._array(low)
                )
            )
        moment = states.moment(optim_state_key)
        if moment is None:
            known = [moment.name for moment in states.moments]
            raise ConfigError(
                f"{self._name}: optimizer state {optim_state_key!r} not found: expected one of "
                f"{known}"
            )
        names = {array: array_of[array] for array in states.arrays_of(moment)}
        return self._whole(
            lambda: states.decode(moment, {own: self._array(name) for own, name in names.items()})
        )

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
        return self._shown(self._trainer.gradient(layer, position))

    def drop_gradient(self) -> None:
        """Drop the gradient that waits for the step."""
        self._trainer.drop_gradient(self._layer, self._position)

    def refuse(self, *args: object, **kwargs: object) -> None:
        """Raise ConfigError: nothing is written in this way."""
        raise ConfigError(
            f"{self._name}: safe_set_full_* is not supported: change gradients in a hook of "
            "the parameter (parameter.register_hook), and weights in place or by load_state_dict: "
            "masters follow them"
        )

    def _whole(self, read: Callable[[], Tensor]) -> Tensor:
        numel = self._layer.parameters[self._position].numel()
        return self._shown(self._trainer.of_owner(self._layer, numel, read))

    def _shown(self, flat: Tensor) -> Tensor:
        at_rest = self._trainer.arrays.at_rest(self._layer)[self._position]
        return flat.to(at_rest.device, torch.float32, copy=True).view(at_rest.shape)


def _of(parameters: Iterable[Tensor]) -> list[Fragment]:
    return [f for parameter in parameters if (f := _fragments.get(id(parameter))) is not None]


def _zero_grad(original: Callable[..., None], owner: Any, *args: Any, **kwargs: Any) -> None:
    """`zero_grad` of a module or of torch's optimizers ([Note: torch's calls])."""
    original(owner, *args, **kwargs)
    groups = (
        [{"params": owner.parameters()}] if isinstance(owner, nn.Module) else owner.param_groups
    )
    for fragment in _of(parameter for group in groups for parameter in group["params"]):
        fragment.drop_gradient()


def _clip(
    original: Callable[..., None], parameters: Any, max_norm: float, *args: Any, **kwargs: Any
) -> None:
    """The function that scales gradients in `clip_grad_norm_` ([Note: torch's calls])."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for clipping in {fragment.clipping for fragment in _of(listed)}:
        check_clipping(clipping, max_norm)
    original(listed, max_norm, *args, **kwargs)


def check_clipping(configured: float, max_norm: float) -> None:
    """Warn of a program's own clipping, which clips nothing. ConfigError for a finite norm that is
    not the config's. Accelerate calls it after backward, in which it has called the step."""
    if math.isfinite(max_norm) and max_norm != configured:
        raise ConfigError(
            f"clip_grad_norm_ by hand to {max_norm}: gradients have left the model, and the "
            "engine clips them in step, to the config's gradient_clipping: got "
            f'{configured}. Set "gradient_clipping": {max_norm}, and leave the call out'
        )
    warnings.warn(
        "clip_grad_norm_ by hand finds no gradient, and returns 0: the engine clips in step; "
        "engine.get_global_grad_norm() is the norm afterwards",
        stacklevel=6,
    )


def attach(trainer: Trainer, *, clipping: float) -> list[int]:
    """Answer for all trained parameters of a model. Returns what `detach` needs."""
    own = {
        id(layer.parameters[k]): Fragment(trainer, layer, k, clipping=clipping)
        for layer in trainer.layers
        for k in range(layer.num_trained)
    }
    _fragments.update(own)
    for name in ATTRIBUTES:
        setattr(nn.Parameter, name, _Attribute(name))
    for owner in (nn.Module, torch.optim.Optimizer):
        _replacements.wrap(owner, "zero_grad", _zero_grad)
    if hasattr(clip_grad, "_clip_grads_with_norm_"):  # private: a later torch may lack it
        _replacements.wrap(clip_grad, "_clip_grads_with_norm_", _clip)
    return list(own)


def detach(identities: list[int]) -> None:
    """Answer for these no longer. After the last engine torch is as it was."""
    for identity in identities:
        _fragments.pop(identity, None)
    if not _fragments:
        for name in ATTRIBUTES:
            if name in vars(nn.Parameter):
                delattr(nn.Parameter, name)
        _replacements.undo()
