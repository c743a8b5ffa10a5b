"""Tables that torch and Transformers keep on modules, parameters and optimizers.

Owns every entry that is written into them. Each function names one private attribute. `table` has
the reasons, versions and tests. The training thread enters, and autograd's thread in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


# -- modules ---------------------------------------------------------------------------------------
def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of the module's direct parameters, by attribute. `module.NAME` reads it, so
    an entry that is written into the table is what `forward` gets."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of the module's direct buffers, by attribute."""
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """True if `torch.compile(module)` returned the module, or `module.compile()` was called."""
    return hasattr(module, "_orig_mod") or is_call_compiled(module)


def is_call_compiled(module: nn.Module) -> bool:
    """True after `module.compile()`."""
    return module._compiled_call_impl is not None


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what a call of the module runs after `module.compile()`."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a call of the module run `call`. None: its own forward, uncompiled."""
    module._compiled_call_impl = call


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's direct buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def hooks_before_forward(module: nn.Module) -> Iterable[Any]:
    """Return the hooks of `register_forward_pre_hook`."""
    return module._forward_pre_hooks.values()


def hooks_after_forward(module: nn.Module) -> dict[int, Any]:
    """Return the hooks of `register_forward_hook` by number. A call reads this table."""
    return module._forward_hooks


def has_gradient_hooks(module: nn.Module) -> bool:
    """True with a hook of `register_full_backward_hook` or `register_full_backward_pre_hook`."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hooks_before_state_dict(module: nn.Module) -> Iterable[Any]:
    """Return the hooks that `register_state_dict_pre_hook` has registered."""
    return module._state_dict_pre_hooks.values()


def register_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Call `hook(module, state_dict, prefix, local_metadata)` when the module has written its
    entries. The public `register_state_dict_post_hook` would write an attribute on `hook`."""
    handle: RemovableHandle = module._register_state_dict_hook(hook)
    return handle


# -- parameters ------------------------------------------------------------------------------------
def hooks_on_gradient(parameter: torch.Tensor) -> dict[int, Any] | None:
    """Return the hooks of `register_hook` by number. None or empty without one."""
    hooks: dict[int, Any] | None = parameter._backward_hooks
    return hooks


def hooks_after_gradient(parameter: torch.Tensor) -> dict[int, Any]:
    """Return the hooks of `register_post_accumulate_grad_hook` by number.

    Autograd calls them in the order of the dict. An entry that is taken out and put back is called
    last.
    """
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


# -- optimizers ------------------------------------------------------------------------------------
def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Write `_opt_called`, which torch's schedules read. Without it they warn that no optimizer
    stepped before them."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# -- Transformers ----------------------------------------------------------------------------------
def build_from_config(model_class: Any) -> Callable[..., nn.Module]:
    """Return the function of a model class that builds a model of a configuration. The classes of
    Transformers' `Auto...` family have a public one."""
    build: Callable[..., nn.Module] = model_class._from_config
    return build
