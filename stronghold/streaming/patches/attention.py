"""The replacement of `torch.nn.functional.scaled_dot_product_attention` while an engine lives.

Owns the function that each thread's calls go through. `streaming.activations.attention` makes these
functions. The training thread enters in forward, and autograd's thread in backward.

[Note: one function, not a mode] Torch's dispatch modes see every operator of a block, at 3 to 5 us
for each of a hundred. So this one Python function is replaced, and a mode is on inside of it alone.
A block that reaches its attention otherwise (its own import of the function, a compiled part,
another package's kernel, products written out) is computed again whole, with one log line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Plain = Callable[..., torch.Tensor]
Through = Callable[[Plain, tuple[Any, ...], dict[str, Any]], torch.Tensor]


class _Running(threading.local):
    through: Through | None = None  # of the block that this thread runs


running = _Running()


def intercepted(plain: Plain) -> Plain:
    """Return the function that replaces `plain`, torch's."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling() or running.through is None:
            return plain(*args, **kwargs)
        return running.through(plain, args, kwargs)

    # Pickle finds a function by these names.
    attention.__module__, attention.__doc__ = F.__name__, plain.__doc__
    attention.__name__ = attention.__qualname__ = "scaled_dot_product_attention"
    return attention
