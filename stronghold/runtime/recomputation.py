"""A block's forward that is run again in backward: torch's non-reentrant checkpoint, from hooks.

Owns what the second run needs to be the first one again: its arguments, and the block as it was.
Entered by the training thread in forward and by autograd's in backward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from stronghold.runtime.kept_arguments import put_back, taken
from stronghold.runtime.kept_module import KeptModule


def recomputation(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generator[None, None, None]:
    """A generator: the first `next` opens what stands around the forward, the second closes it.

    Every tensor among the arguments, however deep, goes through torch's hands: it refuses one that
    was written in place meanwhile, and finds the devices whose random states it keeps.
    """
    kept = KeptModule(module, (args, kwargs))
    call, tensors = taken((args, kwargs))

    def again(*tensors: torch.Tensor) -> None:
        args, kwargs = put_back(call, tensors)
        module(*args, **kwargs)

    options: dict[str, Any] = {
        "preserve_rng_state": True,
        "context_fn": lambda: (contextlib.nullcontext(), kept),
        "determinism_check": "default",
        "debug": False,
        "early_stop": True,
    }
    positional = [options[name] for name in _names() if name in options]
    generator: Generator[None, None, None] = _make(again, *positional, *tensors)
    return generator


_make = torch_checkpoint._checkpoint_without_reentrant_generator


@functools.cache
def _names() -> tuple[str, ...]:
    """What this release of torch takes after the function."""
    return tuple(inspect.signature(_make).parameters)[1:]
