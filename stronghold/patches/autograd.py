"""Calls of autograd and of torch's function dispatch that have no public name.

Owns nothing: each name is one function or class of torch. `table` has the reasons, versions and
tests. The training thread enters, and autograd's thread in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Hooks = tuple[Pack, Unpack]


NO_BACKWARD = -1
# Returns the number of the backward that runs on this thread, NO_BACKWARD outside of one.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
# Returns the node of the graph that autograd runs on this thread.
running_node: Callable[[], Any] = torch._C._current_autograd_node
# True if the running backward will execute a node. RuntimeError for a leaf of torch.autograd.grad.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
# Context manager: inside, no `__torch_function__` of a subclass is called.
without_torch_function: Callable[[], AbstractContextManager[None]] = (
    torch._C.DisableTorchFunctionSubclass
)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has ended. Raises RuntimeError outside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_transformed() -> bool:
    """True inside torch.func's grad, vjp, jacrev, hessian and vmap (function transforms)."""
    return torch._C._functorch.maybe_current_level() is not None


def saved_tensor_hooks() -> Hooks | None:
    """Return the innermost pair of saved-tensor hooks of this thread. None without one."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def pop_saved_tensor_hooks_above(outer: Hooks | None) -> None:
    """Remove the pairs of this thread inside of `outer`. None: all. An interrupt may come in a
    context manager between the push of a pair and its pop."""
    while saved_tensor_hooks() not in (None, outer):
        torch._C._autograd._pop_saved_tensors_default_hooks()
