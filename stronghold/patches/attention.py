"""The replacement of `torch.nn.functional.scaled_dot_product_attention` while an engine lives.

Owns the function that each thread's calls go through. `train.activations` makes these
functions. The training thread enters in forward, and autograd's thread in backward.

[Note: one function, not a mode]
1. A dispatch mode of torch sees every operator of a block. Each of a hundred operators then takes 3
   to 5 us longer.
2. So this one Python function is replaced, and a mode is on inside of it alone.
3. A block may reach its attention in another way: its own import of the function, a compiled part,
   another package's kernel, products written out. Then the whole block is computed again
   (recomputation), and the log has one line.
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
    """Per thread: the function that attention goes through in the block that this thread runs."""

    through: Through | None = None


running = _Running()


def intercepted(plain: Plain) -> Plain:
    """Return the function that replaces `plain`, torch's."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling() or running.through is None:
            return plain(*args, **kwargs)
        return running.through(plain, args, kwargs)

    # Pickle finds a function by these names.
    attention.__module__ = F.__name__
    attention.__name__ = "scaled_dot_product_attention"
    attention.__qualname__ = "scaled_dot_product_attention"
    attention.__doc__ = plain.__doc__
    return attention
