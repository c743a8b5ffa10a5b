"""Key-value caches of Transformers' models, which training makes none of.

Owns the hooks by which a model's pass that wants gradients makes no cache, and how a cache is
recognised. The training thread enters in forward.

[Note: no cache in training] Transformers' models make a key-value cache in every forward, unless
`use_cache` is False, and training never reads it. Keys and values joined to a cache lie in memory
differently, so that other kernels multiply them and other bits come out. A block that runs twice
(recomputation) must not write into one twice. So a plan that changes a policy would change bits.
No pass that wants gradients makes one, wherever layers are. Trainer and gradient checkpointing do
the same. A cache that the caller passes in is an input, and is left alone.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import nn

from stronghold.config.source import warn_once
from stronghold.streaming.guards import OwnHook


def forbid_caches(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """A pass of the model that wants gradients makes no key-value cache, until `undo` is closed."""
    for module in model.modules():
        if _comes_from_transformers(type(module), "PreTrainedModel"):
            hook = OwnHook(_without_cache)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled() or any(map(is_cache, (*args, *kwargs.values()))):
        return None
    # Of what is called now: frameworks put other functions in the place of a module's forward.
    names = list(inspect.signature(module.forward).parameters)
    if "use_cache" not in names:
        return None
    position = names.index("use_cache")
    given = args[position] if len(args) > position else kwargs.get("use_cache")
    if given:
        warn_once(
            f"{type(module).__name__} was asked for a key-value cache (use_cache=True) while "
            "gradients are wanted: none is made. Call it under torch.no_grad(), or pass a cache of "
            "your own as past_key_values."
        )
    if len(args) > position:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments without empty key-value caches, which training never reads.

    Transformers' own checkpointing drops them in the same way. A cache with keys is an input
    (prefix tuning) and stays.
    """
    args = tuple(None if _is_empty_cache(value) else value for value in args)
    kwargs = {name: None if _is_empty_cache(value) else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _is_empty_cache(value: Any) -> bool:
    return is_cache(value) and not value.get_seq_length()


def is_cache(value: Any) -> bool:
    """Whether the value is one of Transformers' key-value caches."""
    if value is None or isinstance(value, (torch.Tensor, bool, tuple)):
        return False
    return _comes_from_transformers(type(value), "Cache")


def _comes_from_transformers(kind: type, name: str) -> bool:
    # By name: transformers need not be installed, and importing it takes seconds.
    return any(
        base.__name__ == name and base.__module__.startswith("transformers")
        for base in kind.__mro__
    )
