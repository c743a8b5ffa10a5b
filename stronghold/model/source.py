"""Where the values of a model's meta parameters come from.

Owns the register of models that were built without values. It holds no model alive. Only the
training thread enters.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import nn


class WeightSource(Protocol):
    """Values by parameter: names change when a model is wrapped."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether it knows the parameter's values."""

    def read_into(self, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Fill contiguous CPU memory of the parameter's shape, cast to the target's dtype."""


_SOURCES: weakref.WeakKeyDictionary[nn.Module, WeightSource] = weakref.WeakKeyDictionary()


def set_source(model: nn.Module, source: WeightSource) -> None:
    """`stronghold.initialize` will fill the model's meta parameters from `source`."""
    _SOURCES[model] = source


def source_of(model: nn.Module) -> WeightSource | None:
    """The source of the model, or of the one that it wraps; None for a model that has its
    values.
    """
    return next((_SOURCES[module] for module in model.modules() if module in _SOURCES), None)


def forget_source(model: nn.Module) -> None:
    """The model has its values now."""
    for module in model.modules():
        _SOURCES.pop(module, None)


def materialize(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a meta parameter `values`: it stays the same object to everyone who holds it.

    `.data` cannot cross from the meta device; what the object wraps is exchanged instead.
    """
    real = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)
