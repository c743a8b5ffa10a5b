"""Key-value caches of Transformers' models. A forward for training makes none.

Owns the hooks that switch caches off, and the rule that recognises a cache. Never changes a cache
that the caller passes in. The training thread enters in forward.

[Note: no cache in training] Transformers' models make a key-value cache in every forward, unless
`use_cache` is False, and training never reads it. Keys and values joined to a cache lie in memory
differently, so that other kernels multiply them and other bits come out. A block that runs twice
(recomputation) must not write into one cache twice. So a cache in some plans alone would change
bits. Hence no forward with gradients makes a cache, whatever the plan. Trainer and gradient
checkpointing do the same. A cache that the caller passes in is an input, and stays.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import nn

from stronghold.config.source import warn_once
from stronghold.train.guards import OwnHook


def forbid_caches(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Make forwards with gradients create no key-value cache, until `undo` is closed."""
    for module in model.modules():
        if _comes_from_transformers(type(module), "PreTrainedModel"):
            hook = OwnHook(_without_cache)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before a forward: set its argument `use_cache` to False. None: nothing changes."""
    if not torch.is_grad_enabled() or any(map(is_cache, (*args, *kwargs.values()))):
        return None
    # Frameworks put other functions in the place of a module's forward: read the present one.
    names = list(inspect.signature(module.forward).parameters)
    if "use_cache" not in names:
        return None
    position = names.index("use_cache")
    is_positional = len(args) > position
    use_cache = args[position] if is_positional else kwargs.get("use_cache")
    if use_cache:
        warn_once(
            f"{type(module).__name__} was asked for a key-value cache (use_cache=True) while "
            "gradients are wanted: none is made. Call it under torch.no_grad(), or pass a cache of "
            "your own as past_key_values."
        )
    if is_positional:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments without empty key-value caches, which training never reads.

    Transformers' own checkpointing drops them in the same way. A cache with keys is an input
    (prefix tuning), and stays.
    """
    args = tuple(map(_without_empty_cache, args))
    kwargs = {name: _without_empty_cache(value) for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _without_empty_cache(value: Any) -> Any:
    is_empty_cache = is_cache(value) and not value.get_seq_length()
    return None if is_empty_cache else value


def is_cache(value: Any) -> bool:
    """True for one of Transformers' key-value caches."""
    if value is None or isinstance(value, (torch.Tensor, bool, tuple)):
        return False
    return _comes_from_transformers(type(value), "Cache")


def _comes_from_transformers(value_type: type, base_name: str) -> bool:
    """True if the type has a base of this name in transformers.

    Names are compared, since transformers need not be installed, and its import takes seconds.
    """
    for base in value_type.__mro__:
        if base.__name__ == base_name and base.__module__.startswith("transformers"):
            return True
    return False
