"""Calls of autograd and of torch's function dispatch that have no public name.

Owns nothing: each name is one function or class of torch. The table of reasons, versions and tests
is in `table`. The training thread enters, and autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # pack and unpack

NO_BACKWARD = -1
# The number of the backward that runs on this thread, NO_BACKWARD outside of one.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
# Shared by the backwards that torch runs as one, as pipeline stages do; None for a single one.
backward_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)
# The node of the graph that autograd runs on this thread.
running_node: Callable[[], Any] = torch._C._current_autograd_node
# Whether the running backward will execute a node. RuntimeError for a leaf of torch.autograd.grad.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
# Context manager: inside, no `__torch_function__` of a subclass is called.
without_torch_function: Callable[[], AbstractContextManager[None]] = (
    torch._C.DisableTorchFunctionSubclass
)
# How many modes of `__torch_function__` are active on this thread.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has ended. RuntimeError outside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_transformed() -> bool:
    """True inside torch.func's grad, vjp, jacrev, hessian and vmap."""
    return torch._C._functorch.maybe_current_level() is not None


def saved_tensor_hooks() -> Hooks | None:
    """The innermost pair of saved-tensor hooks of this thread; None without one."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def push_saved_tensor_hooks(hooks: Hooks) -> None:
    """Make `hooks` the innermost pair of this thread."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def pop_saved_tensor_hooks() -> None:
    """Remove the innermost pair of this thread."""
    torch._C._autograd._pop_saved_tensors_default_hooks()
