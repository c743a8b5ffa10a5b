"""Key-value caches of Transformers' models: none is made while gradients are wanted.

Owns the hooks on the model's modules that make its caches. Entered by the training thread, and by
autograd's in backward.

[Note: no cache in training] Transformers' models make a key-value cache in every forward unless
they are told not to, and training never reads it. Keys and values joined to a cache lie in memory
differently, so that other kernels multiply them and other bits come out; and a block that
runs twice (recomputation) must not write into one twice. So a plan that changes a policy would
change bits. No pass that wants gradients makes one, wherever layers are: Trainer and gradient
checkpointing have it so, too. A cache that the caller passes in is an input, and is left alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stronghold.runtime.own_hooks import OwnHook

logger = logging.getLogger("stronghold")


class NoCaches:
    """Of one model, until `close`."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(OwnHook(_without_cache), with_kwargs=True)
            for module in model.modules()
            if _comes_from_transformers(type(module), "PreTrainedModel")
        ]

    def close(self) -> None:
        """Remove the hooks. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled() or any(map(is_cache, (*args, *kwargs.values()))):
        return None
    # Of what is called now: frameworks put other functions in the place of a module's forward.
    names = _names(module.forward)
    if "use_cache" not in names:
        return None
    position = names.index("use_cache")
    given = args[position] if len(args) > position else kwargs.get("use_cache")
    if given:
        _say_once(type(module).__name__)
    if len(args) > position:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


_names_of_methods: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Of the function's parameters, in order; those of a method are looked up once."""
    of_class = getattr(function, "__func__", None)
    found = _names_of_methods.get(of_class) if isinstance(of_class, FunctionType) else None
    if found is None:
        found = tuple(inspect.signature(function).parameters)
        if isinstance(of_class, FunctionType):
            _names_of_methods[of_class] = found
    return found


@functools.cache
def _say_once(name: str) -> None:
    logger.warning(
        "%s was asked for a key-value cache (use_cache=True) while gradients are wanted: none is "
        "made. Call it under torch.no_grad(), or pass a cache of your own as past_key_values.",
        name,
    )


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments without key-value caches: a block that runs twice would write into one
    twice. Transformers' own checkpointing drops them in the same way.
    """
    args = tuple(None if is_cache(value) else value for value in args)
    kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def is_cache(value: Any) -> bool:
    """Whether the value is one of Transformers' key-value caches."""
    return _comes_from_transformers(type(value), "Cache")


def _comes_from_transformers(kind: type, name: str) -> bool:
    # By name: transformers need not be installed, and importing it takes seconds.
    return any(
        base.__name__ == name and base.__module__.startswith("transformers")
        for base in kind.__mro__
    )
